"""Tiny models shared by the tests of this folder."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig, RopeConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.types import Params


def tiny_config(**changes) -> ModelConfig:
    """Two layers, one with a window, width 32, grouped heads; 61 real entries of a vocabulary of 64."""
    fields = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 61,
        "padded_vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "max_position": 128,
        "norm_eps": 1e-5,
        "rope": RopeConfig(),
        "windows": (None, 5),
        "init_scale": 0.2,
    }
    return ModelConfig(**{**fields, **changes})


def tiny_model(seed: int = 0, **changes) -> tuple[Decoder, Params]:
    decoder = Decoder(tiny_config(**changes))
    return decoder, jax.jit(decoder.init)(jax.random.key(seed))


def one_segment(tokens: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens, positions and segment ids of rows that each hold one sequence."""
    rows, length = tokens.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(positions), jnp.ones((rows, length), jnp.int32)
