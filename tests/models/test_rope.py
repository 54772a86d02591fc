"""Rotary frequencies against the cases and against transformers; the rotation itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import rope as rope_module
from jaxrl_llm.models.config import RopeConfig
from jaxrl_llm.models.rope import rope_frequencies, rope_tables, rotate, yarn_correction_range
from tests.cases import case


def test_rotation_is_half_split_case_k11(monkeypatch):
    """Both forms of the rotation, of the CPU and of others. Seen to catch: the sign of the first half dropped."""
    given, expected = case("K11")["input"], case("K11")["expected"]
    config = RopeConfig(theta=given["theta"])
    x = jnp.asarray(given["x"], jnp.float32)[None, None, :]
    tables = rope_tables(config, given["head_dim"], jnp.asarray([given["position"]]))
    np.testing.assert_allclose(rope_frequencies(config, given["head_dim"])[0], expected["inv_freq"], rtol=1e-7)
    for on_cpu in (True, False):
        monkeypatch.setattr(rope_module, "compiles_for_cpu", lambda on_cpu=on_cpu: on_cpu)
        np.testing.assert_allclose(np.asarray(rotate(x, tables))[0, 0], expected["half_split"], atol=1e-6)


def test_dynamic_base_grows_only_beyond_the_context_case_k13():
    """Seen to catch: the base changed within the original length."""
    given, expected = case("K13")["input"], case("K13")["expected"]
    config = RopeConfig(
        theta=given["theta"], type="dynamic", factor=given["factor"],
        original_max_position=given["max_position_embeddings"],
    )  # fmt: skip
    for length, frequencies in zip(given["seq_len"], expected["inv_freq"], strict=True):
        actual, factor = rope_frequencies(config, given["head_dim"], length)
        np.testing.assert_allclose(actual, frequencies, rtol=1e-6)
        assert factor == 1.0


def test_yarn_case_k15():
    """Seen to catch: the factor's order of precedence (mscale before the explicit one); truncation left out."""
    given, expected = case("K15")["input"], case("K15")["expected"]

    def config(**changes) -> RopeConfig:
        fields = {
            "theta": given["theta"], "type": "yarn", "factor": given["factor"],
            "original_max_position": given["original_max_position_embeddings"],
            "beta_fast": given["beta_fast"], "beta_slow": given["beta_slow"],
        }  # fmt: skip
        return RopeConfig(**{**fields, **changes})

    frequencies, factor = rope_frequencies(config(), given["head_dim"])
    np.testing.assert_allclose(frequencies, expected["inv_freq"], rtol=1e-7)
    assert list(yarn_correction_range(config(), given["head_dim"])) == expected["correction_range"]
    factors = {
        "attention_factor": config(),
        "attention_factor_explicit_1": config(attention_factor=1.0, mscale=0.707, mscale_all_dim=1.0),
        "attention_factor_mscale_1_1": config(mscale=1.0, mscale_all_dim=1.0),
        "attention_factor_mscale_0p707_1": config(mscale=0.707, mscale_all_dim=1.0),
        "attention_factor_factor_16": config(factor=16.0),
    }
    for name, variant in factors.items():
        assert rope_frequencies(variant, given["head_dim"])[1] == pytest.approx(expected[name], abs=1e-7)
    cos, _ = rope_tables(config(), given["head_dim"], jnp.asarray([0]))
    np.testing.assert_allclose(np.asarray(cos), factor, rtol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    ],
    ids=lambda parameters: parameters["rope_type"],
)  # fmt: skip
def test_equals_transformers(parameters):
    """Head sizes 64, 80 and 96, at a context of 256 tokens."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from jaxrl_llm.models.registry import config_from_hf

    for head_size in (64, 80, 96):
        hf = LlamaConfig(
            hidden_size=2 * head_size, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=256,
            architectures=["LlamaForCausalLM"], rope_parameters={**parameters, "rope_theta": 500000.0},
        )  # fmt: skip
        frequencies, factor = rope_frequencies(config_from_hf(hf.to_dict(), "test").rope, head_size)
        expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, "cpu")
        np.testing.assert_allclose(frequencies, expected.numpy(), rtol=2e-6)
        assert factor == pytest.approx(expected_factor)


def test_unknown_types_and_missing_lengths_are_refused():
    with pytest.raises(UserError, match="'longrope'; supported are default, linear"):
        RopeConfig(type="longrope")
    with pytest.raises(UserError, match="needs original_max_position_embeddings"):
        RopeConfig(type="llama3", factor=8.0)
