"""One mesh, two layouts.

`make_mesh` fixes the order of the devices once. A `Layout` is data: it says over which mesh axes a logical
axis of a parameter is split. `TRAINING` and `GENERATION` are two layouts of the same parameters on the same
mesh, so the move between them needs no change of device order (`hybrid_engine.py` makes it).

Logical axes of parameters: ``layers``, ``embed`` (D), ``heads`` (H), ``kv_heads`` (K), ``head`` (h),
``mlp`` (F), ``vocab`` (V); None is never split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.validation import fit_mesh

AXES = ("data", "pipeline", "fsdp", "tensor")
"""Mesh axes from outermost to innermost: `tensor` groups are neighbours on the fastest links."""

BATCH_AXES = ("data", "fsdp", "pipeline")
"""Rows of a training batch are split over these. The stages of a pipeline share what is not layers: embedding, output
and losses; on its way through the layers a row visits them all."""

REPLICA_AXES = ("data", "pipeline", "fsdp")
"""Each index of these is one generation replica with its own slots and pages."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The project's mesh over `devices` (all devices by default), axes `AXES`, all of type Auto.

    Raises:
      UserError: the sizes in `config` do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = fit_mesh(config, len(devices))
    return Mesh(np.asarray(devices).reshape([getattr(sizes, axis) for axis in AXES]), AXES)


def replica_count(mesh: Mesh) -> int:
    """Number of generation replicas on `mesh`."""
    return math.prod(mesh.shape[axis] for axis in REPLICA_AXES)


def batch_shards(mesh: Mesh) -> int:
    """Over how many shards the rows of a training batch are split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Logical axis -> mesh axis (or a tuple of them); an axis that is not named is not split."""

    name: str
    rules: Mapping[str, str | tuple[str, ...]]

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions carry the logical `axes`."""
        return PartitionSpec(*[self.rules.get(axis) if axis else None for axis in axes])

    def sharding(self, mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
        return NamedSharding(mesh, self.spec(axes))

    def shardings(self, mesh: Mesh, axes_tree: Any) -> Any:
        """A tree of shardings for a tree whose leaves are tuples of logical axes."""
        return jax.tree.map(
            lambda axes: self.sharding(mesh, axes), axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple)
        )


TRAINING = Layout(
    "training",
    MappingProxyType(
        {
            "layers": "pipeline",
            "embed": "fsdp",
            "heads": "tensor",
            "kv_heads": "tensor",
            "mlp": "tensor",
            "vocab": "tensor",
        }
    ),
)
GENERATION = Layout(
    "generation",
    MappingProxyType({"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}),
)


def batch_sharding(mesh: Mesh, ndim: int = 2, row_dimension: int = 0) -> NamedSharding:
    """Sharding of batch arrays: dimension `row_dimension` over `BATCH_AXES`, the rest whole."""
    spec: list[Any] = [None] * ndim
    spec[row_dimension] = BATCH_AXES
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
