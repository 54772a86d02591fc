"""The gradient of `pallas_triton.py`, by two kernels that compute the weights again::

    P = exp(S - log_sum)    dV = P' dO    dS = P * (dO V' - sum(dO * O))    dQ = dS K    dK = dS' Q

One walks the blocks of keys that a block of queries sees, for dQ; the other the blocks of queries of all heads of a
group that see a block of keys, for dK and dV. So each sum is in one program's registers, in float32, and no two
programs write to one place.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_kernels import triton_tiles as tiles
from jaxrl_kernels.row_attention import blocks


def of_attention(q, k, v, fields, out, log_sums, d_out, plan):
    """dq, dk and dv.

    Args:
      fields: `pallas_triton.Fields`.
      out, log_sums: what the forward kernel gave.
      plan: `pallas_triton.Plan`.
    """
    num_rows, num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    overlaps = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).transpose(0, 2, 1)  # [R, H, T]
    who = fields.positions, fields.segment_ids, fields.prefix_ids, fields.window[0]
    seen = blocks.visible_blocks(*who, plan.query_block, plan.key_block)
    last = seen.shape[1] - 1
    row = pl.BlockSpec((None, num_tokens), lambda h, i, r: (r, 0))
    shared = [*[row] * 3, pl.BlockSpec((1,), lambda h, i, r: (0,))]
    options = {
        "compiler_params": tiles.compiler_params(plan.num_warps, plan.num_stages),
        "interpret": plan.interpret,
    }

    one_head = pl.BlockSpec((None, num_tokens, None, head_size), lambda h, i, r: (r, 0, h, 0))
    its_keys = pl.BlockSpec((None, num_tokens, None, head_size), lambda h, i, r: (r, 0, h // group, 0))
    per_query = pl.BlockSpec((None, None, num_tokens), lambda h, i, r: (r, h, 0))
    order, count = blocks.listed(seen)
    d_q = pl.pallas_call(
        functools.partial(_query_kernel, plan=plan),
        grid=(num_heads, seen.shape[1], num_rows),
        in_specs=[
            *[one_head, its_keys, its_keys, one_head, per_query, per_query, *shared],
            pl.BlockSpec((None, None, seen.shape[2]), lambda h, i, r: (r, last - i, 0)),
            pl.BlockSpec((None, 1), lambda h, i, r: (r, last - i)),
        ],
        out_specs=one_head,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="row_attention_gradient_of_queries",
        **options,
    )(q, k, v, d_out, log_sums, overlaps, *fields, order, count)

    heads = pl.BlockSpec((None, num_tokens, group, head_size), lambda h, i, r: (r, 0, h, 0))
    per_query = pl.BlockSpec((None, group, num_tokens), lambda h, i, r: (r, h, 0))
    order, count = blocks.listed(seen.swapaxes(1, 2))
    d_k, d_v = pl.pallas_call(
        functools.partial(_key_kernel, plan=plan),
        grid=(num_kv_heads, seen.shape[2], num_rows),  # early blocks of keys are seen by the most queries
        in_specs=[
            *[heads, one_head, one_head, heads, per_query, per_query, *shared],
            pl.BlockSpec((None, None, seen.shape[1]), lambda h, i, r: (r, i, 0)),
            pl.BlockSpec((None, 1), lambda h, i, r: (r, i)),
        ],
        out_specs=[one_head, one_head],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        name="row_attention_gradient_of_keys",
        **options,
    )(q, k, v, d_out, log_sums, overlaps, *fields, order, count)
    return d_q, d_k, d_v


def load_fields(refs, start, count: int):
    """positions, segment ids, prefix ids and places in the row of ``count`` tokens from ``start`` on."""
    return [*(tiles.load(ref, start, count) for ref in refs), start + jnp.arange(count)]


def visible(query_fields, key_fields, window):
    """Who sees whom, of fields by :func:`load_fields` that broadcast against each other."""
    positions, segments, prefixes, places = query_fields
    key_positions, key_segments, _, key_places = key_fields
    distance = positions - key_positions
    mine = (segments == key_segments) | (prefixes == key_segments)
    seen = mine & (key_segments > 0) & (distance >= 0) & (distance < window) & (places >= key_places)
    return seen | (places == key_places)


def _query_kernel(
    q_ref,  # [T, h]
    k_ref,  # [T, h]
    v_ref,  # [T, h]
    d_out_ref,  # [T, h]
    log_sums_ref,  # float32 [T]
    overlaps_ref,  # float32 [T]
    positions_ref,  # int32 [T]
    segments_ref,  # int32 [T]
    prefixes_ref,  # int32 [T]
    window_ref,  # int32 [1]
    order_ref,  # int32 [m]
    count_ref,  # int32 [1]
    d_q_ref,  # [T, h]
    *,
    plan,
):
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * plan.query_block
    queries, d_outs = (tiles.load_head(ref, start, plan.query_block) for ref in (q_ref, d_out_ref))
    log_sums, overlaps = (tiles.load(ref, start, plan.query_block)[:, None] for ref in (log_sums_ref, overlaps_ref))
    field_refs = positions_ref, segments_ref, prefixes_ref
    query_fields = [x[:, None] for x in load_fields(field_refs, start, plan.query_block)]

    def step(j, sums):
        key_start = order_ref[j] * plan.key_block
        keys, values = (tiles.load_head(ref, key_start, plan.key_block) for ref in (k_ref, v_ref))
        key_fields = [x[None, :] for x in load_fields(field_refs, key_start, plan.key_block)]
        seen = visible(query_fields, key_fields, window_ref[0])
        scores, slope = tiles.scores_of(tiles.inner(queries, keys), plan.scale, plan.soft_cap)
        weights = jnp.where(seen, jnp.exp2(scores - log_sums), 0.0)
        d_scores = weights * (tiles.inner(d_outs, values) - overlaps)
        if slope is not None:
            d_scores *= slope
        d_scores = d_scores.astype(q_ref.dtype)
        return tuple(total + tiles.product(d_scores, tile) for total, tile in zip(sums, keys, strict=True))

    sums = tuple(jnp.zeros(tile.shape, jnp.float32) for tile in queries)
    sums = lax.fori_loop(0, count_ref[0], step, sums)
    tiles.store_head(d_q_ref, start, [total * plan.scale for total in sums])


def _key_kernel(
    q_ref,  # [T, G, h]
    k_ref,  # [T, h]
    v_ref,  # [T, h]
    d_out_ref,  # [T, G, h]
    log_sums_ref,  # float32 [G, T]
    overlaps_ref,  # float32 [G, T]
    positions_ref,  # int32 [T]
    segments_ref,  # int32 [T]
    prefixes_ref,  # int32 [T]
    window_ref,  # int32 [1]
    order_ref,  # int32 [n]
    count_ref,  # int32 [1]
    d_k_ref,  # [T, h]
    d_v_ref,  # [T, h]
    *,
    plan,
):
    start = pl.program_id(1) * plan.key_block
    group = q_ref.shape[1]
    keys, values = (tiles.load_head(ref, start, plan.key_block) for ref in (k_ref, v_ref))
    field_refs = positions_ref, segments_ref, prefixes_ref
    key_fields = [x[:, None] for x in load_fields(field_refs, start, plan.key_block)]

    def step(j, sums):  # tiles are keys times queries: neither product needs a transposed tile of scores
        d_keys, d_values = sums
        query_start, head = order_ref[lax.div(j, jnp.int32(group))] * plan.query_block, lax.rem(j, jnp.int32(group))
        queries, d_outs = (tiles.load_head(ref, query_start, plan.query_block, head) for ref in (q_ref, d_out_ref))
        log_sums, overlaps = (
            tiles.load(ref, query_start, plan.query_block, head)[None, :] for ref in (log_sums_ref, overlaps_ref)
        )
        query_fields = [x[None, :] for x in load_fields(field_refs, query_start, plan.query_block)]
        seen = visible(query_fields, key_fields, window_ref[0])
        scores, slope = tiles.scores_of(tiles.inner(keys, queries), plan.scale, plan.soft_cap)
        weights = jnp.where(seen, jnp.exp2(scores - log_sums), 0.0)
        d_scores = weights * (tiles.inner(values, d_outs) - overlaps)
        if slope is not None:
            d_scores *= slope
        d_scores, weights = d_scores.astype(q_ref.dtype), weights.astype(v_ref.dtype)
        d_keys = tuple(total + tiles.product(d_scores, tile) for total, tile in zip(d_keys, queries, strict=True))
        d_values = tuple(total + tiles.product(weights, tile) for total, tile in zip(d_values, d_outs, strict=True))
        return d_keys, d_values

    zeros = tuple(jnp.zeros(tile.shape, jnp.float32) for tile in keys)
    d_keys, d_values = lax.fori_loop(0, count_ref[0] * group, step, (zeros, zeros))
    tiles.store_head(d_k_ref, start, [total * plan.scale for total in d_keys])
    tiles.store_head(d_v_ref, start, d_values)
