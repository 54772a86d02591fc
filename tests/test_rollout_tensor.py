"""Another layout while generating changes nothing that is learned, and may change between two parts of a run."""

import json

import jax
import numpy as np

from jaxrl_llm.observability.metrics import read_metrics
from jaxrl_llm.trainer import Trainer
from tests.test_trainer import ROWS, make_config

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""Of heads that 2, 3 and 6 divide, and a vocabulary that 3 does not."""


def ones(prompt, completion, answer):
    return float(completion.count("1"))


def after_two_steps(tmp_path, name, *tensor_sizes):
    """The parameters that a run on fsdp 3 x tensor 2 has, and its rollouts; with two sizes of ``rollout.tensor`` it is
    resumed after the first step."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    changes = {
        "model.path": "", "model.architecture": SHAPE, "tokenizer.path": "builtin:tiny_addition",
        "mesh.data": 1, "mesh.fsdp": 3, "mesh.tensor": 2, "num_steps": 2, "rollout.num_slots": 4,
        "optimizer.name": "sgd", "optimizer.learning_rate": 0.1,
    }  # fmt: skip
    for step, tensor in enumerate(tensor_sizes, start=3 - len(tensor_sizes)):
        config = make_config(rows, **changes, **{"rollout.tensor": tensor})
        trainer = Trainer(config, tmp_path / name, rewards={"exact": ones}, devices=jax.devices()[:6])
        trainer.total_steps = step
        trainer.train()
    norms = [row["policy/grad_norm"] for row in read_metrics(tmp_path / name) if "policy/grad_norm" in row]
    assert len(norms) == 2 and min(norms) > 1e-3
    samples = (tmp_path / name / "samples.jsonl").read_text().splitlines()
    return jax.device_get(trainer.roles["policy"].params), [json.loads(line)["completion"] for line in samples]


def test_a_smaller_and_then_a_larger_tensor_size_train_what_one_layout_trains(tmp_path):
    """The padding of the vocabulary is of the model alone.

    Caught: one that `rollout.tensor` has a part in, which the second part of the run can't read."""
    expected, samples = after_two_steps(tmp_path, "one layout", 0)
    found, samples_there = after_two_steps(tmp_path, "two", 1, 6)
    assert samples == samples_there and len(set(samples)) > 4
    # The tokens are the same, so the updates are the same programs on the same rows.
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found["embed"]["weight"].shape[0] == 24
