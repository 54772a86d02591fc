"""Paged decode attention as a Pallas kernel of the Triton backend: every NVIDIA GPU since Ampere.

One program reads one part of one sequence for one key/value head, with all query heads of that head's group, so the
cache is read once. Tokens are gathered row by row through the page table, hence any page size; positions beyond the
row's part are masked in the load itself and never read.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_kernels import triton_tiles
from jaxrl_kernels.device import Device
from jaxrl_kernels.paged_attention import splits

_LOG2_E = math.log2(math.e)  # the kernel works in powers of two, which the hardware has an instruction for
_PROGRAMS_PER_CORE = 4  # what registers and shared memory of an H200 hold of it at head size 128


def why_not(device: Device, dtype, head_size: int, page_size: int) -> str | None:
    """Why the kernel can't run for these on that device, and what to choose; None when it can, at any page size."""
    return triton_tiles.why_not(device, dtype, head_size)


def paged_attention(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    *,
    scale,
    window,
    soft_cap,
    num_splits: int | None = None,
    block_tokens: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 4,
    num_cores: int | None = None,
    interpret: bool = False,
):
    """See `api.paged_attention`. Checks shapes and dtype, not the device: `why_not` does.

    Args:
      num_splits: parts per sequence; None is `splits.choose_num_splits`.
      block_tokens: tokens read at a time, a power of two of at least 16; None is 64, or 32 in float32.
      num_warps: threads per program / 32; None is 4, or 8 for heads of 512 bytes and more.
      num_stages: depth of Triton's pipeline, which loads the page ids, then the pages, then computes.
      num_cores: streaming multiprocessors of the device; used for ``num_splits`` only.
      interpret: runs the kernel's operations one by one on any backend, slowly: for tests.
    """
    batch, num_heads, head_size = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    if reason := triton_tiles.why_not_shape(q.dtype, head_size):
        raise ValueError(f"paged attention 'pallas_triton' {reason}")
    if k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise ValueError(
            f"paged attention 'pallas_triton' takes one dtype, not {q.dtype} queries and "
            f"{k_pages.dtype}, {v_pages.dtype} pages; choose 'xla' or cast the queries"
        )
    if batch == 0 or page_table.shape[1] == 0:
        return jnp.zeros_like(q)
    group = num_heads // num_kv_heads
    if block_tokens is None:
        block_tokens = 32 if q.dtype == jnp.float32 else 64
    if block_tokens < triton_tiles.MIN_TILE or block_tokens & (block_tokens - 1):
        raise ValueError(
            f"block_tokens must be a power of two and at least {triton_tiles.MIN_TILE}, not {block_tokens}"
        )
    if num_warps is None:
        num_warps = 8 if head_size * q.dtype.itemsize >= 512 else 4
    max_tokens = page_table.shape[1] * page_size
    if window is not None:
        max_tokens = min(max_tokens, window + block_tokens)
    if num_splits is None:
        num_splits = splits.choose_num_splits(
            num_programs=batch * num_kv_heads,
            max_tokens=max_tokens,
            programs_per_core=_PROGRAMS_PER_CORE,
            num_cores=num_cores,
        )
    kernel = functools.partial(
        _kernel,
        page_size=page_size,
        block_tokens=block_tokens,
        num_splits=num_splits,
        scale=float(scale),
        window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        chunks=triton_tiles.parts(head_size),
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,  # else Triton rounds float32 to tf32
    )
    grouped = pl.BlockSpec((None, None, group, head_size), lambda b, k, s: (b, k, 0, 0))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    outputs, log_sums = pl.pallas_call(
        kernel,
        grid=(batch, num_kv_heads, num_splits),
        in_specs=[
            grouped,
            whole,
            whole,
            pl.BlockSpec((None, page_table.shape[1]), lambda b, k, s: (b, 0)),
            pl.BlockSpec((1,), lambda b, k, s: (b,)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, group, head_size), lambda b, k, s: (s, b, k, 0, 0)),
            pl.BlockSpec((None, None, None, group), lambda b, k, s: (s, b, k, 0)),
        ],
        out_shape=[
            # One part is the result itself.
            jax.ShapeDtypeStruct(
                (num_splits, batch, num_kv_heads, group, head_size), q.dtype if num_splits == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((num_splits, batch, num_kv_heads, group), jnp.float32),
        ],
        compiler_params=triton_tiles.compiler_params(num_warps, num_stages),
        interpret=interpret,
        name="paged_attention_decode",
    )(
        q.reshape(batch, num_kv_heads, group, head_size),
        k_pages,
        v_pages,
        page_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
    )
    out = outputs[0] if num_splits == 1 else splits.combine(outputs, log_sums)
    return out.reshape(q.shape).astype(q.dtype)


def _kernel(
    q_ref,  # [G, h]
    k_ref,  # [P, S, K, h]
    v_ref,  # [P, S, K, h]
    table_ref,  # int32 [M]
    length_ref,  # int32 [1]
    out_ref,  # [G, h]
    log_sum_ref,  # float32 [G]
    *,
    page_size,
    block_tokens,
    num_splits,
    scale,
    window,
    soft_cap,
    chunks,
    precision,
):
    from jax.experimental.pallas import triton

    head, split = pl.program_id(1), pl.program_id(2)
    group, num_columns = q_ref.shape[0], table_ref.shape[0]
    tile_rows = max(triton_tiles.MIN_TILE, pl.next_power_of_2(group))
    # The tile's spare rows repeat the last head. They are written to its place too, with the same values.
    rows = jnp.minimum(jnp.arange(tile_rows), group - 1)
    length = length_ref[0]
    first, last = splits.part_of_row(length, split, num_splits=num_splits, window=window, unit=block_tokens)
    queries = [q_ref[rows, pl.ds(start, size)] for start, size in chunks]

    def dot(left, right):
        return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)

    def block(index, carry):
        accumulators, largest, total = carry
        position = first + index * block_tokens + jnp.arange(block_tokens)
        seen = position < last
        if window is not None:
            seen &= position >= length - window
        column = jnp.minimum(lax.div(position, jnp.int32(page_size)), num_columns - 1)
        page = table_ref[column]
        offset = lax.rem(position, jnp.int32(page_size))

        def load(ref, start, size):  # [block_tokens, size]; what is not seen is not read, whatever it holds
            shape = block_tokens, size
            # Indices are whole tiles: the interpreter can't mask a load that mixes them with slices.
            pages, offsets, mask = (jnp.broadcast_to(each[:, None], shape) for each in (page, offset, seen))
            columns = jnp.broadcast_to(start + jnp.arange(size)[None, :], shape)
            return triton.load(ref.at[pages, offsets, head, columns], mask=mask, other=0.0)

        scores = jnp.zeros((tile_rows, block_tokens), jnp.float32)
        for (start, size), query in zip(chunks, queries, strict=True):
            scores += dot(query, load(k_ref, start, size).T)
        if soft_cap is None:
            scores *= scale * _LOG2_E
        else:
            scores = (soft_cap * _LOG2_E) * jnp.tanh(scores * (scale / soft_cap))
        scores = jnp.where(seen[None, :], scores, splits.EMPTY)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        shrink = jnp.exp2(largest - new_largest)
        weights = jnp.where(seen[None, :], jnp.exp2(scores - new_largest[:, None]), 0.0)
        total = total * shrink + jnp.sum(weights, axis=1)
        updated = []
        for (start, size), accumulator in zip(chunks, accumulators, strict=True):
            values = load(v_ref, start, size)
            updated.append(accumulator * shrink[:, None] + dot(weights.astype(values.dtype), values))
        return tuple(updated), new_largest, total

    start_state = (
        tuple(jnp.zeros((tile_rows, size), jnp.float32) for _, size in chunks),
        jnp.full((tile_rows,), splits.EMPTY, jnp.float32),
        jnp.zeros((tile_rows,), jnp.float32),
    )
    num_blocks = lax.div(jnp.maximum(last - first, 0) + (block_tokens - 1), jnp.int32(block_tokens))
    accumulators, largest, total = lax.fori_loop(0, num_blocks, block, start_state)
    empty = total == 0.0
    divisor = jnp.where(empty, 1.0, total)
    for (start, size), accumulator in zip(chunks, accumulators, strict=True):
        out_ref[rows, pl.ds(start, size)] = (accumulator / divisor[:, None]).astype(out_ref.dtype)
    log_sum_ref[rows] = jnp.where(empty, splits.EMPTY, largest * (1.0 / _LOG2_E) + jnp.log(divisor))
