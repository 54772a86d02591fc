"""The specification of paged decode attention: plain jnp, float32 throughout, no regard for speed."""

import jax
import jax.numpy as jnp


def paged_attention(q, k_pages, v_pages, page_table, lengths, *, scale, window, soft_cap):
    """See `api.paged_attention`. Every sequence is gathered whole and masked."""
    batch, num_heads, head_size = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    num_tokens = page_table.shape[1] * page_size
    position = jnp.arange(num_tokens)[None, :]
    seen = position < lengths[:, None]
    if window is not None:
        seen &= position >= lengths[:, None] - window
    repeats = num_heads // num_kv_heads

    def gather(pages):  # [P, S, K, h] -> float32 [B, tokens, H, h], zero where not seen
        tokens = pages[page_table].reshape(batch, num_tokens, num_kv_heads, head_size).astype(jnp.float32)
        tokens = jnp.where(seen[:, :, None, None], tokens, 0.0)
        return jnp.repeat(tokens, repeats, axis=2)

    keys, values = gather(k_pages), gather(v_pages)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhd,bthd->bht", q.astype(jnp.float32), keys, precision=precision) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bht,bthd->bhd", weights, values, precision=precision).astype(q.dtype)
