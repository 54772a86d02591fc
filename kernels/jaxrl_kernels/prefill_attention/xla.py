"""Prefill attention in blocks, in plain XLA: cost follows what is visible, and no ``[T, T]`` exists.

Cached pages and the row's own tokens form one list of keys. Every block of queries has a list of the blocks of keys
that any of its tokens sees; step j of the loop gives every query block its j-th key block, with a running softmax, and
the loop ends with the longest list. T tokens cost T times the longest sequence, never T squared. Not differentiable.
"""

import jax
import jax.numpy as jnp

from jaxrl_kernels.prefill_attention.reference import keys_of

BLOCK_TOKENS = 64  # on CPUs a product takes as long per score as in 128, and fewer scores are masked

_MASKED = -1e30  # finite: no infinity is subtracted from another
_FAR = 1 << 30


def prefill_attention(
    q, k, v, positions, sequence_ids, pages, context, *, scale, window, soft_cap, block_tokens=BLOCK_TOKENS
):
    """See `api.prefill_attention`."""
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    keys, values, key_positions, key_ids = keys_of(k, v, positions, sequence_ids, pages, context)
    num_cached = keys.shape[0] - num_tokens
    block = min(block_tokens, num_tokens)

    def cut(x):  # [N, ...] -> [blocks, block, ...], zeros at the end
        padding = -x.shape[0] % block
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, block, *x.shape[1:])

    queries = cut(q).reshape(-1, block, num_kv_heads, num_heads // num_kv_heads, head_size).transpose(0, 2, 3, 1, 4)
    keys, values = (cut(x).transpose(0, 2, 1, 3) for x in (keys, values))  # [m, K, b, h]
    positions, ids, key_positions, key_ids = map(cut, (positions, sequence_ids, key_positions, key_ids))
    order, count = visible_blocks(positions, ids, key_positions, key_ids, window, num_cached)

    def step(j, carry):
        largest, total, out = carry
        which = jax.lax.dynamic_index_in_dim(order, j, axis=1, keepdims=False)
        distance = positions[:, :, None] - key_positions[which][:, None, :]
        near_ids = key_ids[which][:, None, :]
        seen = (ids[:, :, None] == near_ids) & (near_ids > 0) & (distance >= 0) & (j < count)[:, None, None]
        if window is not None:
            seen &= distance < window
        seen = seen[:, None, None]
        scores = jnp.einsum("nkgqd,nksd->nkgqs", queries, keys[which], preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, _MASKED)
        new_largest = jnp.maximum(largest, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_largest[..., None]), 0.0)
        shrink = jnp.exp(largest - new_largest)
        added = jnp.einsum(
            "nkgqs,nksd->nkgqd", weights.astype(v.dtype), values[which], preferred_element_type=jnp.float32
        )
        return new_largest, total * shrink + weights.sum(-1), out * shrink[..., None] + added

    shape = queries.shape[:-1]
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(queries.shape, jnp.float32))
    _, total, out = jax.lax.fori_loop(0, count.max(), step, start)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(-1, num_heads, head_size)[:num_tokens].astype(v.dtype)


def visible_blocks(positions, ids, key_positions, key_ids, window, num_cached: int):
    """Per query block the key blocks, those that it sees first ``[n, m]``, and how many it sees ``[n]``.

    By ranges of ids and positions, so a block may be listed in which nothing is seen; none that is seen is left out.
    The first ``num_cached`` keys are cached tokens, the others those of the row, seen by the ones behind them alone.
    """
    low, high = (jnp.where(key_ids > 0, key_ids, _FAR).min(1), key_ids.max(1))
    wanted = ids[:, :, None]
    meets = ((wanted > 0) & (wanted >= low[None, None, :]) & (wanted <= high[None, None, :])).any(1)
    first = jnp.where(key_ids > 0, key_positions, _FAR).min(1)
    last = jnp.where(key_ids > 0, key_positions, -1).max(1)
    meets &= first[None, :] <= jnp.where(ids > 0, positions, -1).max(1)[:, None]
    key_start = jnp.arange(key_ids.shape[0]) * key_ids.shape[1] - num_cached
    meets &= key_start[None, :] < (1 + jnp.arange(ids.shape[0])[:, None]) * ids.shape[1]
    if window is not None:
        meets &= jnp.where(ids > 0, positions, _FAR).min(1)[:, None] - last[None, :] < window
    return jnp.argsort(~meets, axis=1, stable=True).astype(jnp.int32), meets.sum(1, dtype=jnp.int32)
