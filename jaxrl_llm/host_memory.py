"""Arrays that rest in the host's memory, as shardings and inside a jitted program.

A program takes and returns them where they rest, and says itself when a piece of one goes to the devices and back: the
type of a traced array knows its memory. XLA makes slices that are moved of slices that are fetched, so that only the
pieces take memory of the devices.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

HOST = "pinned_host"
"""The memory kind, as JAX calls it, that devices copy to and from fastest."""


def host_sharding(sharding: Sharding) -> NamedSharding:
    """The same shards in the host's memory. Of devices that are only compiled for, which know of no memories, it is
    one over the abstract mesh: programs take that for the mesh in context."""
    assert isinstance(sharding, NamedSharding)
    found = NamedSharding(sharding.mesh, sharding.spec, memory_kind=HOST)
    return found if on_host(found) else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)


def on_host(sharding: Sharding) -> bool:
    return sharding.memory_kind == HOST


def rests_on_host(leaf: jax.Array) -> bool:
    """Of an array inside a program."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def fetched(tree: Any) -> Any:
    """On the devices, inside a program; what is there is handed on."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if rests_on_host(leaf) else leaf, tree
    )


def put_back(tree: Any, like: Any) -> Any:
    """Each array in the memory where that of ``like`` is, inside a program."""
    return jax.tree.map(
        lambda leaf, old: jax.device_put(leaf, jax.memory.Space.Host) if rests_on_host(old) else leaf, tree, like
    )
