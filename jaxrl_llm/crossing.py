"""Brings arrays from the devices of one mesh to those of another that shares none with it."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding


def lies_apart(array: jax.Array, target: NamedSharding) -> bool:
    """Whether an array has no device in common with a sharding."""
    return array.sharding.device_set.isdisjoint(target.device_set)


def cross(array: jax.Array, target: NamedSharding) -> jax.Array:
    """The same array with the sharding `target`, on other devices."""
    return jax.device_put(array, target)
