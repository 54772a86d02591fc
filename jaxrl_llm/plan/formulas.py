"""Formulas in place of a compiler, to rank many meshes quickly: temporaries of an update, and what programs send."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.plan.collectives import Collective, across_hosts
from jaxrl_llm.plan.programs import device_bytes
from jaxrl_llm.plan.setup import COMPARISON, READING, SCORES, Setup
from jaxrl_llm.sharding import batch_shards
from jaxrl_llm.types import Params
from jaxrl_llm.update import logits_at_once


def temporaries(setup: Setup) -> dict[str, int]:
    """By program of `Setup.programs`, but those of the decoder, whose temporaries are small."""
    found = {f"update of {role}": _of_update(setup, role) for role in setup.trained}
    found |= {one.name: _of_pass(setup, one.role, setup.states[one.role].whole) for one in setup.passes}
    if setup.config.placement.staleness:
        found[COMPARISON] = _of_pass(setup, setup.main, setup.sampler)
    if (teacher := setup.apart_teacher) is not None:
        found[READING] = _of_pass(setup, teacher, setup.states[teacher].whole)
        said = setup.programs[f"update of {setup.main}"].arguments[1][1]
        found[READING] += device_bytes([said.hidden, said.candidates])
    if (scorer := setup.reward_model) is not None:
        mesh, shape, item = scorer.program.mesh, scorer.shape, setup.dtype.itemsize
        tokens = max(scorer.sizes) * scorer.sizes[max(scorer.sizes)] / batch_shards(mesh)
        layer = sum(leaf.size for leaf in jax.tree.leaves(scorer.layers)) / shape.num_layers * item
        found[SCORES] = int(tokens * (8 * shape.hidden_size + 3 * shape.intermediate_size) * item + 2 * layer)
    return found


def _of_update(setup: Setup, role: str) -> int:
    """Float32 gradients, the copy in the compute dtype, what layers keep for the backward pass, one layer's weights and
    activations, and a chunk of logits."""
    model, item = setup.models[role], setup.dtype.itemsize
    shape, mesh = model.decoder.config, model.mesh
    tensor, tokens = mesh.shape["tensor"], _tokens(setup, role)
    gradients = setup.gradient_bytes(role)
    width, mlp = shape.hidden_size, shape.intermediate_size / tensor
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size / tensor
    kept_by_remat = {"full": width, "dots": 2 * width + heads + 2 * mlp, "none": 6 * width + 3 * heads + 4 * mlp}
    layers, kept = shape.num_layers / mesh.shape["pipeline"], kept_by_remat[setup.config.model.remat]
    inputs = 0.0
    if (schedule := model.forward.schedule) is not None:
        # keeps what entered each piece, and computes one again at a time
        inputs = schedule.repeats * tokens * width * item
        tokens, layers = tokens / schedule.micro_batches, layers / schedule.repeats
    residuals = inputs + layers * tokens * kept * item
    copy = _copy(setup, setup.states[role].params)
    layer = tokens * (8 * width + 4 * heads + 6 * mlp) * item + 4 * _layer(setup, role)
    return int(gradients + copy + residuals + layer + 3 * _chunk(setup, role) + 2 * _table(setup, role))


def _of_pass(setup: Setup, role: str, params: Params) -> int:
    """Of a forward pass: the copy in the compute dtype, two layers' weights and one's activations, a chunk of
    logits."""
    model, item = setup.models[role], setup.dtype.itemsize
    shape, tensor, tokens = model.decoder.config, model.mesh.shape["tensor"], _tokens(setup, role)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size / tensor
    if (schedule := model.forward.schedule) is not None:
        tokens /= schedule.micro_batches
    layer = tokens * (6 * shape.hidden_size + heads + 3 * shape.intermediate_size / tensor) * item
    return int(_copy(setup, params) + 2 * _layer(setup, role) + layer + 2 * _chunk(setup, role) + _table(setup, role))


def _tokens(setup: Setup, role: str) -> float:
    """Of a micro-batch, on one device."""
    mesh = setup.models[role].mesh
    shape = setup.row_shapes[mesh]
    return shape.rows_per_micro * shape.row_tokens / (mesh.shape["data"] * mesh.shape["fsdp"])


def _copy(setup: Setup, params: Params) -> int:
    """Of parameters in the compute dtype, where they are in another."""
    itemsize = jax.tree.leaves(params)[0].dtype.itemsize
    return 0 if itemsize == setup.dtype.itemsize else device_bytes(params) * setup.dtype.itemsize // itemsize


def _layer(setup: Setup, role: str) -> float:
    model = setup.models[role]
    split = model.decoder.config.num_layers * model.mesh.shape["tensor"]
    return matrix_parameters(setup, role)[0] / split * setup.dtype.itemsize


def _chunk(setup: Setup, role: str) -> float:
    """Float32 logits that exist at once."""
    model = setup.models[role]
    vocabulary = model.decoder.config.padded_vocab_size / model.mesh.shape["tensor"]
    entries = min(setup.config.training.logprob_vocab_chunk or vocabulary, vocabulary)
    return 0.0 if model.role.head == "values" else logits_at_once(setup.config.training, model.mesh) * entries * 4


def _table(setup: Setup, role: str) -> float:
    model = setup.models[role]
    shape, tensor = model.decoder.config, model.mesh.shape["tensor"]
    return shape.padded_vocab_size * shape.hidden_size / tensor * setup.dtype.itemsize


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
    each direction, and one more where the layer is computed again. Log-probs and values take the forward part."""
    found: dict[str, list[Collective]] = {}
    item = setup.dtype.itemsize
    for role in setup.trained:
        mesh = setup.models[role].mesh
        fsdp, data = mesh.shape["fsdp"], mesh.shape["data"]
        sums = {"none": 4, "dots": 4, "full": 5}[setup.config.model.remat]
        gradients = setup.gradient_bytes(role) * fsdp * item / 4
        layers = setup.models[role].decoder.config.num_layers
        found[f"update of {role}"] = [
            *_forward(setup, role, sums, gathers=2),
            _one("reduce-scatter", ("fsdp",), mesh, gradients * (fsdp - 1) / fsdp, layers),
            _one("all-reduce", ("data",), mesh, _sum_bytes(setup.gradient_bytes(role), data), 1, in_loop=False),
        ]
    found |= {one.name: _forward(setup, one.role, 2, gathers=1) for one in setup.passes}
    if setup.config.placement.staleness:
        found[COMPARISON] = _forward(setup, setup.main, 2, gathers=1)
    if setup.apart_teacher is not None:
        found[READING] = _forward(setup, setup.apart_teacher, 2, gathers=1)
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


def _forward(setup: Setup, role: str, sums: int, gathers: int) -> list[Collective]:
    """Of a micro-batch: gathers of all weights, and so many sums of a layer's activations."""
    model, item = setup.models[role], setup.dtype.itemsize
    shape, mesh = model.decoder.config, model.mesh
    tensor, fsdp, stages = (mesh.shape[axis] for axis in ("tensor", "fsdp", "pipeline"))
    weights = sum(matrix_parameters(setup, role)) * item / tensor / stages
    sums *= shape.num_layers // stages
    summed = _sum_bytes(sums * _tokens(setup, role) * shape.hidden_size * item, tensor)
    return [
        _one("all-gather", ("fsdp",), mesh, gathers * weights * (fsdp - 1) / fsdp, gathers * shape.num_layers),
        _one("all-reduce", ("tensor",), mesh, summed, sums),
    ]


def _sum_bytes(size: float, devices: int) -> float:
    return 2 * size * (devices - 1) / devices


def _one(kind: str, axes: tuple[str, ...], mesh: Mesh, size: float, count: int, in_loop: bool = True) -> Collective:
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    group = places[tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)]
    return Collective(kind, axes, across_hosts(group.ravel().tolist(), mesh), in_loop, int(size), count)
