"""Attention of prompts laid end to end in one row, in blocks, so that cost follows the prompts and not the row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128
_MASKED = -1e30


def prefill_attention(
    q: Float[Array, "T H h"],
    k: Float[Array, "T K h"],
    v: Float[Array, "T K h"],
    first: Int[Array, " T"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T H h"]:
    """Causal attention within each prompt: token i sees j with ``first[i] <= j <= i`` and ``i - j < window``.

    Blocks of queries meet blocks of keys at distance 0, 1, 2 …, all blocks of the row at once, with a running
    softmax in float32. The loop ends at the longest distance that any prompt of the row (or the window) reaches:
    T tokens cost T times the longest prompt, never T squared, and no ``[T, T]`` exists. Not differentiable.

    Args:
      first: index in the row of the first token of each token's prompt.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    block = min(BLOCK, num_tokens)
    padding = -num_tokens % block
    index = jnp.arange(num_tokens + padding, dtype=jnp.int32)
    earliest = jnp.pad(first, (0, padding), constant_values=num_tokens)
    if window is not None:
        earliest = jnp.maximum(earliest, index - (window - 1))
    num_blocks = (num_tokens + padding) // block

    def blocks(x: Array) -> Array:
        return jnp.pad(x, ((0, padding), (0, 0), (0, 0))).reshape(num_blocks, block, *x.shape[1:])

    queries = blocks(q).reshape(num_blocks, block, num_kv_heads, group, head_size)
    query_index = index.reshape(num_blocks, block)
    earliest = earliest.reshape(num_blocks, block)
    # Zero blocks in front: at distance d, block b meets block b - d, which may lie before the row.
    front = ((num_blocks, 0), (0, 0), (0, 0), (0, 0))
    keys, values = jnp.pad(blocks(k), front), jnp.pad(blocks(v), front)
    reach = jnp.max(query_index[:, 0] - jnp.minimum(earliest.min(axis=1), query_index[:, 0]))
    farthest = (reach + block - 1) // block

    def step(carry):
        distance, largest, total, out = carry
        near_keys = jax.lax.dynamic_slice_in_dim(keys, num_blocks - distance, num_blocks)
        near_values = jax.lax.dynamic_slice_in_dim(values, num_blocks - distance, num_blocks)
        key_index = query_index - distance * block
        seen = key_index[:, None, :] <= query_index[:, :, None]
        seen &= key_index[:, None, :] >= earliest[:, :, None]
        scores = jnp.einsum("nqkgd,nskd->nkgqs", queries, near_keys, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = seen[:, None, None]
        scores = jnp.where(seen, scores, _MASKED)
        new_largest = jnp.maximum(largest, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_largest[..., None]), 0.0)
        shrink = jnp.exp(largest - new_largest)
        total = total * shrink + weights.sum(-1)
        added = jnp.einsum(
            "nkgqs,nskd->nkgqd", weights.astype(v.dtype), near_values, preferred_element_type=jnp.float32
        )
        return distance + 1, new_largest, total, out * shrink[..., None] + added

    shape = (num_blocks, num_kv_heads, group, block)
    carry = (
        jnp.int32(0),
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_size), jnp.float32),
    )
    _, _, total, out = jax.lax.while_loop(lambda carry: carry[0] <= farthest, step, carry)
    out = out / total[..., None]  # every token sees at least itself
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_tokens + padding, num_heads, head_size)
    return out[:num_tokens].astype(q.dtype)
