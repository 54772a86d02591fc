"""Formulas in place of a compiler, to rank many meshes quickly: temporaries of an update, and what programs send."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_kernels.gpu_compile import HOST_DEVICES
from jaxrl_llm.plan.collectives import Collective
from jaxrl_llm.plan.programs import device_bytes
from jaxrl_llm.plan.setup import Setup
from jaxrl_llm.update import logits_at_once


def temporaries(setup: Setup, role: str) -> int:
    """Of an update: float32 gradients, the copy in the compute dtype, what layers keep for the backward pass, one
    layer's weights and activations, and a chunk of logits."""
    state, shape, mesh = setup.states[role], setup.models[role].decoder.config, setup.mesh
    item, tensor = setup.dtype.itemsize, mesh.shape["tensor"]
    rows = setup.row_shape.rows_per_micro * setup.row_shape.row_tokens
    tokens = rows / (mesh.shape["data"] * mesh.shape["fsdp"])
    gradients = setup.gradient_bytes(role)
    copy = device_bytes(state.params) * item // jax.tree.leaves(state.params)[0].dtype.itemsize
    width, mlp = shape.hidden_size, shape.intermediate_size / tensor
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size / tensor
    kept_by_remat = {"full": width, "dots": 2 * width + heads + 2 * mlp, "none": 6 * width + 3 * heads + 4 * mlp}
    layers, kept = shape.num_layers / mesh.shape["pipeline"], kept_by_remat[setup.config.model.remat]
    inputs = 0.0
    if (schedule := setup.schedule) is not None:  # keeps what entered each piece, and computes one again at a time
        inputs = schedule.repeats * tokens * width * item
        tokens, layers = tokens / schedule.micro_batches, layers / schedule.repeats
    residuals = inputs + layers * tokens * kept * item
    layer = (
        tokens * (8 * width + 4 * heads + 6 * mlp) * item
        + 4 * matrix_parameters(setup, role)[0] / (shape.num_layers * tensor) * item
    )
    chunk = 3 * logits_at_once(setup.config.training, mesh) * shape.padded_vocab_size / tensor * 4
    table = 2 * shape.padded_vocab_size * width / tensor * item
    return int(gradients + copy + residuals + layer + chunk + table)


def matrix_parameters(setup: Setup, role: str) -> tuple[int, int]:
    """Parameters of a role's layers, and of the matrix that makes logits (0 for values)."""
    model = setup.models[role]
    params = setup.states[role].whole
    layers = sum(leaf.size for leaf in jax.tree.leaves(params["blocks"]))
    shape = model.decoder.config
    return layers, 0 if model.role.head == "values" else shape.padded_vocab_size * shape.hidden_size


def sent(setup: Setup) -> dict[str, list[Collective]]:
    """By program, as in `estimate.Estimate`: gathers of weights and scattered sums of gradients over ``fsdp``, one sum
    of gradients over ``data`` when all micro-batches are done, and over ``tensor`` two sums of activations a layer in
    each direction, and one more where the layer is computed again."""
    found: dict[str, list[Collective]] = {}
    mesh, item = setup.mesh, setup.dtype.itemsize
    tensor, fsdp, data = (mesh.shape[axis] for axis in ("tensor", "fsdp", "data"))
    for role in setup.trained:
        shape = setup.models[role].decoder.config
        weights = sum(matrix_parameters(setup, role)) * item / tensor / mesh.shape["pipeline"]
        rows = setup.row_shape.rows_per_micro * setup.row_shape.row_tokens / (data * fsdp)
        sums = {"none": 4, "dots": 4, "full": 5}[setup.config.model.remat] * shape.num_layers // mesh.shape["pipeline"]
        gradients = setup.gradient_bytes(role) * fsdp * item / 4
        found[f"update of {role}"] = [
            _one("all-gather", ("fsdp",), mesh, 2 * weights * (fsdp - 1) / fsdp, 2 * shape.num_layers),
            _one("reduce-scatter", ("fsdp",), mesh, gradients * (fsdp - 1) / fsdp, shape.num_layers),
            _one("all-reduce", ("data",), mesh, _sum_bytes(setup.gradient_bytes(role), data), 1, in_loop=False),
            _one("all-reduce", ("tensor",), mesh, _sum_bytes(sums * rows * shape.hidden_size * item, tensor), sums),
        ]
    if setup.generation is not None:
        shape, mesh = setup.generation.decoder.config, setup.generation.mesh
        tensor, sums = mesh.shape["tensor"], 2 * setup.generation.decoder.config.num_layers + 1
        for name, rows in (
            ("decode", setup.config.rollout.num_slots),
            ("prefill", setup.config.rollout.prefill_tokens),
        ):
            size = _sum_bytes(sums * rows * shape.hidden_size * item, tensor)
            found[name] = [_one("all-reduce", ("tensor",), mesh, size, sums, in_loop=name == "decode")]
    return {name: [one for one in of if one.bytes] for name, of in found.items()}


def _sum_bytes(size: float, devices: int) -> float:
    return 2 * size * (devices - 1) / devices


def _one(kind: str, axes: tuple[str, ...], mesh: Mesh, size: float, count: int, in_loop: bool = True) -> Collective:
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    group = places[tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)]
    return Collective(kind, axes, len(set((group // HOST_DEVICES).ravel().tolist())) > 1, in_loop, int(size), count)
