"""Packed-row attention a tile at a time, in plain XLA: for CPUs.

A tile is a block of queries and a block of keys of which some token sees some token. Each row lists its tiles, and a
loop goes through the list: no product is computed of blocks that don't see each other. The products of a tile are few
and large, which a CPU's threads share; those of `xla`, one for every block of queries at once, are many and small, and
XLA:CPU gives them to one thread. On a GPU it is the other way round.

Large tiles are faster for their size and hold more that is not seen; long rows are compiled with both sizes, and what
costs less is taken when the row is known. The softmax is that of `xla`: its docstring has the formulas.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.row_attention import blocks

SMALL, LARGE = 64, 256
"""Tokens on both sides of a tile. Of 64, 128, 256, 512 and pairs of them 64 was fastest where sequences have 64 tokens,
and 256 for prompts of 512 with answers of 64."""

LARGE_COSTS = 10
"""A large tile takes as long as so many small ones (it has 16 times as many scores)."""

BOTH_FROM = 2048
"""Tokens of a row from which both sizes are compiled, about a second for each layer that is not in a loop; shorter rows
have small tiles."""


def row_attention(q, k, v, positions, segment_ids, prefix_ids, window, *, scale, soft_cap, tile_tokens=None):
    """See `api.row_attention`. ``tile_tokens``: always this size of tiles."""
    fields = positions, segment_ids, prefix_ids, window
    return _attend(q, k, v, *fields, scale, soft_cap, tile_tokens)


_Fields = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Positions, segments and prefixes ``[R, T]``, and the window."""


class _Plan(NamedTuple):
    """The tiles of R rows, n blocks of b tokens.

    Attributes:
      tokens: ``[R, n, b]`` each: column in the row counted from 1 (0 behind its end), position, segment and prefix.
      order: ``[R, n * n]``, ``n i + j`` for block i of queries and j of keys, those that are tiles first.
      steps: how many those are in the row that has most. A number of all devices' rows: found before a branch is taken,
        since XLA:CPU may wait for ever for a collective inside one.
    """

    tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    order: jax.Array
    steps: jax.Array


def _plan(positions, segment_ids, prefix_ids, window, size: int) -> _Plan:
    seen = blocks.visible_blocks(positions, segment_ids, prefix_ids, window, size, size)
    order, count = blocks.listed(seen.reshape(len(seen), -1))
    column = jnp.broadcast_to(jnp.arange(1, positions.shape[1] + 1, dtype=jnp.int32), positions.shape)
    column, positions, segments, prefixes = (blocks.cut(x, size) for x in (column, positions, segment_ids, prefix_ids))
    return _Plan((column, positions, segments, prefixes), order, count.max())


def _with_tiles(fields: _Fields, tile_tokens: int | None, run: Callable[[_Plan], Any]) -> Any:
    """``run(plan)`` with the tiles that cost least."""
    num_tokens = fields[0].shape[1]
    if tile_tokens is not None or num_tokens < BOTH_FROM:
        return run(_plan(*fields, min(tile_tokens or SMALL, num_tokens)))
    small, large = _plan(*fields, SMALL), _plan(*fields, LARGE)
    large_is_cheaper = large.steps * LARGE_COSTS < small.steps
    return jax.lax.cond(large_is_cheaper, lambda: run(large), lambda: run(small))


def _blocks(x, size: int, num_kv_heads: int):
    """``[R, T, heads, ...]`` to ``[R, n, K, G b, ...]``: the queries of a key's heads in one matrix."""
    num_rows, num_tokens, num_heads, *rest = x.shape
    x = jnp.pad(x, ((0, 0), (0, -num_tokens % size)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(num_rows, -1, size, num_kv_heads, num_heads // num_kv_heads, *rest)
    x = jnp.moveaxis(x, 2, 4)
    return x.reshape(*x.shape[:3], -1, *rest)


def _rows(x, size: int, num_tokens: int):
    """The way back from :func:`_blocks`."""
    num_rows, num_blocks, num_kv_heads, _, *rest = x.shape
    x = jnp.moveaxis(x.reshape(num_rows, num_blocks, num_kv_heads, -1, size, *rest), 4, 2)
    return x.reshape(num_rows, num_blocks * size, -1, *rest)[:, :num_tokens]


_at = jax.vmap(functools.partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False))
"""``x[r, i[r]]`` of every row r."""

_put = jax.vmap(functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0))
"""``x[r, i[r]] = value[r]``; in place, in a loop."""

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(plan: _Plan, number, q, k, window, scale, soft_cap):
    """Scores of tile `number` of every row.

    Returns:
      its block of queries and its block of keys ``[R]``; scores ``[R, K, G b, b]`` in float32, masked; the mask; and
      the derivative of the soft cap (None without).
    """
    which, num_blocks = plan.order[:, number], q.shape[1]
    i, j = which // num_blocks, which % num_blocks
    column, position, segment, prefix = (_at(x, i)[:, :, None] for x in plan.tokens)
    key_column, key_position, key_segment = (_at(x, j)[:, None, :] for x in plan.tokens[:3])
    distance = position - key_position
    mine = ((segment == key_segment) | (prefix == key_segment)) & (key_segment > 0)
    seen = mine & (distance >= 0) & (distance < window) & (column >= key_column)
    seen = seen | (column == key_column)  # nothing in what a row lists behind its tiles
    seen = jnp.tile(seen, (1, q.shape[3] // seen.shape[1], 1))[:, None]
    raw = _product("rkah,rkbh->rkab", _at(q, i), _at(k, j)) * scale
    capped, slope = blocks.capped(raw, soft_cap)
    return i, j, jnp.where(seen, capped, blocks.MASKED), seen, slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attend(q, k, v, positions, segment_ids, prefix_ids, window, scale, soft_cap, tile_tokens):
    return _forward(q, k, v, positions, segment_ids, prefix_ids, window, scale, soft_cap, tile_tokens)[0]


def _forward(q, k, v, positions, segment_ids, prefix_ids, window, scale, soft_cap, tile_tokens):
    def run(plan):
        size, num_kv_heads = plan.tokens[0].shape[2], k.shape[2]
        queries, keys, values = (_blocks(x, size, num_kv_heads) for x in (q, k, v))

        def tile(number, carry):
            largest, total, out = carry
            i, j, scores, seen, _ = _scores(plan, number, queries, keys, window, scale, soft_cap)
            before = _at(largest, i)
            now = jnp.maximum(before, scores.max(-1))
            weights = jnp.where(seen, jnp.exp(scores - now[..., None]), 0.0)
            shrink = jnp.exp(before - now)
            added = _product("rkab,rkbh->rkah", weights.astype(v.dtype), _at(values, j))
            return (
                _put(largest, now, i),
                _put(total, _at(total, i) * shrink + weights.sum(-1), i),
                _put(out, _at(out, i) * shrink[..., None] + added, i),
            )

        shape = queries.shape[:-1]
        start = (jnp.full(shape, blocks.MASKED), jnp.zeros(shape), jnp.zeros(queries.shape, jnp.float32))
        largest, total, out = jax.lax.fori_loop(0, plan.steps, tile, start)
        out = (out / total[..., None]).astype(v.dtype)  # each token sees itself, those behind the row's end each other
        return tuple(_rows(x, size, q.shape[1]) for x in (out, largest + jnp.log(total)))

    out, log_total = _with_tiles((positions, segment_ids, prefix_ids, window), tile_tokens, run)
    return out, (q, k, v, positions, segment_ids, prefix_ids, window, out, log_total)


def _backward(scale, soft_cap, tile_tokens, saved, d_out):
    q, k, v, positions, segment_ids, prefix_ids, window, out, log_total = saved
    overlap = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def run(plan):
        size, num_kv_heads = plan.tokens[0].shape[2], k.shape[2]
        queries, keys, values, d_outs, overlaps, log_totals = (
            _blocks(x, size, num_kv_heads) for x in (q, k, v, d_out, overlap, log_total)
        )

        def tile(number, carry):
            d_queries, d_keys, d_values = carry
            i, j, scores, seen, slope = _scores(plan, number, queries, keys, window, scale, soft_cap)
            weights = jnp.where(seen, jnp.exp(scores - _at(log_totals, i)[..., None]), 0.0)
            of_weights = _product("rkah,rkbh->rkab", _at(d_outs, i), _at(values, j))
            d_scores = weights * (of_weights - _at(overlaps, i)[..., None]) * scale
            if slope is not None:
                d_scores = d_scores * slope
            d_scores, weights = d_scores.astype(q.dtype), weights.astype(v.dtype)
            d_query = _product("rkab,rkbh->rkah", d_scores, _at(keys, j))
            d_key = _product("rkab,rkah->rkbh", d_scores, _at(queries, i))
            d_value = _product("rkab,rkah->rkbh", weights, _at(d_outs, i))
            return (
                _put(d_queries, _at(d_queries, i) + d_query, i),
                _put(d_keys, _at(d_keys, j) + d_key, j),
                _put(d_values, _at(d_values, j) + d_value, j),
            )

        start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, keys, values))
        found = jax.lax.fori_loop(0, plan.steps, tile, start)
        return tuple(_rows(d, size, q.shape[1]).astype(x.dtype) for d, x in zip(found, (q, k, v), strict=True))

    fields = positions, segment_ids, prefix_ids, window
    return *_with_tiles(fields, tile_tokens, run), None, None, None, None


_attend.defvjp(_forward, _backward)
