"""Moves arrays from one sharding to another, in buckets of bounded size.

Between disjoint sets of devices `crossing` does it. On the same devices every array goes through a jitted identity
whose output has the wanted sharding: XLA then moves shards between devices by collectives. (``jax.device_put`` between
two shardings in one process assembles the array on the host instead.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.crossing import cross, lies_apart
from jaxrl_llm.sharding import GenerationView, Layout
from jaxrl_llm.types import Params


@dataclasses.dataclass
class Slot:
    """An array on its way.

    Attributes:
      fresh: it does not share the buffers of the parameters that it comes from.
    """

    array: jax.Array
    target: NamedSharding
    fresh: bool


def arrays_of(slots: Any) -> Any:
    """The tree of arrays, once the mover has finished."""
    return jax.tree.map(lambda slot: slot.array, slots, is_leaf=lambda leaf: isinstance(leaf, Slot))


class BucketMover:
    """Collects arrays and moves them to their target in buckets of bounded size.

    Args:
      place: whose `mesh` the results are on.
      layout: of the results.
    """

    def __init__(self, place: GenerationView, layout: Layout, bucket_bytes: int):
        self.place, self.layout, self.bucket_bytes = place, layout, bucket_bytes
        self.pending: list[Slot] = []
        self.pending_bytes = self.moved_bytes = self.copied_bytes = 0

    def add(self, tree: Params, axes: Any, *, fresh: bool = False) -> Any:
        """The tree of slots, to be moved with the bucket that they fall in."""
        return jax.tree.map(lambda array, axis: self._add(array, axis, fresh), tree, axes)

    def add_group(self, tree: Params, axes: Any) -> list[Any]:
        """Slots of a tree whose leaves hold one layer of each pipeline stage, split over the stages: a tree for each.

        The group is gathered as a whole; its layers are then slices on every device.
        """
        first = jax.tree.leaves(tree)[0]
        groups = [self._add_group(leaf, axis) for leaf, axis in zip(jax.tree.leaves(tree), _leaves(axes), strict=True)]
        structure = jax.tree.structure(tree)
        return [jax.tree.unflatten(structure, [slots[stage] for slots in groups]) for stage in range(first.shape[0])]

    def _add(self, array: jax.Array, axis: tuple[str | None, ...], fresh: bool) -> Slot:
        slot = Slot(array, self.layout.sharding(self.place.mesh, axis), fresh)
        self._wait_for(slot)
        return slot

    def _add_group(self, array: jax.Array, axis: tuple[str | None, ...]) -> list[Slot]:
        target = self.layout.sharding(self.place.mesh, axis)
        if lies_apart(array, target):
            whole = NamedSharding(target.mesh, PartitionSpec(None, *target.spec))
            self.moved_bytes += received_bytes(array.shape, array.dtype.itemsize, array.sharding, whole)
            (array,) = cross([array], [whole])
            slots = [Slot(layer, target, fresh=True) for layer in split_program((), target, len(array))(array)]
            for slot in slots:
                self._wait_for(slot)
            return slots
        in_view = self.place.in_view(target.spec)
        steps = self._steps(array, PartitionSpec(None, *in_view))
        self.moved_bytes += received_bytes(array.shape, array.dtype.itemsize, array.sharding, steps[-1])
        one = NamedSharding(self.place.view, in_view)
        slots = [Slot(layer, target, fresh=True) for layer in split_program(steps, one, len(array))(array)]
        for slot in slots:
            self._wait_for(slot)
        return slots

    def _steps(self, array: jax.Array, target: PartitionSpec) -> tuple[NamedSharding, ...]:
        assert isinstance(array.sharding, NamedSharding)
        return tuple(NamedSharding(self.place.view, spec) for spec in self.place.steps(array.sharding.spec, target))

    def _wait_for(self, slot: Slot) -> None:
        self.pending.append(slot)
        self.pending_bytes += slot.array.nbytes
        if self.pending_bytes >= self.bucket_bytes:
            self.flush()

    def flush(self) -> None:
        """Moves what has been added, and waits until it is there."""
        apart = [slot for slot in self.pending if lies_apart(slot.array, slot.target)]
        arrived = cross([slot.array for slot in apart], [slot.target for slot in apart])
        for slot, array in zip(apart, arrived, strict=True):
            source = slot.array
            self.moved_bytes += received_bytes(source.shape, source.dtype.itemsize, source.sharding, slot.target)
            slot.array, slot.fresh = array, True
        for slot in self.pending:
            if slot.array.sharding == slot.target:
                continue
            source, in_view = slot.array, NamedSharding(self.place.view, self.place.in_view(slot.target.spec))
            # Equal shardings need nothing: the same buffers are handed on, and none is copied.
            if not source.sharding.is_equivalent_to(in_view, source.ndim):
                self.moved_bytes += received_bytes(source.shape, source.dtype.itemsize, source.sharding, in_view)
                slot.array, slot.fresh = move_program(self._steps(source, in_view.spec))(source), True
            if self.place.mesh is not self.place.view:
                slot.array = on_mesh_of(slot.target, slot.array)
        jax.block_until_ready([slot.array for slot in self.pending])
        self.copied_bytes += sum(_bytes_on_devices(slot.array) for slot in self.pending if slot.fresh)
        self.pending, self.pending_bytes = [], 0

    def finish(self) -> int:
        """Moves the rest; returns the bytes that devices received."""
        if self.pending:
            self.flush()
        return self.moved_bytes


def _through(array: jax.Array, steps: tuple[NamedSharding, ...]) -> jax.Array:
    for step in steps:
        array = jax.lax.with_sharding_constraint(array, step)
    return array


@functools.cache
def move_program(steps: tuple[NamedSharding, ...]) -> Any:
    """The jitted identity into the last of the shardings, by way of the others."""
    return jax.jit(lambda array: _through(array, steps), out_shardings=steps[-1])


@functools.cache
def split_program(steps: tuple[NamedSharding, ...], one: NamedSharding, stages: int) -> Any:
    """The same, then cut along the first dimension into arrays of the sharding `one`."""

    def split(group: jax.Array) -> list[jax.Array]:
        group = _through(group, steps)  # gathered as a whole: XLA would send slices of a split dimension to all
        return [group[stage] for stage in range(stages)]

    return jax.jit(split, out_shardings=[one] * stages)


def on_mesh_of(target: NamedSharding, array: jax.Array) -> jax.Array:
    """The same buffers as an array of `target`, whose mesh may list the devices in another order."""
    return jax.make_array_from_single_device_arrays(
        array.shape, target, [shard.data for shard in array.addressable_shards]
    )


def _bytes_on_devices(array: jax.Array) -> int:
    """Of all shards, those of other processes too."""
    sharding = array.sharding
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize * len(sharding.device_set)


def received_bytes(
    shape: tuple[int, ...], itemsize: int, source: jax.sharding.Sharding, target: jax.sharding.Sharding
) -> int:
    """Bytes that all devices together receive when an array changes its sharding: the theoretical minimum.

    For each device: the size of its new shard minus the part of it that the device already held.
    """
    if source == target:
        return 0
    before, after = source.devices_indices_map(shape), target.devices_indices_map(shape)
    total = 0
    for device, wanted in after.items():
        size = overlap = 1
        for extent, want, have in zip(shape, wanted, before.get(device, (slice(0, 0),) * len(shape)), strict=True):
            (low, high, _), (old_low, old_high, _) = want.indices(extent), have.indices(extent)
            size *= high - low
            overlap *= max(0, min(high, old_high) - max(low, old_low))
        total += (size - overlap) * itemsize
    return total


def _leaves(axes_tree: Any) -> list[tuple[str | None, ...]]:
    return jax.tree.leaves(axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))
