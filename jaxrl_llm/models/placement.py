"""Where activations and gathered weights lie on the mesh in context, for XLA's partitioner.

Left alone, the partitioner may follow the weights: it splits the width of activations over ``fsdp`` and adds up
partial products of *all* rows on every device. These constraints say what is meant instead: rows stay split over
``data``, ``fsdp`` and ``pipeline``, heads, MLP and vocabulary over ``tensor``, and a layer's weights are gathered over
``fsdp`` when the layer runs (ZeRO-3, arXiv:1910.02054). Within a stage of a pipeline (``pipeline.py``), where that axis
is manual, rows are split over the other two.

Sequence parallelism (arXiv:2205.05198) splits tokens over ``tensor`` as well where no matrix splits them: what is added
up from layer to layer, and its norms.

An update runs the rows of each index of ``data`` by themselves (``update.py``): there that axis is manual, and what is
said here is said of the others.

They act where the project's mesh is in context (``jax.set_mesh``) and its other axes are automatic; elsewhere, so under
``shard_map`` over all of them or without a mesh, they do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.arrangement import AXES
from jaxrl_llm.types import Params

DATA_AXIS = "data"
PIPELINE_AXIS = "pipeline"

ROW_AXES = (DATA_AXIS, "fsdp", PIPELINE_AXIS)
"""Mesh axes that split the rows of a batch."""

TENSOR_AXIS = "tensor"

_MESH_AXES: dict[str, tuple[str, ...]] = {
    "rows": ROW_AXES,
    "sequence": (*ROW_AXES, TENSOR_AXIS),
    "micro_batches": (PIPELINE_AXIS,),
    "rows_of_micro_batch": (DATA_AXIS, "fsdp"),
    "heads": (TENSOR_AXIS,),
    "kv_heads": (TENSOR_AXIS,),
    "mlp": (TENSOR_AXIS,),
    "vocab": (TENSOR_AXIS,),
}


def splitting_axes(**sizes: int) -> tuple[tuple[str, ...] | None, ...] | None:
    """Per logical axis and its length: the mesh axes that split it, None where they do not divide it.

    None as a whole where the project's mesh is not in context or its axes are not automatic.
    """
    sizes_by_name = _automatic()
    if sizes_by_name is None:
        return None
    return tuple(_divide(_MESH_AXES.get(axis, ()), length, sizes_by_name) for axis, length in sizes.items())


def pipeline_stages() -> int:
    """Into how many stages the mesh in context splits the layers; 1 within a stage, or without the project's mesh."""
    return (_automatic() or {}).get(PIPELINE_AXIS, 1)


def row_shards() -> int:
    """Over how many devices a stage splits the rows of a micro-batch."""
    sizes = _automatic() or {}
    return math.prod(sizes.get(name, 1) for name in _MESH_AXES["rows_of_micro_batch"])


def _automatic() -> dict[str, int] | None:
    """Size by name of the mesh's axes, without a manual ``data`` or ``pipeline``; None where the others are not as they
    must be."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = {str(name): kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}
    if not {DATA_AXIS, "fsdp", TENSOR_AXIS} <= set(kinds):
        return None
    for name in (DATA_AXIS, PIPELINE_AXIS):
        if kinds.get(name) == AxisType.Manual:
            del kinds[name]
    if set(kinds.values()) != {AxisType.Auto}:
        return None
    return {name: mesh.shape[name] for name in kinds}


def _divide(names: tuple[str, ...], length: int, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    names = tuple(name for name in names if name in mesh_shape)
    return names if names and length % math.prod(mesh_shape[name] for name in names) == 0 else None


def place(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains ``x``, whose dimensions carry these logical axes ('rows' or those of a parameter).

    A dimension that the mesh does not divide is left whole, as the parameter it comes from must be.
    """
    return _constrain(x, [_MESH_AXES.get(axis or "", ()) for axis in axes])


def _constrain(x: jax.Array, names: list[tuple[str, ...]]) -> jax.Array:
    mesh_shape = _automatic()
    if mesh_shape is None:
        return x
    entries = [_divide(axes, length, mesh_shape) for axes, length in zip(names, x.shape, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def look_up(table: Float[Array, "V D"], tokens: Int[Array, "*n"]) -> Float[Array, "*n D"]:
    """Embeddings of tokens, whose first dimension is that of a batch's rows; ids beyond the table read its last row.

    Where ``tensor`` splits the vocabulary, each part looks up what it holds, and the parts are added up over
    ``tensor``. XLA makes the same of a lookup in the whole table; but that of jax 0.12 fails a check of its partitioner
    at it, and the process ends, where ``data`` is manual and ``fsdp`` splits the tokens.
    """
    table = place(table, "vocab", None)
    (axes,) = splitting_axes(vocab=table.shape[0]) or (None,)
    count = 1 if axes is None else jax.sharding.get_abstract_mesh().shape[axes[0]]
    if count == 1:
        return jnp.take(table, tokens, axis=0, mode="clip")
    size = table.shape[0] // count
    tokens = jnp.clip(tokens, 0, table.shape[0] - 1)

    def within(part: Float[Array, "v D"], first: Int[Array, ""]) -> Float[Array, "*n D"]:
        own = tokens - first
        return jnp.where(((own >= 0) & (own < size))[..., None], jnp.take(part, own, axis=0, mode="clip"), 0)

    parts = place(table.reshape(count, size, -1), "vocab", None, None)
    found = jax.vmap(within)(parts, jnp.arange(count, dtype=tokens.dtype) * size)
    # Of each row all parts but one are zeros: the sum needs no float32, which would be twice the bytes of bfloat16.
    return jax.lax.reduce_sum(place(found, "vocab", "rows", *[None] * tokens.ndim), (0,))


def gather_layer(params: Params) -> Params:
    """One layer's weights, gathered over ``fsdp`` and still split over ``tensor``."""

    def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return place(leaf, *AXES["/".join(entry.key for entry in path[-2:])])

    return jax.tree.map_with_path(gather, params)


def place_weights(params: Params) -> Params:
    """Weights of layers, with any dimensions in front, split as at rest: over ``fsdp`` and ``tensor``."""

    def split(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        axes = AXES["/".join(entry.key for entry in path[-2:])]
        names = [("fsdp",) if axis == "embed" else _MESH_AXES.get(axis or "", ()) for axis in axes]
        return _constrain(leaf, [()] * (leaf.ndim - len(axes)) + names)

    return jax.tree.map_with_path(split, params)
