"""Ragged sequences laid into packed rows by hand, for tests of what runs inside the jit."""

import jax.numpy as jnp
import numpy as np


class PackedRows:
    """Sequences at chosen places of rows ``[R, columns]``.

    `layout` lists for each row the indices of its sequences; each becomes a segment, from left to right. Columns that
    no sequence fills are padding and hold `junk`.
    """

    def __init__(self, lengths, layout, columns, junk=0.0):
        self.lengths, self.columns, self.junk, self.rows = lengths, columns, junk, len(layout)
        self.segment_ids = np.zeros((self.rows, columns), np.int32)
        self.places = {}
        for row, members in enumerate(layout):
            start = 0
            for number, n in enumerate(members, start=1):
                self.places[n] = (row, slice(start, start + lengths[n]))
                self.segment_ids[self.places[n]] = number
                start += lengths[n]

    def put(self, values, dtype=np.float32):
        """One array ``[t]`` a sequence, as rows."""
        rows = np.full((self.rows, self.columns), False if dtype is bool else self.junk, dtype)
        for n, place in self.places.items():
            rows[place] = values[n]
        return jnp.asarray(rows)

    def take(self, rows):
        """Back to one array a sequence."""
        return [np.asarray(rows)[self.places[n]] for n in range(len(self.lengths))]

    @property
    def ids(self):
        return jnp.asarray(self.segment_ids)


def finite_differences(function, point, step=1e-6):
    """The gradient of a float64 NumPy function of ragged arrays, by central differences (error about 1e-9)."""
    gradient = [np.zeros(len(one)) for one in point]
    for n, one in enumerate(point):
        for t in range(len(one)):
            ends = []
            for sign in (1, -1):
                moved = [np.array(each, np.float64) for each in point]
                moved[n][t] += sign * step
                ends.append(function(moved))
            gradient[n][t] = (ends[0] - ends[1]) / (2 * step)
    return gradient
