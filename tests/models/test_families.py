"""Every family against transformers and torch, on small random models: config, weights, logits, and back."""

import json
import textwrap

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import registry
from jaxrl_llm.models.config import RopeConfig
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.loading import load_config, load_model
from jaxrl_llm.models.registry import FAMILIES, config_from_hf
from tests.cases import case
from tests.models.tiny import one_segment

SHAPE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _rope(kind: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_llama3": ("llama", LLAMA3),
    "llama_linear": ("llama", _rope("linear", factor=3.0)),
    "llama_dynamic": ("llama", _rope("dynamic", factor=3.0)),
    "llama_yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama_yarn_mscale": (
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.0, truncate=False),
    ),
    "llama_head_80": ("llama", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama_head_96": ("llama", {"head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "mistral_no_window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3_tied": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
}


def _torch_model(name: str):
    """A transformers model with every weight random: a bias or norm left at 0 or 1 would hide that it is ignored."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes}, attn_implementation="eager")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _torch_logits(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_both_ways(tmp_path, name):
    """Load what transformers wrote: logits within 1e-4. Export, and transformers reads it back: within 1e-4 again,
    and the same weights bit for bit. Seen to catch: the biases of Qwen2 or the q/k norm of Qwen3 ignored; the window
    one off; a projection transposed; head_dim derived from the width."""
    from transformers import AutoModelForCausalLM

    model = _torch_model(name)
    model.save_pretrained(tmp_path / "from_torch")
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 20))
    expected = _torch_logits(model, tokens)

    decoder, params = load_model(tmp_path / "from_torch", vocab_multiple=8)
    assert decoder.config.padded_vocab_size == 72
    forward = jax.jit(lambda params, *row: decoder.logits(params, decoder.hidden(params, *row)))
    logits = np.asarray(forward(params, *one_segment(tokens)))
    assert np.all(logits[..., SHAPE["vocab_size"] :] == -np.inf)
    np.testing.assert_allclose(logits[..., : SHAPE["vocab_size"]], expected, atol=1e-4)

    export_model(tmp_path / "exported", decoder, params, None)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager").eval()
    np.testing.assert_allclose(_torch_logits(back, tokens), expected, atol=1e-4)
    weights = back.state_dict()
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(weights[key].numpy(), value.numpy(), err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_config_survives_the_way_back(tmp_path, name):
    """config.json -> ModelConfig -> config.json -> ModelConfig changes nothing but the keys kept aside."""
    model_type, changes = MODELS[name]
    architecture = {family.model_type: family.architecture for family in FAMILIES.values()}[model_type]
    hf = {**SHAPE, **changes, "architectures": [architecture], "model_type": model_type, "kept_aside": [1, 2]}
    config = config_from_hf(hf, "test")
    written = FAMILIES[architecture].to_hf(config)
    assert written["kept_aside"] == [1, 2]
    again = config_from_hf(json.loads(json.dumps(written)), "test")
    fields = {key: value for key, value in vars(config).items() if key != "extra_json"}
    assert fields == {key: value for key, value in vars(again).items() if key != "extra_json"}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_are_those_of_transformers(architecture):
    """A key that config.json lacks means what the Hugging Face class says. Seen to catch: a default forgotten
    (Qwen3's head size of 128, Mistral's window of 4096)."""
    from transformers import AutoConfig

    family = FAMILIES[architecture]
    given = {"vocab_size": 67, "hidden_size": 512, "intermediate_size": 48, "num_hidden_layers": 3,
             "num_attention_heads": 64}  # fmt: skip
    ours = config_from_hf({**given, "architectures": [architecture]}, "test")
    full = AutoConfig.for_model(family.model_type, **given).to_dict()
    theirs = config_from_hf({**full, "architectures": [architecture]}, "test")
    fields = {key: value for key, value in vars(ours).items() if key != "extra_json"}
    assert fields == {key: value for key, value in vars(theirs).items() if key != "extra_json"}


def test_head_size_of_qwen3_comes_from_the_config_case_k17():
    given, expected = case("K17")["input"]["qwen3_0p6b"], case("K17")["expected"]
    config = config_from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": given["hidden"],
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": given["heads"],
            "num_key_value_heads": given["kv_heads"], "head_dim": given["head_dim"],
        },
        "test",
    )  # fmt: skip
    from jaxrl_llm.models.tensors import sizes_of

    rules = {rule.path: rule for rule in FAMILIES[config.architecture].rules(config)}
    sizes = sizes_of(config)
    assert rules["attention/q"].file_shape(sizes) == (expected["q_proj_out"], given["hidden"])
    assert rules["attention/k"].file_shape(sizes) == (expected["k_proj_out"], given["hidden"])
    assert rules["attention/o"].file_shape(sizes) == (given["hidden"], expected["o_proj_in"])


def test_context_of_dynamic_rope_is_the_original_one():
    """Beyond it a cached key would have been rotated with another base than a full forward uses."""
    hf = {**SHAPE, **_rope("dynamic", factor=4.0), "architectures": ["LlamaForCausalLM"]}
    config = config_from_hf(hf, "test")
    assert config.max_position == config.rope.original_max_position == SHAPE["max_position_embeddings"]


def test_keys_of_transformers_4():
    """rope_theta and rope_scaling, with the older name of the type."""
    hf = {**SHAPE, "architectures": ["LlamaForCausalLM"], "rope_theta": 5e5,
          "rope_scaling": {"type": "linear", "factor": 2}}  # fmt: skip
    assert config_from_hf(hf, "test").rope == RopeConfig(theta=5e5, type="linear", factor=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported are LlamaForCausalLM, Mistral"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers = 10001; at most 10000 are read"),
        ({"num_key_value_heads": 3}, "4 query heads and 3 key/value heads"),
        (_rope("longrope", factor=2.0), "'longrope'; supported are"),
        (_rope("default", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (_rope("default", mrope_section=[1, 2]), "mrope_section"),
    ],
)
def test_what_would_change_the_model_silently_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        config_from_hf({**SHAPE, "architectures": ["LlamaForCausalLM"], **changes}, "test")


def test_the_example_of_the_registry_is_a_family(tmp_path, monkeypatch):
    """Its code as it stands, on a Qwen2 whose tensors have its names: the logits of transformers, and the same file
    back. Caught: an example that is not up to date; a rule that reads the turned matrix as the others; a config that
    forgets the biases when it is read or written."""
    names = {}
    exec(textwrap.dedent(registry.__doc__.partition("the other way round::\n")[2]), names)
    monkeypatch.setitem(FAMILIES, "NewForCausalLM", names["NEW"])
    model = _torch_model("qwen2")
    weights = {}
    for key, value in model.state_dict().items():
        if "down_proj" in key:
            key, value = key.replace("down_proj", "down"), value.T
        key = key.replace("model.layers.", "model.blocks.").replace("self_attn.", "attention.")
        weights[key] = np.ascontiguousarray(value.numpy())
    hf = {**SHAPE, "architectures": ["NewForCausalLM"], "model_type": "new", "use_qkv_bias": True}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(hf))
    save_file(weights, tmp_path / "model" / "model.safetensors")

    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 20))
    decoder, params = load_model(tmp_path / "model")
    logits = jax.jit(lambda params, *row: decoder.logits(params, decoder.hidden(params, *row)))(
        params, *one_segment(tokens)
    )
    np.testing.assert_allclose(np.asarray(logits)[..., : SHAPE["vocab_size"]], _torch_logits(model, tokens), atol=1e-4)
    export_model(tmp_path / "exported", decoder, params, None)
    back = load_file(tmp_path / "exported" / "model.safetensors")
    assert back.keys() == weights.keys()
    for key, value in weights.items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)
    assert load_config(tmp_path / "exported").qkv_bias


def test_end_of_sequence_ids_of_both_files(tmp_path):
    """Seen to catch: generation_config.json ignored (Llama 3 and Qwen2.5 end turns with an id named only there)."""
    hf = {**SHAPE, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert load_config(tmp_path).eos_token_ids == (2, 5)
