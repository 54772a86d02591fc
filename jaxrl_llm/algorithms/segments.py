"""Sums, means and maxima over each sequence of packed rows, inside the jit.

A row ``[T]`` holds several segments, told apart by ids that count from 1 (`packing`); 0 is padding. A sequence here is
what `mask` leaves of a segment: its trained tokens. Each function gives every token of a segment the segment's value.
One scatter into ``T + 1`` buckets a row (a row of T tokens can't hold more segments) and one gather: memory is that of
the row, nothing is ``[T, T]``, and a sum has no differences of running totals, in which a short sequence behind a long
one would lose its digits. On a GPU float addition into buckets has no fixed order unless XLA's deterministic
operations are on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def _buckets(values: Float[Array, "R T"], segment_ids: Int[Array, "R T"]) -> Float[Array, "R S"]:
    """The sum of each segment at its id; 0 at the id of padding."""

    def one_row(row: Array, ids: Array) -> Array:
        return jnp.zeros(row.shape[0] + 1, row.dtype).at[ids].add(row)

    return jax.vmap(one_row)(jnp.where(segment_ids > 0, values, jnp.zeros_like(values)), segment_ids)


def segment_sum(values: Float[Array, "R T"], segment_ids: Int[Array, "R T"]) -> Float[Array, "R T"]:
    """The sum of `values` over the whole segment, at each of its tokens; 0 at padding. Differentiable.

    Values that don't count are to be 0, prompt tokens too: see `segment_mean` for one with a mask.
    """
    return sum_at(values, segment_ids, segment_ids)


def sum_at(
    values: Float[Array, "R T"], segment_ids: Int[Array, "R T"], wanted_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """The sum of `values` over another segment of the same row. Differentiable.

    Args:
      wanted_ids: at each token the id of the segment it wants the sum of, such as the other answer of its pair. 0 and
        ids that the row does not have give 0.
    """
    sums = _buckets(values, segment_ids)
    return jnp.take_along_axis(sums, wanted_ids, axis=1, mode="fill", fill_value=0)


def segment_mean(
    values: Float[Array, "R T"], mask: Bool[Array, "R T"], segment_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """The mean over the tokens of the segment where `mask` is True, at each of its tokens; 0 if there are none.

    What stands where `mask` is False does not matter, also if it is not finite.
    """
    total = segment_sum(jnp.where(mask, values, jnp.zeros_like(values)), segment_ids)
    return total / jnp.maximum(segment_sum(mask.astype(values.dtype), segment_ids), 1)


def segment_max(
    values: Float[Array, "R T"], mask: Bool[Array, "R T"], segment_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """The largest value of the segment where `mask` is True, at each of its tokens; -inf if there are none."""

    def one_row(row: Array, counts: Array, ids: Array) -> Array:
        return jnp.full(row.shape[0] + 1, -jnp.inf, row.dtype).at[ids].max(jnp.where(counts, row, -jnp.inf))[ids]

    return jax.vmap(one_row)(values, mask & (segment_ids > 0), segment_ids)


def first_tokens(mask: Bool[Array, "R T"], segment_ids: Int[Array, "R T"]) -> Bool[Array, "R T"]:
    """True at the first token of each segment where `mask` is True: once for each sequence, to count sequences by."""
    columns = mask.shape[1]

    def one_row(counts: Array, ids: Array) -> Array:
        here = jnp.arange(columns)
        first = jnp.full(columns + 1, columns).at[ids].min(jnp.where(counts, here, columns))
        return here == first[ids]

    return jax.vmap(one_row)(mask & (segment_ids > 0), segment_ids)
