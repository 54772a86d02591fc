"""The specification of prefill attention: plain jnp, float32, every score at once."""

import jax.numpy as jnp
from jax.lax import Precision


def keys_of(k, v, positions, sequence_ids, pages, context):
    """Context and row as one list of keys: ``(keys, values [N, K, h], positions, sequence_ids [N])``.

    Values that nobody may see are zero: they may be NaN, and 0 * NaN would leak.
    """
    if context is None:
        return k, v, positions, sequence_ids
    page_size = pages[0].shape[1]
    token = jnp.arange(page_size, dtype=context.dtype)[None, :]
    cached_positions = (context[2][:, None] + token).reshape(-1)
    cached_ids = jnp.where(token < context[3][:, None], context[1][:, None], 0).reshape(-1)

    def gather(pool):
        return pool.at[context[0]].get(mode="clip").reshape(-1, *pool.shape[2:])

    cached_values = jnp.where((cached_ids > 0)[:, None, None], gather(pages[1]), 0)
    return (
        jnp.concatenate([gather(pages[0]).astype(k.dtype), k]),
        jnp.concatenate([cached_values.astype(v.dtype), v]),
        jnp.concatenate([cached_positions, positions]),
        jnp.concatenate([cached_ids, sequence_ids]),
    )


def prefill_attention(q, k, v, positions, sequence_ids, pages, context, *, scale, window, soft_cap):
    """See `api.prefill_attention`."""
    keys, values, key_positions, key_ids = keys_of(k, v, positions, sequence_ids, pages, context)
    repeats = q.shape[1] // k.shape[1]
    keys, values = (jnp.repeat(x.astype(jnp.float32), repeats, axis=1) for x in (keys, values))
    distance = positions[:, None] - key_positions[None, :]
    seen = (sequence_ids[:, None] == key_ids[None, :]) & (key_ids > 0)[None, :] & (distance >= 0)
    if window is not None:
        seen &= distance < window
    scores = jnp.einsum("thd,nhd->htn", q.astype(jnp.float32), keys, precision=Precision.HIGHEST) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[None], scores, -jnp.inf)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("htn,nhd->thd", weights, values, precision=Precision.HIGHEST).astype(v.dtype)
