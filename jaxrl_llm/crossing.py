"""Brings arrays from the devices of one mesh to those of another that has none of them.

Both shardings cut a dimension into equal parts; the greatest common divisor of both makes pieces that lie whole in one
shard of each. The source cuts its shards into pieces, every device of the target receives those of its new shard
straight from a device that has them, and puts them together: it receives its shard once and nothing else, and nothing
goes through the host. (``jax.device_put`` does so where both cut alike; elsewhere it assembles the array on the host.)
What several devices hold is sent by the one that has sent the least, where it can within a process.

Of several processes each has a part of both meshes, and none can put what it has on a device of another. There the
pieces of an array go through one program over the devices of both meshes: rounds of ``ppermute`` in which a device
sends one piece at most and receives one at most. So the same bytes move, and no device holds more than it sends, it
receives, and an empty piece.
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
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import processes

Cell = tuple[int, ...]
"""Along each dimension, a number of pieces or the index of one."""


def lies_apart(array: jax.Array, target: NamedSharding) -> bool:
    """Whether an array has no device in common with a sharding."""
    return array.sharding.device_set.isdisjoint(target.device_set)


def cross(arrays: Sequence[jax.Array], targets: Sequence[NamedSharding]) -> list[jax.Array]:
    """The same arrays in the shardings `targets`, on other devices. They may be on their way when it returns.

    Of several processes all make the same call, and each has devices of both meshes.
    """
    routes = [_route(array.shape, array.sharding, target) for array, target in zip(arrays, targets, strict=True)]
    sent = [route.pieces(array) for route, array in zip(routes, arrays, strict=True)]
    if processes.count() > 1:
        received = [
            route.exchange.received(pieces, array.dtype)
            for route, pieces, array in zip(routes, sent, arrays, strict=True)
        ]
    else:
        put = iter(
            jax.device_put(
                list(itertools.chain(*(pieces.values() for pieces in sent))),
                [device for route in routes for device in route.receivers],
            )
        )
        received = [[next(put) for _ in route.receivers] for route in routes]
    return [route.whole(pieces) for route, pieces in zip(routes, received, strict=True)]


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

    def pieces(self, array: jax.Array) -> dict[int, jax.Array]:
        """What devices of this process send, each on the one that has it, by its place in `senders`."""
        cut = (
            [array]
            if math.prod(self.before) == 1
            else _cut_program(self.source.mesh, self.source.spec, self.before)(array)
        )
        by_device = [{shard.device: shard.data for shard in one.addressable_shards} for one in cut]
        return {
            place: by_device[number][device]
            for place, (number, device) in enumerate(self.senders)
            if device in by_device[number]
        }

    @functools.cached_property
    def exchange(self) -> _Exchange:
        """How several processes send the pieces."""
        return _Exchange.of(self)

    def whole(self, received: list[jax.Array]) -> jax.Array:
        """The array of the target, of the pieces on its devices of this process."""
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
    for device, index in source.devices_indices_map(shape).items():
        for number, cell in enumerate(_cells(index, piece, before)):
            holders.setdefault(cell, []).append((number, device))
    senders, receivers, load = [], [], collections.Counter[Any]()
    for device, index in target.devices_indices_map(shape).items():
        for cell in _cells(index, piece, after):
            sender = min(
                holders[cell], key=lambda holder: (holder[1].process_index != device.process_index, load[holder[1]])
            )
            load[sender[1]] += 1
            senders.append(sender)
            receivers.append(device)
    return _Route(shape, source, target, piece, before, after, tuple(senders), tuple(receivers))


def _cells(index: tuple[slice, ...] | None, piece: Cell, counts: Cell) -> list[Cell]:
    """The pieces of a shard, by their place in the whole array, in row-major order."""
    assert index is not None
    first = [(part.start or 0) // size for part, size in zip(index, piece, strict=True)]
    return list(itertools.product(*(range(start, start + count) for start, count in zip(first, counts, strict=True))))


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The pieces of a route between processes, in rounds.

    Attributes:
      sharding: of an array that has a piece on each device of both meshes, along its first dimension.
      piece, shape: of a piece, and as a part of that array: a number without dimensions becomes one of one.
      rounds: in each, the sender and the receiver of every piece, by their place in the mesh.
      sent, arriving: of the devices of this process, by round: which piece one sends, and which it receives, both by
        the piece's place in `_Route.senders`.
    """

    sharding: NamedSharding
    piece: Cell
    shape: Cell
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    sent: tuple[dict[Any, int], ...]
    arriving: tuple[dict[Any, int], ...]

    @classmethod
    def of(cls, route: _Route) -> _Exchange:
        pairs = [(sender, to) for (_, sender), to in zip(route.senders, route.receivers, strict=True)]
        busy: set[tuple[int, Any]] = set()
        turns: list[list[int]] = []  # of each round, the pieces
        for place, both in enumerate(pairs):
            turn = next(turn for turn in itertools.count() if not any((turn, device) in busy for device in both))
            busy |= {(turn, device) for device in both}
            turns += [[]] * (turn == len(turns))
            turns[turn] = [*turns[turn], place]
        devices: list[Any] = []
        for sharding in (route.source, route.target):
            assert isinstance(sharding.mesh, Mesh)
            devices += sharding.mesh.devices.flat
        number = {device: index for index, device in enumerate(devices)}
        here = processes.index()
        return cls(
            NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device")),
            route.piece,
            route.piece or (1,),
            tuple(tuple((number[pairs[place][0]], number[pairs[place][1]]) for place in turn) for turn in turns),
            *(
                tuple(
                    {pairs[place][end]: place for place in turn if pairs[place][end].process_index == here}
                    for turn in turns
                )
                for end in (0, 1)
            ),
        )

    def received(self, pieces: dict[int, jax.Array], dtype: Any) -> list[jax.Array]:
        """The pieces for the devices of this process, in the order of `_Route.receivers`.

        Args:
          pieces: those that its devices send, of `dtype`.
        """
        whole = (self.shape[0] * self.sharding.mesh.size, *self.shape[1:])
        empty = {shard.device: shard.data for shard in _empty_program(whole, dtype, self.sharding)().addressable_shards}
        parts = []
        for sent in self.sent:
            shards = [
                pieces[sent[device]].reshape(self.shape) if device in sent else nothing
                for device, nothing in empty.items()
            ]
            parts.append(jax.make_array_from_single_device_arrays(whole, self.sharding, shards))
        found: dict[int, jax.Array] = {}
        moved = _permute_program(self.sharding, self.rounds)(parts)
        for part, arriving in zip(moved, self.arriving, strict=True):
            for shard in part.addressable_shards:
                if shard.device in arriving:
                    found[arriving[shard.device]] = shard.data.reshape(self.piece)
        return [found[place] for place in sorted(found)]


@functools.cache
def _empty_program(shape: Cell, dtype: Any, sharding: NamedSharding) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.cache
def _permute_program(sharding: NamedSharding, rounds: tuple[tuple[tuple[int, int], ...], ...]) -> Any:
    def permute(parts: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.ppermute(part, "device", pairs) for part, pairs in zip(parts, rounds, strict=True)]

    specs = [sharding.spec] * len(rounds)
    return jax.jit(jax.shard_map(permute, mesh=sharding.mesh, in_specs=(specs,), out_specs=specs))


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
