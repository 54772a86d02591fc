"""Where activations and gathered weights lie on the mesh in context, for XLA's partitioner.

Left alone, the partitioner may follow the weights: it splits the width of activations over ``fsdp`` and adds up
partial products of *all* rows on every device. These constraints say what is meant instead: rows stay split over
``data`` and ``fsdp``, heads, MLP and vocabulary over ``tensor``, and a layer's weights are gathered over ``fsdp``
when the layer runs (ZeRO-3, arXiv:1910.02054).

They act where the project's mesh is in context (``jax.set_mesh``) and its axes are automatic; elsewhere, so under
``shard_map`` or without a mesh, they do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from jaxrl_llm.models.arrangement import AXES
from jaxrl_llm.types import Params

ROW_AXES = ("data", "fsdp")
"""Mesh axes that split the rows of a batch."""

TENSOR_AXIS = "tensor"

_MESH_AXES: dict[str, tuple[str, ...]] = {
    "rows": ROW_AXES,
    "heads": (TENSOR_AXIS,),
    "kv_heads": (TENSOR_AXIS,),
    "mlp": (TENSOR_AXIS,),
    "vocab": (TENSOR_AXIS,),
}


def splitting_axes(**sizes: int) -> tuple[tuple[str, ...] | None, ...] | None:
    """Per logical axis and its length: the mesh axes that split it, None where they do not divide it.

    None as a whole where the project's mesh is not in context or its axes are not automatic.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not {*ROW_AXES, TENSOR_AXIS} <= set(mesh.axis_names) or set(mesh.axis_types) != {AxisType.Auto}:
        return None
    return tuple(_divide(_MESH_AXES.get(axis, ()), length, mesh.shape) for axis, length in sizes.items())


def _divide(names: tuple[str, ...], length: int, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    return names if names and length % math.prod(mesh_shape[name] for name in names) == 0 else None


def place(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains ``x``, whose dimensions carry these logical axes ('rows' or those of a parameter).

    A dimension that the mesh does not divide is left whole, as the parameter it comes from must be.
    """
    if splitting_axes() is None:
        return x
    mesh_shape = jax.sharding.get_abstract_mesh().shape
    entries = [
        _divide(_MESH_AXES.get(axis or "", ()), length, mesh_shape) for axis, length in zip(axes, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def gather_layer(params: Params) -> Params:
    """One layer's weights, gathered over ``fsdp`` and still split over ``tensor``."""

    def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return place(leaf, *AXES["/".join(entry.key for entry in path[-2:])])

    return jax.tree.map_with_path(gather, params)
