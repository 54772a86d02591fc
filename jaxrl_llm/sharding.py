"""One mesh, two layouts.

`make_mesh` fixes the order of the devices once. A `Layout` is data: it says over which mesh axes a logical
axis of a parameter is split. `TRAINING` and `GENERATION` are two layouts of the same parameters on the same
devices; `hybrid_engine.py` makes the move between them. Where generation splits matrices over another number of
devices than training, its mesh is another view of the same device array (`generation_view`).

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
from jaxrl_llm.validation import fit_mesh, generation_factors

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


@dataclasses.dataclass(frozen=True)
class GenerationView:
    """The devices of a training mesh as generation uses them.

    Attributes:
      mesh: with the axes `AXES`: `tensor` of the size asked for, the others are replicas.
      view: the same devices in the training mesh's order, each axis divided into an outer and an inner part. One
        program can take arrays of the training mesh and return arrays of the view.
      tensor_axes: those of the view that are `tensor` of `mesh`, from outermost to innermost.
    """

    mesh: Mesh
    view: Mesh
    tensor_axes: tuple[str, ...]

    def in_view(self, spec: PartitionSpec) -> PartitionSpec:
        """The same shards on the same devices; `spec` is of `mesh`."""
        return PartitionSpec(*[self.tensor_axes if entry == "tensor" else entry for entry in spec])

    def steps(self, source: PartitionSpec, target: PartitionSpec) -> tuple[PartitionSpec, ...]:
        """How an array of the training mesh with `source` becomes one of the view with `target`, so that no device
        receives more than it lacks; left alone, XLA gathers a matrix whole before it splits it further.

        Where `tensor` grows: first what devices hold already is cut, then the axes that join `tensor` leave the
        dimensions that they split, last the rest is gathered.
        """
        joining = self.tensor_axes[1:]
        split = [index for index, entry in enumerate(target) if entry == self.tensor_axes]
        if not split or not any(self.view.shape[axis] > 1 for axis in joining):
            return (target,)
        before = [_axes_in(entry) for entry in source] + [()] * (len(target) - len(source))
        parts = [tuple(part for axis in axes for part in (axis, f"{axis}_inner")) for axes in before]
        held = set().union(*parts)
        (dimension,) = split
        cut = [*parts]
        cut[dimension] = ("tensor", *[axis for axis in joining if axis not in held])
        joined = [tuple(axis for axis in axes if axis not in joining) for axes in parts]
        joined[dimension] = self.tensor_axes
        return PartitionSpec(*cut), PartitionSpec(*joined), target


def _axes_in(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def generation_view(mesh: Mesh, tensor: int = 0) -> GenerationView:
    """`mesh` for generation with tensor groups of `tensor` devices; 0 is as many as in training, on `mesh` itself.

    The tensor index of generation begins with that of training, so that a device's new shard of a matrix contains its
    old one, or lies in it: what HybridFlow's grouping does (arXiv:2409.19256, section 5.3). A smaller size keeps the
    outer part of `tensor`, and neighbours become replicas; a larger one adds the inner parts of other axes behind it.

    Raises:
      UserError: the mesh can't be divided so.
    """
    sizes = MeshConfig(**{axis: mesh.shape[axis] for axis in AXES})
    if tensor in (0, sizes.tensor):
        return GenerationView(mesh, mesh, ("tensor",))
    inner = generation_factors(sizes, tensor)
    names = [f"{axis}{part}" for axis in AXES for part in ("", "_inner")]
    shape = [size for axis in AXES for size in (mesh.shape[axis] // inner[axis], inner[axis])]
    view = Mesh(mesh.devices.reshape(shape), names)
    tensor_axes = ("tensor", "data_inner", "pipeline_inner", "fsdp_inner")  # those that split most arrays last
    order = ("data", "pipeline", "fsdp", "tensor_inner", *tensor_axes)
    outer = (view.shape["data"], view.shape["pipeline"], view.shape["fsdp"] * view.shape["tensor_inner"], tensor)
    devices = view.devices.transpose([names.index(name) for name in order]).reshape(outer)
    return GenerationView(Mesh(devices, AXES), view, tensor_axes)


def replica_count(mesh: Mesh) -> int:
    """Number of generation replicas on `mesh`, which is generation's (`GenerationView.mesh`)."""
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

    def shards(self, mesh: Mesh, axis: str) -> int:
        """Over how many devices of `mesh` the logical `axis` is split."""
        return math.prod(mesh.shape[name] for name in _axes_in(self.rules.get(axis)))

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
