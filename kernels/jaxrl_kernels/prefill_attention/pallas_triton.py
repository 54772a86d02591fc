"""Prefill attention as a Pallas kernel of the Triton backend: every NVIDIA GPU since Ampere. Not differentiable.

A program has one block of queries of one head. It walks the blocks of cached tokens that these see, which it reads from
the pools where they are, and then the row's own blocks of keys, with one running softmax. XLA makes only lists of
integers: a place, a position and a sequence for each cached token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_kernels import triton_tiles as tiles
from jaxrl_kernels.prefill_attention.xla import visible_blocks


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the kernel is traced: scale, window and soft cap as in `api.prefill_attention`, and the sides
    of a tile of scores, powers of two."""

    scale: float
    window: int | None
    soft_cap: float | None
    query_block: int
    key_block: int


def prefill_attention(
    q,
    k,
    v,
    positions,
    sequence_ids,
    pages,
    context,
    *,
    scale,
    window,
    soft_cap,
    query_block: int | None = None,
    key_block: int | None = None,
    interpret: bool = False,
):
    """See `api.prefill_attention`. Checks dtypes and the head size, not the device: `choice.why_not` does.

    Args:
      query_block, key_block: tokens of a tile of scores, powers of two of at least 16; None is by dtype and head
        size, see :func:`default_blocks`.
      interpret: runs the kernel's operations one by one on any backend, slowly: for tests.
    """
    pools = () if context is None or context.shape[1] == 0 else pages
    tiles.check("prefill attention", q, k, v, *pools)
    if q.size == 0:
        return jnp.zeros(q.shape, v.dtype)
    num_tokens, num_heads, head_size = q.shape
    group = num_heads // k.shape[1]
    exact = q.dtype == jnp.float32
    default = default_blocks(q.dtype, head_size)
    query_block = tiles.block_size(query_block or default[0], num_tokens)
    key_block = tiles.block_size(key_block or default[1], 1 << 30)
    plan = Plan(float(scale), window, None if soft_cap is None else float(soft_cap), query_block, key_block)

    positions, sequence_ids = positions.astype(jnp.int32), sequence_ids.astype(jnp.int32)
    query_positions, query_ids = (_cut(x, query_block) for x in (positions, sequence_ids))
    last = query_ids.shape[0] - 1  # late blocks of queries see the most keys, so they go first

    def lists(key_positions, key_ids, num_cached):
        """The arguments and specs of the blocks of keys that each block of queries sees."""
        keys = _cut(key_positions, key_block), _cut(key_ids, key_block)
        order, count = visible_blocks(query_positions, query_ids, *keys, window, num_cached)
        spec = pl.BlockSpec((None, order.shape[1]), lambda h, i: (last - i, 0))
        return [order, count], [spec, pl.BlockSpec((1,), lambda h, i: (last - i,))]

    own_lists, list_specs = lists(positions, sequence_ids, 0)
    one_head = pl.BlockSpec((num_tokens, None, head_size), lambda h, i: (0, h, 0))
    its_keys = pl.BlockSpec((num_tokens, None, head_size), lambda h, i: (0, h // group, 0))
    row = pl.BlockSpec((num_tokens,), lambda h, i: (0,))
    arguments = [q, k, v, positions, sequence_ids, *own_lists]
    specs = [one_head, its_keys, its_keys, row, row, *list_specs]
    if pools and context is not None:
        cached = _cached_tokens(context.astype(jnp.int32), pools[0].shape[1], key_block)
        cached_lists, list_specs = lists(cached[1], cached[2], cached[0].size)
        arguments += [*(pool.reshape(-1, *pool.shape[2:]) for pool in pools), *cached, *cached_lists]
        whole = pl.BlockSpec(memory_space=pl.ANY)
        specs += [whole, whole, *[pl.BlockSpec(cached[0].shape, lambda h, i: (0,))] * 3, *list_specs]
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, group=group),
        grid=(num_heads, last + 1),
        in_specs=specs,
        out_specs=one_head,
        out_shape=jax.ShapeDtypeStruct(q.shape, v.dtype),
        compiler_params=tiles.compiler_params(
            num_warps=8 if exact or head_size > 64 else 4, num_stages=1 if exact else 2
        ),
        interpret=interpret,
        name="prefill_attention",
    )(*arguments)


def default_blocks(dtype, head_size: int) -> tuple[int, int]:
    """query_block and key_block: the largest whose kernel keeps (nearly) all in registers."""
    if dtype == jnp.float32:  # no matrix instruction
        return (32, 32) if head_size <= 96 else (16, 16)
    return (64, 64) if head_size <= 128 else (64, 32)


def _cut(x, block: int):
    """``[N]`` to ``[n, block]``, with zeros at the end."""
    return jnp.pad(x, (0, -x.shape[0] % block)).reshape(-1, block)


def _cached_tokens(context, page_size: int, block: int):
    """Of the tokens of all context pages, whole blocks of them: place in the pool ``[N]``, position, and sequence
    (0: read by nobody)."""
    token = jnp.arange(page_size, dtype=jnp.int32)[None, :]
    page, sequence, first, count = (x[:, None] for x in context)
    places, positions = page * page_size + token, first + token
    ids = jnp.where(token < count, sequence, 0)
    return [_cut(x.reshape(-1), block).reshape(-1) for x in (places, positions, ids)]


def _kernel(
    q_ref,  # [T, h]
    k_ref,  # [T, h]
    v_ref,  # [T, h]
    positions_ref,  # int32 [T]
    ids_ref,  # int32 [T]
    order_ref,  # int32 [m]
    count_ref,  # int32 [1]
    *rest,  # of cached tokens: key and value pools [P S, K, h], places, positions and ids [N], order [c], count [1]
    plan,
    group,
):
    *cached_refs, out_ref = rest
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * plan.query_block
    queries = tiles.load_head(q_ref, start, plan.query_block)
    positions, ids = (tiles.load(ref, start, plan.query_block)[:, None] for ref in (positions_ref, ids_ref))

    def attend(softmax, keys, values, key_positions, key_ids):
        distance = positions - key_positions[None, :]
        seen = (ids == key_ids[None, :]) & (key_ids > 0)[None, :] & (distance >= 0)
        if plan.window is not None:
            seen &= distance < plan.window
        scores, _ = tiles.scores_of(tiles.inner(queries, keys), plan.scale, plan.soft_cap)
        return softmax.with_keys(scores, seen, values)

    def own_step(j, softmax):
        first = order_ref[j] * plan.key_block
        keys, values = (tiles.load_head(ref, first, plan.key_block) for ref in (k_ref, v_ref))
        return attend(
            softmax, keys, values, *(tiles.load(ref, first, plan.key_block) for ref in (positions_ref, ids_ref))
        )

    softmax = tiles.Softmax.empty(plan.query_block, q_ref.shape[-1])
    if cached_refs:
        k_pool, v_pool, places_ref, cached_positions_ref, cached_ids_ref, cached_order_ref, cached_count_ref = (
            cached_refs
        )
        head = lax.div(pl.program_id(0), jnp.int32(group))

        def cached_step(j, softmax):
            first = cached_order_ref[j] * plan.key_block
            places, key_positions, key_ids = (
                tiles.load(ref, first, plan.key_block) for ref in (places_ref, cached_positions_ref, cached_ids_ref)
            )
            # What nobody may see is not read, whatever it holds: 0 * NaN would leak.
            keys, values = (tiles.gather_head(pool, places, head, key_ids > 0) for pool in (k_pool, v_pool))
            return attend(softmax, keys, values, key_positions, key_ids)

        softmax = lax.fori_loop(0, cached_count_ref[0], cached_step, softmax)
    means, _ = lax.fori_loop(0, count_ref[0], own_step, softmax).mean()
    tiles.store_head(out_ref, start, means)
