"""What TRL's trainers say of one fixed batch of a tiny model: the numbers in `trl_numbers.json`.

Made with trl 1.16.0 and torch 2.13.0 on a CPU, in a virtual environment of their own (``pip install trl==1.16.0``):

    python tests/reference/trl_numbers.py > tests/reference/trl_numbers.json

The model's weights and the batch follow from formulas, so that both sides have the same ones; what needs torch or trl
is imported where it is used. Of a gradient only what tells it apart is kept: of each tensor its norm, and its product
with a fixed tensor of the same shape.
"""

import collections
import json
import pathlib
import sys
import tempfile
import types

import numpy as np
import safetensors.numpy

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
EOS = 1
PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 5, 30, 4]]
CHOSEN = [[2, 3, 4, EOS], [14, EOS], [3, 21, 14, 2, 17, EOS], [EOS]]
REJECTED = [[3, 2, EOS], [31, 25, 9, 12, EOS], [2, EOS], [6, 6, 6, EOS]]
COMPLETIONS = [CHOSEN[0], REJECTED[1], CHOSEN[2], REJECTED[3]]
LABELS = [True, False, True, False]

DPO = {
    "sigmoid": {"loss_type": "sigmoid", "beta": 0.6},
    "hinge": {"loss_type": "hinge", "beta": 0.6},
    "ipo": {"loss_type": "ipo", "beta": 0.6},
    "robust": {"loss_type": "robust", "beta": 0.6, "label_smoothing": 0.2},
}
KTO = {"beta": 0.5, "desirable_weight": 0.7, "undesirable_weight": 1.3}

LENGTHS = [5, 1, 3, 7, 4, 6]
"""Tokens of the responses of the GRPO batch, which are padded to `MOST_TOKENS`."""
MOST_TOKENS = 8
ADVANTAGES = [1.2, -0.7, 0.0, -1.5, 0.4, 0.9]
GRPO = {"beta": 0.3, "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 3.0}


def wave(name: str, shape: tuple[int, ...], role: str) -> np.ndarray:
    """Numbers in [-1, 1] without a visible order, in float64; the same everywhere."""
    phase = sum((place + 1) * ord(letter) for place, letter in enumerate(name + role)) % 997
    index = np.arange(np.prod(shape, dtype=int), dtype=np.float64)
    return np.sin(0.37 * index * index + 1.3 * index + phase).reshape(shape)


def shapes() -> dict[str, tuple[int, ...]]:
    """Of the model's tensors, by their Hugging Face names."""
    width, inner, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    queries, keys = (CONFIG[f"num_{kind}_heads"] * CONFIG["head_dim"] for kind in ("attention", "key_value"))
    found = {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return found | {"model.norm.weight": (width,)}


def write_model(folder: pathlib.Path, role: str) -> pathlib.Path:
    """A Hugging Face folder of the policy, or of the reference, which is near it."""
    tensors = {}
    for name, shape in shapes().items():
        base = 1.0 if len(shape) == 1 else 0.0
        values = base + 0.4 * wave(name, shape, "policy")
        if role == "reference":
            values += 0.05 * wave(name, shape, role)
        tensors[name] = values.astype(np.float32)
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def summary(gradient: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Of each tensor its norm, and its product with a fixed one of its shape."""
    return {
        name: [float(np.linalg.norm(values)), float(np.sum(values * wave(name, shape, "direction")))]
        for name, shape in shapes().items()
        for values in [np.asarray(gradient[name], np.float64).reshape(shape)]
    }


def responses(what: str) -> list[np.ndarray]:
    """Log-probs of the GRPO batch: of the policy (``actor``), the sampler's (``old``) and the reference's (``ref``).
    The policy is far from the old one at some tokens, beyond every bound of the ratio."""
    found = []
    for n, length in enumerate(LENGTHS):
        values = -1.5 + wave("base", (length,), str(n))
        if what != "old":
            values = values + (1.6 if what == "actor" else 0.4) * wave(what, (length,), str(n))
        found.append(values.astype(np.float32))
    return found


# --- TRL's side -----------------------------------------------------------------------------------------------------


def _tokenizer():
    """Every id is a word."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": EOS, **{f"t{n}": n for n in range(2, CONFIG["vocab_size"])}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def _text(ids: list[int]) -> str:
    return "".join("<eos>" if n == EOS else f"t{n} " for n in ids)


def _trainer(kind: str, folder: pathlib.Path, rows: list[dict], **options):
    import datasets
    import trl
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder / role) for role in ("policy", "reference")]
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=len(rows),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        **options,
    )
    return getattr(trl, f"{kind}Trainer")(
        models[0],
        models[1],
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=_tokenizer(),
    )


def _numbers(trainer) -> dict:
    """Loss, metrics and gradient of the whole data as one batch."""
    trainer.model.train()
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    wanted = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl")
    return {
        "loss": loss.item(),
        "metrics": {name: metrics[name] for name in wanted if name in metrics},
        "gradient": summary({name: value.grad.numpy() for name, value in trainer.model.named_parameters()}),
    }


def dpo_numbers(folder: pathlib.Path, options: dict) -> dict:
    rows = [
        {"prompt": _text(prompt), "chosen": _text(chosen), "rejected": _text(rejected)}
        for prompt, chosen, rejected in zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ]
    trainer = _trainer("DPO", folder, rows, **{**options, "loss_type": [options["loss_type"]]})
    found = [[row[name] for row in trainer.train_dataset] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
    assert found == [PROMPTS, CHOSEN, REJECTED], found
    return _numbers(trainer)


def kto_numbers(folder: pathlib.Path) -> dict:
    rows = [
        {"prompt": _text(prompt), "completion": _text(completion), "label": label}
        for prompt, completion, label in zip(PROMPTS, COMPLETIONS, LABELS, strict=True)
    ]
    trainer = _trainer("KTO", folder, rows, **KTO)
    assert [row["prompt_ids"] for row in trainer.train_dataset] == PROMPTS
    assert [row["completion_ids"] for row in trainer.train_dataset] == COMPLETIONS
    return _numbers(trainer)


def grpo_numbers(loss_type: str) -> dict:
    """TRL's loss of the fixed log-probs, and its gradient in the policy's, one list a response."""
    import torch
    import trl

    def padded(values: list[np.ndarray]) -> "torch.Tensor":
        return torch.tensor(np.array([np.pad(one, (0, MOST_TOKENS - len(one))) for one in values]))

    actor = padded(responses("actor")).requires_grad_()
    mask = padded([np.ones(length, np.int64) for length in LENGTHS])
    same = types.SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value, sync_gradients=True
    )
    trainer = types.SimpleNamespace(
        accelerator=same,
        args=types.SimpleNamespace(delta=GRPO["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        model=types.SimpleNamespace(training=True),
        beta=GRPO["beta"],
        epsilon_low=GRPO["epsilon_low"],
        epsilon_high=GRPO["epsilon_high"],
        loss_type=loss_type,
        importance_sampling_level="token",
        max_completion_length=MOST_TOKENS,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (actor, torch.zeros_like(actor), None),
    )
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": padded(responses("old")),
        "ref_per_token_logps": padded(responses("ref")),
        "num_items_in_batch": mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert actor.grad is not None
    gradient = [one[:length].tolist() for one, length in zip(actor.grad, LENGTHS, strict=True)]
    return {"loss": loss.item(), "gradient": gradient}


def main() -> dict:
    import torch
    import trl

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for role in ("policy", "reference"):
            write_model(folder / role, role)
        return {
            "versions": {"trl": trl.__version__, "torch": torch.__version__},
            "dpo": {name: dpo_numbers(folder, options) for name, options in DPO.items()},
            "kto": kto_numbers(folder),
            "grpo": {name: grpo_numbers(name) for name in ("grpo", "bnpo", "dapo", "dr_grpo")},
        }


if __name__ == "__main__":
    json.dump(main(), sys.stdout, indent=1)
    sys.stdout.write("\n")
