"""The order of rows in an epoch: a pure function of (seed, epoch), the same on every machine and version."""

from __future__ import annotations

import numpy as np


def permutation(num_rows: int, *entropy: int) -> np.ndarray:
    """A permutation of ``range(num_rows)``, int64 ``[num_rows]``, fixed by the non-negative integers ``entropy``.

    Sorts raw random words in place of calling ``Generator.permutation``: numpy promises that raw streams
    never change, but not what its distributions make of them, and a resumed run must find its old order.
    """
    words = np.random.Philox(np.random.SeedSequence(list(entropy))).random_raw(num_rows)
    return np.argsort(words, kind="stable")


def epoch_order(seed: int, epoch: int, num_rows: int, *, shuffle: bool = True) -> np.ndarray:
    """Row indices of one pass over the data, int64 ``[num_rows]``; file order when ``shuffle`` is off."""
    return permutation(num_rows, seed, epoch) if shuffle else np.arange(num_rows)
