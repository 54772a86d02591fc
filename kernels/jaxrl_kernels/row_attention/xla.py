"""Packed-row attention in blocks, in plain XLA: cost follows what is visible, and no ``[T, T]`` exists.

Every block of queries has a list of the blocks of keys that any of its tokens sees: its own, those before it in its
sequence, and the prompt that it continues. Step j of the loop gives every query block its j-th key block; the loop ends
with the longest list, a number known at run time. Eight completions of 64 tokens behind one prompt of 64 take 2 steps
of 64 keys, where a dense row takes 576 keys for each query.

The softmax runs over the steps as in flash attention (arXiv:2205.14135): the forward pass keeps the output and, per
query, the log of the sum of exponentials; the backward pass computes the weights again::

    P = exp(S - lse)    dV = P' dO    dS = P * (dO V' - sum(dO * O))    dQ = dS K    dK = dS' Q
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.row_attention import blocks

BLOCK_TOKENS = 64
"""Tokens in a block. Small blocks skip more and cost more steps; of 32, 64, 96 and 128, 64 was
best on a CPU for rows of 576 and 1024."""


def row_attention(q, k, v, positions, segment_ids, prefix_ids, window, *, scale, soft_cap, block_tokens=BLOCK_TOKENS):
    """See `api.row_attention`."""
    block_tokens = min(block_tokens, q.shape[1])
    return _attend(q, k, v, positions, segment_ids, prefix_ids, window, scale, soft_cap, block_tokens)


class _Plan(NamedTuple):
    """What each block of queries meets; n blocks of b tokens.

    Attributes:
      index, positions, segments, prefixes: ``[R, n, b]`` of the tokens; ``index`` is the column in the row.
      order: ``[R, n, n]``, per query block the key blocks, those it sees first.
      count: ``[R, n]``, how many it sees.
      steps: the largest count.
    """

    index: jax.Array
    positions: jax.Array
    segments: jax.Array
    prefixes: jax.Array
    order: jax.Array
    count: jax.Array
    steps: jax.Array


def _plan(positions, segment_ids, prefix_ids, window, block):
    seen = blocks.visible_blocks(positions, segment_ids, prefix_ids, window, block, block)
    order, count = blocks.listed(seen)
    positions, segments, prefixes = (blocks.cut(x, block) for x in (positions, segment_ids, prefix_ids))
    index = jnp.arange(segments.shape[1] * block, dtype=jnp.int32).reshape(1, -1, block)
    return _Plan(jnp.broadcast_to(index, segments.shape), positions, segments, prefixes, order, count, count.max())


def _blocks(x, block, num_kv_heads):
    """``[R, T, heads, h]`` to ``[R, n, K, G, b, h]``: head-major, as the CPU's products need no copies then."""
    num_rows, num_tokens, num_heads, head_size = x.shape
    padding = -num_tokens % block
    x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
    x = x.reshape(num_rows, -1, block, num_kv_heads, num_heads // num_kv_heads, head_size)
    return x.transpose(0, 1, 3, 4, 2, 5)


def _rows(x, num_tokens):
    """The way back from :func:`_blocks`."""
    num_rows, _, num_kv_heads, group, _, head_size = x.shape
    return x.transpose(0, 1, 4, 2, 3, 5).reshape(num_rows, -1, num_kv_heads * group, head_size)[:, :num_tokens]


def _take(x, which):
    """``x[r, which[r, i]]`` for each block i: ``[R, n, ...]`` again."""
    return jnp.take_along_axis(x, which.reshape(which.shape + (1,) * (x.ndim - 2)), axis=1, mode="clip")


def _scores(plan, step, q, keys, window, scale, soft_cap):
    """Scores of every query block with its key block number `step`.

    Returns:
      which block that is ``[R, n]``; whether it counts ``[R, n]``; scores ``[R, n, K, G, b, b]`` in float32, masked;
      the mask; and the derivative of the soft cap (None without).
    """
    which = jax.lax.dynamic_index_in_dim(plan.order, step, axis=2, keepdims=False)
    counts = step < plan.count
    key_index, key_positions, key_segments = (_take(x, which)[:, :, None, :] for x in plan[:3])
    distance = plan.positions[..., None] - key_positions
    mine = (plan.segments[..., None] == key_segments) | (plan.prefixes[..., None] == key_segments)
    seen = mine & (key_segments > 0) & (distance >= 0) & (distance < window) & (plan.index[..., None] >= key_index)
    seen = (seen | (plan.index[..., None] == key_index)) & counts[..., None, None]
    seen = seen[:, :, None, None]
    raw = jnp.einsum("rnkgqh,rnksh->rnkgqs", q, _take(keys, which), preferred_element_type=jnp.float32) * scale
    capped, slope = blocks.capped(raw, soft_cap)
    return which, counts, jnp.where(seen, capped, blocks.MASKED), seen, slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attend(q, k, v, positions, segment_ids, prefix_ids, window, scale, soft_cap, block):
    return _forward(q, k, v, positions, segment_ids, prefix_ids, window, scale, soft_cap, block)[0]


def _forward(q, k, v, positions, segment_ids, prefix_ids, window, scale, soft_cap, block):
    plan = _plan(positions, segment_ids, prefix_ids, window, block)
    num_kv_heads = k.shape[2]
    queries, keys, values = (_blocks(x, block, num_kv_heads) for x in (q, k, v))
    keys, values = keys[:, :, :, 0], values[:, :, :, 0]

    def step(j, carry):
        largest, total, out = carry
        which, _, scores, seen, _ = _scores(plan, j, queries, keys, window, scale, soft_cap)
        new_largest = jnp.maximum(largest, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_largest[..., None]), 0.0)
        shrink = jnp.exp(largest - new_largest)
        added = jnp.einsum(
            "rnkgqs,rnksh->rnkgqh", weights.astype(v.dtype), _take(values, which), preferred_element_type=jnp.float32
        )
        return new_largest, total * shrink + weights.sum(-1), out * shrink[..., None] + added

    shape = queries.shape[:-1]
    start = (jnp.full(shape, blocks.MASKED), jnp.zeros(shape), jnp.zeros(queries.shape, jnp.float32))
    largest, total, out = jax.lax.fori_loop(0, plan.steps, step, start)
    out = _rows(out / total[..., None], q.shape[1]).astype(v.dtype)  # every token sees at least itself
    log_total = largest + jnp.log(total)
    return out, (q, k, v, positions, segment_ids, prefix_ids, window, out, log_total)


def _backward(scale, soft_cap, block, saved, d_out):
    q, k, v, positions, segment_ids, prefix_ids, window, out, log_total = saved
    plan = _plan(positions, segment_ids, prefix_ids, window, block)
    num_kv_heads = k.shape[2]
    queries, keys, values, d_outs, outs = (_blocks(x, block, num_kv_heads) for x in (q, k, v, d_out, out))
    keys, values = keys[:, :, :, 0], values[:, :, :, 0]
    overlap = (d_outs.astype(jnp.float32) * outs.astype(jnp.float32)).sum(-1)
    block_index = jnp.arange(plan.order.shape[1], dtype=jnp.int32)[None, None, :]

    def give(total, added, to):
        """Adds what each query block owes to the key block it met: a product with one-hot rows, no scatter."""
        return total + jnp.einsum("rij,rikbh->rjkbh", to, added)

    def step(j, carry):
        d_queries, d_keys, d_values = carry
        which, counts, scores, seen, slope = _scores(plan, j, queries, keys, window, scale, soft_cap)
        weights = jnp.where(seen, jnp.exp(scores - log_total[..., None]), 0.0)
        of_weights = jnp.einsum(
            "rnkgqh,rnksh->rnkgqs", d_outs, _take(values, which), preferred_element_type=jnp.float32
        )
        d_scores = weights * (of_weights - overlap[..., None]) * scale
        if slope is not None:
            d_scores = d_scores * slope
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(v.dtype)
        near = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        to = ((which[:, :, None] == block_index) & counts[:, :, None]).astype(jnp.float32)
        d_queries += near("rnkgqs,rnksh->rnkgqh", d_scores, _take(keys, which))
        d_keys = give(d_keys, near("rnkgqs,rnkgqh->rnksh", d_scores, queries), to)
        d_values = give(d_values, near("rnkgqs,rnkgqh->rnksh", weights, d_outs), to)
        return d_queries, d_keys, d_values

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, keys, values))
    d_queries, d_keys, d_values = jax.lax.fori_loop(0, plan.steps, step, start)
    num_tokens = q.shape[1]
    d_q = _rows(d_queries, num_tokens).astype(q.dtype)
    d_k, d_v = (_rows(x[:, :, :, None], num_tokens).astype(k.dtype) for x in (d_keys, d_values))
    return d_q, d_k, d_v, None, None, None, None


_attend.defvjp(_forward, _backward)
