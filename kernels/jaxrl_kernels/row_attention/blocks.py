"""Which blocks of keys a block of queries sees, by ranges of ids and positions: the lists that the kernels walk.

A block may be listed in which nothing is seen; none that is seen is left out.
"""

import jax.numpy as jnp

MASKED = -1e30
"""A score of what is not seen. Finite: no infinity is subtracted from another."""

_FAR = jnp.iinfo(jnp.int32).max


def cut(x, block: int):
    """``[R, T]`` to ``[R, n, block]``, with zeros at the end."""
    padding = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, padding))).reshape(x.shape[0], -1, block).astype(jnp.int32)


def visible_blocks(positions, segment_ids, prefix_ids, window, query_block: int, key_block: int):
    """bool ``[R, n, m]``: whether query block i may see a token of key block j. Fields as `api.row_attention` has them.

    Where ids grow along the row, the range of a block's ids holds no others; else it may hold more, and cost more.
    """
    query_segments, query_prefixes = cut(segment_ids, query_block), cut(prefix_ids, query_block)
    key_segments = cut(segment_ids, key_block)
    low = jnp.where(key_segments > 0, key_segments, _FAR).min(-1)[:, None, None, :]  # padding (0) is in no range
    high = key_segments.max(-1)[:, None, None, :]

    def meets(wanted):  # [R, n, b] ids -> [R, n, m]: whether any of a query block's is among a key block's
        wanted = wanted[..., None]
        return ((wanted > 0) & (wanted >= low) & (wanted <= high)).any(2)

    first = jnp.where(query_segments > 0, cut(positions, query_block), _FAR).min(-1)
    distance = first[:, :, None] - cut(positions, key_block).max(-1)[:, None, :]
    query_start = jnp.arange(query_segments.shape[1])[:, None] * query_block
    key_start = jnp.arange(key_segments.shape[1])[None, :] * key_block
    earlier = key_start < query_start + query_block
    own = earlier & (query_start < key_start + key_block)  # blocks that share a token, which sees itself
    return own[None] | (earlier[None] & (distance < window) & (meets(query_segments) | meets(query_prefixes)))


def listed(seen):
    """Of bool ``[R, n, m]`` the columns that are set, before all others ``[R, n, m]``, and how many they are."""
    return jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32), seen.sum(-1, dtype=jnp.int32)


def capped(scores, soft_cap: float | None):
    """``soft_cap * tanh(scores / soft_cap)`` and its derivative; without a cap the scores and None."""
    if soft_cap is None:
        return scores, None
    bent = jnp.tanh(scores / soft_cap)
    return soft_cap * bent, 1.0 - bent * bent
