"""Device memory of one update against the length of its rows, by algorithm, from the compiler's own analysis.

Nothing runs and no weights are made: the programs are those of training, compiled for abstract arrays. Their temporary
memory is what an update needs beside parameters, optimizer state and the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.config import MeshConfig, OptimizerConfig
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.value_head import abstract_value_params, value_axes
from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.sharding import TRAINING, make_mesh
from jaxrl_llm.types import Rows

LENGTHS = (512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (64, 128)

PROGRAMS = {"grpo": ("grpo", "policy"), "ppo policy": ("ppo", "policy"), "ppo critic": ("ppo", "critic"),
            "dpo": ("dpo", "policy")}  # fmt: skip
"""Columns of the table: an algorithm, and the role whose update it is."""


def temporary_bytes(config: ModelConfig, algorithm: str, role: str, row_tokens: int) -> int:
    """Of one micro-batch of one row in float32, with layers computed again in the backward pass."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1), jax.devices()[:1])
    entry, decoder = ALGORITHMS[algorithm], Decoder(config)
    options = entry.options()
    is_critic = role == "critic"
    params = abstract_value_params(decoder) if is_critic else decoder.abstract_params()
    axes = value_axes(decoder) if is_critic else decoder.logical_axes()
    optimizer = make_optimizer(OptimizerConfig(), 100)
    shardings = update.role_shardings_of(params, optimizer, TRAINING.shardings(mesh, axes), mesh)
    forward = update.Forward(
        decoder, 1.0, jnp.float32, "full", 1024, unroll=False, head="values" if is_critic else "tokens"
    )
    program = update.make_update(forward, entry, options, optimizer, 1.0, shardings, mesh, name=role)
    fields = dict(vars(Rows.zeros((1, 1, row_tokens), entry.extras(options))))
    state = update.RoleState(params, jax.eval_shape(optimizer.init, params))
    counts = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)

    def step(state: update.RoleState, fields: dict[str, Any], *counts: Any) -> Any:
        return program.__wrapped__(state, (None, None), Rows(**fields), *counts, old_is_actor=algorithm != "ppo")

    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=0).lower(state, fields, *counts).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "the CPU and GPU compilers have one"
    return analysis.temp_size_in_bytes


def measure(config: ModelConfig, lengths: tuple[int, ...]) -> Iterator[dict[str, float]]:
    """A row of the table for each length, in GiB, and what one float32 array of tokens times vocabulary would take."""
    for length in lengths:
        row = {"row tokens": float(length)}
        row |= {
            name: temporary_bytes(config, algorithm, role, length) / 2**30
            for name, (algorithm, role) in PROGRAMS.items()
        }
        yield row | {"tokens x vocabulary": length * config.padded_vocab_size * 4 / 2**30}
