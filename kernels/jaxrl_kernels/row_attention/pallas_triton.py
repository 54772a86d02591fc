"""Packed-row attention as a Pallas kernel of the Triton backend, with its gradient: every NVIDIA GPU since Ampere.

A program of the forward kernel has one block of queries of one head and walks the blocks of keys that these see
(`blocks.py`), with a running softmax. It keeps the output and, per query, the log of the sum of exponentials; from that
the kernels of `pallas_triton_gradient.py` compute the weights again. Keys and values of grouped heads are read where
they are, never repeated, and nothing in memory grows with the square of the row but the lists of blocks.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_kernels import triton_tiles as tiles
from jaxrl_kernels.row_attention import blocks
from jaxrl_kernels.row_attention import pallas_triton_gradient as gradient


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the kernels are traced.

    Attributes:
      scale, soft_cap: as in `api.row_attention`.
      query_block, key_block: tokens of a tile of scores, powers of two.
      num_warps: threads per program / 32.
      num_stages: depth of Triton's pipeline.
      interpret: runs the kernels' operations one by one on any backend.
    """

    scale: float
    soft_cap: float | None
    query_block: int
    key_block: int
    num_warps: int
    num_stages: int
    interpret: bool


def row_attention(
    q,
    k,
    v,
    positions,
    segment_ids,
    prefix_ids,
    window,
    *,
    scale,
    soft_cap,
    query_block: int | None = None,
    key_block: int | None = None,
    gradient_block: int | None = None,
    interpret: bool = False,
):
    """See `api.row_attention`. Checks dtypes and the head size, not the device: `choice.why_not` does.

    Args:
      query_block, key_block: tokens of a tile of the forward kernel, powers of two of at least 16; None is by dtype and
        head size, see :func:`default_blocks`.
      gradient_block: the same of both sides of a tile of the gradient's kernels.
      interpret: runs the kernels' operations one by one on any backend, slowly: for tests.
    """
    tiles.check("row attention", q, k, v)
    if q.size == 0:
        return jnp.zeros(q.shape, v.dtype)
    num_tokens, head_size = q.shape[1], q.shape[3]
    exact = q.dtype == jnp.float32
    default = default_blocks(q.dtype, head_size)
    wanted = [given or usual for given, usual in zip((query_block, key_block, gradient_block), default, strict=True)]
    query_block, key_block, gradient_block = (tiles.block_size(count, num_tokens) for count in wanted)
    forward = Plan(
        scale=float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        query_block=query_block,
        key_block=key_block,
        num_warps=8,
        num_stages=1 if exact else 2,  # products without matrix instructions need the registers themselves
        interpret=interpret,
    )
    backward = dataclasses.replace(
        forward,
        query_block=gradient_block,
        key_block=gradient_block,
        num_warps=8 if exact or head_size > 64 else 4,
    )
    positions, segment_ids, prefix_ids = (x.astype(jnp.int32) for x in (positions, segment_ids, prefix_ids))
    fields = Fields(positions, segment_ids, prefix_ids, window.reshape(1))
    return _attend(q, k, v, fields, forward, backward)


def default_blocks(dtype, head_size: int) -> tuple[int, int, int]:
    """query_block, key_block and gradient_block: the largest whose kernels keep (nearly) all in registers."""
    if dtype == jnp.float32:  # no matrix instruction
        return (32, 32, 32) if head_size <= 96 else (16, 16, 16)
    return (128, 64, 64) if head_size <= 128 else (64, 32, 32)


class Fields(NamedTuple):
    """Who sees whom: int32 ``[R, T]`` as in `api.row_attention`, and the window ``[1]``."""

    positions: jax.Array
    segment_ids: jax.Array
    prefix_ids: jax.Array
    window: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, fields, forward, backward):
    del backward
    return _forward(q, k, v, fields, forward)[0]


def _attend_forward(q, k, v, fields, forward, backward):
    del backward
    out, log_sums = _forward(q, k, v, fields, forward)
    return out, (q, k, v, fields, out, log_sums)


def _attend_backward(forward, backward, saved, d_out):
    del forward
    q, k, v, fields, out, log_sums = saved
    return *gradient.of_attention(q, k, v, fields, out, log_sums, d_out, backward), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(q, k, v, fields, plan):
    """The output ``[R, T, H, h]`` and log2 of the sum of exponentials, float32 ``[R, H, T]``."""
    num_rows, num_tokens, num_heads, head_size = q.shape
    group = num_heads // k.shape[2]
    who = fields.positions, fields.segment_ids, fields.prefix_ids, fields.window[0]
    seen = blocks.visible_blocks(*who, plan.query_block, plan.key_block)
    order, count = blocks.listed(seen)
    last = seen.shape[1] - 1
    one_head = pl.BlockSpec((None, num_tokens, None, head_size), lambda h, i, r: (r, 0, h, 0))
    its_keys = pl.BlockSpec((None, num_tokens, None, head_size), lambda h, i, r: (r, 0, h // group, 0))
    row = pl.BlockSpec((None, num_tokens), lambda h, i, r: (r, 0))
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        # Late blocks of queries see the most keys, so they go first. Heads are next to each other: they share keys.
        grid=(num_heads, seen.shape[1], num_rows),
        in_specs=[
            one_head,
            its_keys,
            its_keys,
            *[row] * 3,
            pl.BlockSpec((1,), lambda h, i, r: (0,)),
            pl.BlockSpec((None, None, seen.shape[2]), lambda h, i, r: (r, last - i, 0)),
            pl.BlockSpec((None, 1), lambda h, i, r: (r, last - i)),
        ],
        out_specs=[one_head, pl.BlockSpec((None, None, num_tokens), lambda h, i, r: (r, h, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((num_rows, num_heads, num_tokens), jnp.float32),
        ],
        compiler_params=tiles.compiler_params(plan.num_warps, plan.num_stages),
        interpret=plan.interpret,
        name="row_attention_forward",
    )(q, k, v, *fields, order, count)


def _kernel(
    q_ref,  # [T, h]
    k_ref,  # [T, h]
    v_ref,  # [T, h]
    positions_ref,  # int32 [T]
    segments_ref,  # int32 [T]
    prefixes_ref,  # int32 [T]
    window_ref,  # int32 [1]
    order_ref,  # int32 [m]
    count_ref,  # int32 [1]
    out_ref,  # [T, h]
    log_sums_ref,  # float32 [T]
    *,
    plan,
):
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * plan.query_block
    queries = tiles.load_head(q_ref, start, plan.query_block)
    field_refs = positions_ref, segments_ref, prefixes_ref
    query_fields = gradient.load_fields(field_refs, start, plan.query_block)

    def step(j, softmax):
        key_start = order_ref[j] * plan.key_block
        seen = gradient.visible(
            [x[:, None] for x in query_fields],
            [x[None, :] for x in gradient.load_fields(field_refs, key_start, plan.key_block)],
            window_ref[0],
        )
        raw = tiles.inner(queries, tiles.load_head(k_ref, key_start, plan.key_block))
        scores, _ = tiles.scores_of(raw, plan.scale, plan.soft_cap)
        return softmax.with_keys(scores, seen, tiles.load_head(v_ref, key_start, plan.key_block))

    empty = tiles.Softmax.empty(plan.query_block, q_ref.shape[-1])
    means, log_sum = lax.fori_loop(0, count_ref[0], step, empty).mean()
    tiles.store_head(out_ref, start, means)
    tiles.store(log_sums_ref, start, log_sum)
