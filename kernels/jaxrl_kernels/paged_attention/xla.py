"""Paged decode attention by one gather of pages per call: the path for CPUs, and right on any backend."""

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row that sees nothing must not become NaN


def paged_attention(q, k_pages, v_pages, page_table, lengths, *, scale, window, soft_cap):
    """See `api.paged_attention`. Reads ``M`` pages a row, or only those that the window touches."""
    batch, num_heads, head_size = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    first = jnp.zeros_like(lengths)  # position of the first gathered token
    if window is not None:
        page_table, first = _pages_of_window(page_table, lengths, window, page_size)
    num_tokens = page_table.shape[1] * page_size
    position = first[:, None] + jnp.arange(num_tokens, dtype=lengths.dtype)[None, :]
    seen = position < lengths[:, None]
    if window is not None:
        seen &= position >= lengths[:, None] - window

    def gather(pages):  # -> [B, tokens, K, h]
        tokens = pages.at[page_table].get(mode="promise_in_bounds")
        return tokens.reshape(batch, num_tokens, num_kv_heads, head_size)

    # Keys as [B, K, h, tokens] and values as [B, K, tokens, h]: what the CPU's batched dots read fastest.
    keys = gather(k_pages).transpose(0, 2, 3, 1)
    # Unwritten or stale entries may be NaN, and 0 * NaN would leak; keys need no care, their scores are replaced.
    values = jnp.where(seen[:, :, None, None], gather(v_pages), 0).transpose(0, 2, 1, 3)
    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_size)
    scores = jnp.einsum("bkgd,bkdt->bkgt", grouped, keys, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None, :], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    # A row of length 0 has uniform weights over values that are all zero: its output is zero.
    out = jnp.einsum("bkgt,bktd->bkgd", weights, values, preferred_element_type=jnp.float32)
    return out.reshape(batch, num_heads, head_size).astype(q.dtype)


def _pages_of_window(page_table, lengths, window, page_size):
    """The columns of the page table that hold the window's tokens, and the first one's position."""
    width = page_table.shape[1]
    needed = (window - 1 + page_size - 1) // page_size + 1  # a window may begin on any offset of its first page
    if needed >= width:
        return page_table, jnp.zeros_like(lengths)
    first_page = jnp.clip((lengths - window) // page_size, 0, width - needed)
    columns = first_page[:, None] + jnp.arange(needed, dtype=lengths.dtype)[None, :]
    return jnp.take_along_axis(page_table, columns, axis=1), first_page * page_size
