"""Attention of whole packed rows, for training and for scoring: causal, per segment, optionally windowed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

QUERY_CHUNK_TOKENS = 512
"""Longer rows are cut into equal chunks of at most this many queries, so that ``[T, T]`` scores never exist for a
long row."""

NO_WINDOW = 1 << 30
"""The window, in tokens, of a layer that sees its whole context."""

MASKED = -1e30


def row_attention(
    q: Float[Array, "R T H h"],
    k: Float[Array, "R T K h"],
    v: Float[Array, "R T K h"],
    positions: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    window: Int[Array, ""],
    scale: float,
    *,
    prefix_ids: Int[Array, "R T"] | None = None,
) -> Float[Array, "R T H h"]:
    """Each token attends to its own segment, and to the one that it continues, at ``i - window < j <= i`` by position.

    Padding (segment 0) attends to itself alone, so no row of the softmax is empty. Scores and softmax are in
    float32. Head-major inside: on XLA:CPU the products then need no transposed copies.
    """
    num_tokens = q.shape[1]
    group_size = q.shape[2] // k.shape[2]
    queries = q.reshape(*q.shape[:2], k.shape[2], group_size, q.shape[3]).transpose(0, 2, 3, 1, 4)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    index = jnp.arange(num_tokens)
    prefixes = jnp.zeros_like(segment_ids) if prefix_ids is None else prefix_ids

    def take(values: Int[Array, "R T"], rows: Int[Array, " t"]) -> Int[Array, "R t"]:
        return jnp.take(values, rows, axis=1, mode="clip")  # queries that only pad the last chunk: cut off later

    def attend(chunk: Float[Array, "R K G t h"], start: Int[Array, ""] | int) -> Float[Array, "R K G t h"]:
        rows = start + jnp.arange(chunk.shape[3])
        visible = _visible(
            take(positions, rows),
            positions,
            take(segment_ids, rows),
            take(prefixes, rows),
            segment_ids,
            window,
        )
        visible &= index[None, None, :] <= rows[None, :, None]
        visible |= (index[None, :] == rows[:, None])[None]
        scores = jnp.einsum("rkgth,rksh->rkgts", chunk, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("rkgts,rksh->rkgth", weights, values)

    attended = attend(queries, 0) if num_tokens <= QUERY_CHUNK_TOKENS else _in_query_chunks(attend, queries)
    return attended.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _visible(
    query_positions: Int[Array, "R t"],
    key_positions: Int[Array, "R s"],
    query_segments: Int[Array, "R t"],
    query_prefixes: Int[Array, "R t"],
    key_segments: Int[Array, "R s"],
    window: Int[Array, ""],
) -> Bool[Array, "R t s"]:
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    keys = key_segments[:, None, :]
    mine = (query_segments[:, :, None] == keys) | (query_prefixes[:, :, None] == keys)
    return mine & (keys > 0) & (distance >= 0) & (distance < window)


def _in_query_chunks(attend, queries: Float[Array, "R K G T h"]) -> Float[Array, "R K G T h"]:
    """Maps ``attend(chunk, start)`` over chunks of queries; the backward pass computes a chunk's scores again."""
    num_tokens = queries.shape[3]
    num_chunks = -(-num_tokens // QUERY_CHUNK_TOKENS)
    chunk_tokens = -(-num_tokens // num_chunks)
    padding = num_chunks * chunk_tokens - num_tokens
    padded = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
    chunks = padded.reshape(*padded.shape[:3], num_chunks, chunk_tokens, padded.shape[4])
    starts = jnp.arange(num_chunks) * chunk_tokens
    attended = jax.lax.map(
        lambda chunk_and_start: jax.checkpoint(attend, prevent_cse=False)(*chunk_and_start),
        (jnp.moveaxis(chunks, 3, 0), starts),
    )
    merged = jnp.moveaxis(attended, 0, 3).reshape(padded.shape)
    return merged[:, :, :, :num_tokens]
