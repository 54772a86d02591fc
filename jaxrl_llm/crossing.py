"""Brings arrays from the devices of one mesh to those of another that has none of them, in one process.

Both shardings cut a dimension into equal parts; the greatest common divisor of both makes pieces that lie whole in one
shard of each. The source cuts its shards into pieces, every device of the target receives those of its new shard
straight from a device that has them, and puts them together: it receives its shard once and nothing else, and nothing
goes through the host. (``jax.device_put`` does so where both cut alike; elsewhere it assembles the array on the host.)
What several devices hold is sent by the one that has sent the least.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

Cell = tuple[int, ...]
"""Along each dimension, a number of pieces or the index of one."""


def lies_apart(array: jax.Array, target: NamedSharding) -> bool:
    """Whether an array has no device in common with a sharding."""
    return array.sharding.device_set.isdisjoint(target.device_set)


def cross(arrays: Sequence[jax.Array], targets: Sequence[NamedSharding]) -> list[jax.Array]:
    """The same arrays in the shardings `targets`, on other devices. They may be on their way when it returns."""
    routes = [_route(array.shape, array.sharding, target) for array, target in zip(arrays, targets, strict=True)]
    sent = [route.pieces(array) for route, array in zip(routes, arrays, strict=True)]
    received = iter(
        jax.device_put(list(itertools.chain(*sent)), [device for route in routes for device in route.receivers])
    )
    return [route.whole([next(received) for _ in route.receivers]) for route in routes]


@dataclasses.dataclass(frozen=True)
class _Route:
    """From one sharding of an array to another.

    Attributes:
      piece: its shape.
      before, after: how many pieces a shard of the source and of the target is cut into.
      senders: for each piece that is sent, its number within the shard and the device that has it.
      receivers: the device that each of them goes to; those of one device follow each other, the pieces of its shard in
        row-major order.
    """

    shape: tuple[int, ...]
    source: NamedSharding
    target: NamedSharding
    piece: Cell
    before: Cell
    after: Cell
    senders: tuple[tuple[int, Any], ...]
    receivers: tuple[Any, ...]

    def pieces(self, array: jax.Array) -> list[jax.Array]:
        """What is sent, each on the device that has it."""
        cut = (
            [array]
            if math.prod(self.before) == 1
            else _cut_program(self.source.mesh, self.source.spec, self.before)(array)
        )
        by_device = [{shard.device: shard.data for shard in one.addressable_shards} for one in cut]
        return [by_device[number][device] for number, device in self.senders]

    def whole(self, received: list[jax.Array]) -> jax.Array:
        """The array of the target, of the pieces on its devices."""
        count = math.prod(self.after)
        shape = tuple(extent // parts for extent, parts in zip(self.shape, self.after, strict=True))
        parts = [
            jax.make_array_from_single_device_arrays(shape, self.target, received[start::count])
            for start in range(count)
        ]
        return parts[0] if count == 1 else _join_program(self.target, self.after)(parts)


@functools.cache
def _route(shape: tuple[int, ...], source: NamedSharding, target: NamedSharding) -> _Route:
    old, new = source.shard_shape(shape), target.shard_shape(shape)
    piece = tuple(math.gcd(*both) for both in zip(old, new, strict=True))
    before, after = (tuple(size // part for size, part in zip(shard, piece, strict=True)) for shard in (old, new))
    holders: dict[Cell, list[tuple[int, Any]]] = {}
    for device, index in source.addressable_devices_indices_map(shape).items():
        for number, cell in enumerate(_cells(index, piece, before)):
            holders.setdefault(cell, []).append((number, device))
    senders, receivers, load = [], [], collections.Counter[Any]()
    for device, index in target.addressable_devices_indices_map(shape).items():
        for cell in _cells(index, piece, after):
            sender = min(holders[cell], key=lambda holder: load[holder[1]])
            load[sender[1]] += 1
            senders.append(sender)
            receivers.append(device)
    return _Route(shape, source, target, piece, before, after, tuple(senders), tuple(receivers))


def _cells(index: tuple[slice, ...] | None, piece: Cell, counts: Cell) -> list[Cell]:
    """The pieces of a shard, by their place in the whole array, in row-major order."""
    assert index is not None
    first = [(part.start or 0) // size for part, size in zip(index, piece, strict=True)]
    return list(itertools.product(*(range(start, start + count) for start, count in zip(first, counts, strict=True))))


@functools.cache
def _cut_program(mesh: Any, spec: Any, counts: Cell) -> Any:
    def cut(shard: jax.Array) -> list[jax.Array]:
        parts = [shard]
        for dimension, count in enumerate(counts):
            parts = [piece for part in parts for piece in jnp.split(part, count, dimension)]
        return parts

    specs = [spec] * math.prod(counts)
    return jax.jit(jax.shard_map(cut, mesh=mesh, in_specs=spec, out_specs=specs))


@functools.cache
def _join_program(target: NamedSharding, counts: Cell) -> Any:
    def join(parts: list[jax.Array]) -> jax.Array:
        for dimension, count in reversed(list(enumerate(counts))):
            starts = range(0, len(parts), count)
            parts = [jnp.concatenate(parts[start : start + count], dimension) for start in starts]
        return parts[0]

    return jax.jit(
        jax.shard_map(join, mesh=target.mesh, in_specs=([target.spec] * math.prod(counts),), out_specs=target.spec)
    )
