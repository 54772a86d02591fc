"""Sums of the bits of arrays, by which a checkpoint that was damaged on its disk is told from what was saved:
tensorstore reads flipped bytes as numbers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl_llm import processes

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Sums = dict[str, list[Any]]
"""By a leaf's place in the tree: its dtype, and its bits as whole numbers added up modulo 2^64. The mesh and the number
of processes do not matter."""


def array_sums(tree: Any) -> Sums:
    """The sums of all arrays in a tree; every process calls it with its own part of them."""
    own: Sums = {
        jax.tree_util.keystr(path): [str(leaf.dtype), _sum(leaf)]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    found = processes.exchange(lambda: own)
    return {place: [dtype, sum(one[place][1] for one in found) % 2**64] for place, (dtype, _) in own.items()}


def changed(saved: Sums, read: Sums) -> list[str]:
    """The places whose bits differ; one that was read in another dtype can't be compared."""
    return [place for place, one in read.items() if saved.get(place, one) != one and saved[place][0] == one[0]]


def _sum(array: jax.Array) -> int:
    shards = (np.asarray(shard.data).reshape(-1) for shard in array.addressable_shards if shard.replica_id == 0)
    return sum(int(np.sum(one.view(_WORDS[one.dtype.itemsize]), dtype=np.uint64)) for one in shards) % 2**64
