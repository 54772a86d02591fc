"""The specification of packed-row attention: plain jnp, float32 throughout, every score of the row at once."""

import jax
import jax.numpy as jnp


def visible(positions, segment_ids, prefix_ids, window):
    """bool ``[R, T, T]``: whether token i (second axis) sees token j (third)."""
    index = jnp.arange(positions.shape[1])
    distance = positions[:, :, None] - positions[:, None, :]
    keys = segment_ids[:, None, :]
    mine = (segment_ids[:, :, None] == keys) | (prefix_ids[:, :, None] == keys)
    seen = mine & (keys > 0) & (distance >= 0) & (distance < window) & (index[:, None] >= index[None, :])[None]
    return seen | (index[:, None] == index[None, :])[None]


def row_attention(q, k, v, positions, segment_ids, prefix_ids, window, *, scale, soft_cap):
    """See `api.row_attention`."""
    repeats = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x.astype(jnp.float32), repeats, axis=2) for x in (k, v))
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("rthd,rshd->rhts", q.astype(jnp.float32), keys, precision=precision) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = visible(positions, segment_ids, prefix_ids, window)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("rhts,rshd->rthd", weights, values, precision=precision).astype(v.dtype)
