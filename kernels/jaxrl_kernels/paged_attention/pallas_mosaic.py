"""Paged decode attention as a Pallas kernel of the Mosaic GPU backend: Hopper's wgmma and bulk copies.

One program (one warpgroup) reads one part of one sequence for one key/value head. Pages come into shared memory by
bulk copies, one block ahead of the one that is computed; both products are wgmma with the group's query heads padded
to the 64 rows that it takes. Entries that may not be seen get weight 0, and their values are set to 0 in shared
memory, since whatever lies in an unwritten page is copied with the rest and 0 * NaN would leak.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_kernels.device import Device
from jaxrl_kernels.paged_attention import splits

DTYPES = ("bfloat16", "float16")
BLOCK_TOKENS = 64
_ROWS = 64  # of a wgmma
_TILE_ROWS = 8  # of a swizzled tile of shared memory; copies are whole tiles
_STAGES = 2
_PROGRAMS_PER_CORE = 2  # what registers and shared memory of an H200 hold of it at head size 128


def why_not(device: Device, dtype, head_size: int, page_size: int) -> str | None:
    """Why the kernel can't run for these on that device, and what to choose; None when it can."""
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, and the program is for {device.platform}; choose 'xla' or 'auto'"
    if device.compute_capability is None or device.compute_capability[0] != 9:
        found = "an unknown one" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
        other = "pallas_triton" if (device.compute_capability or (0, 0)) >= (8, 0) else "xla"
        return (
            "needs compute capability 9.x (Hopper), the only one with wgmma instructions, and "
            f"{device.kind} has {found}; choose {other!r}"
        )
    return why_not_shape(dtype, head_size, page_size)


def why_not_shape(dtype, head_size: int, page_size: int) -> str | None:
    """As :func:`why_not`, of dtype and shapes alone."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"takes {' and '.join(DTYPES)}, not {jnp.dtype(dtype).name}; choose 'pallas_triton'"
    if head_size % 16 or head_size > 256:
        return f"needs a head size that is a multiple of 16 up to 256, not {head_size}; choose 'pallas_triton'"
    if page_size < _TILE_ROWS or page_size & (page_size - 1):
        return (
            f"needs a page size that is a power of two and at least {_TILE_ROWS}, not {page_size}; "
            "choose 'pallas_triton'"
        )
    return None


def interpret_parameters():
    """What to pass as ``interpret`` to simulate a GPU on any backend.

    Raises:
      NotImplementedError: this jax's simulator can't run the kernel.
    """
    if not _is_recent():
        raise NotImplementedError(
            f"jax {jax.__version__} simulates no wgmma with a transposed operand; jax 0.11 or newer does"
        )
    from jax.experimental.pallas import mosaic_gpu

    if public := getattr(mosaic_gpu, "InterpretGPUParams", None):
        return public()
    from jax._src.pallas.mosaic_gpu.interpret import params  # 0.11 has no public name for it

    return params.InterpretGPUParams()


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
    num_cores: int | None = None,
    interpret: bool = False,
):
    """See `api.paged_attention`. Checks shapes and dtype, not the device: `why_not` does.

    Args:
      num_splits: parts per sequence; None is `splits.choose_num_splits`.
      num_cores: streaming multiprocessors of the device; used for ``num_splits`` only.
      interpret: simulates the GPU on any backend, slowly: for tests. See `interpret_parameters` for what it raises.
    """
    batch, num_heads, head_size = q.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    if reason := why_not_shape(q.dtype, head_size, page_size):
        raise ValueError(f"paged attention 'pallas_mosaic' {reason}")
    if k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise ValueError(
            f"paged attention 'pallas_mosaic' takes one dtype, not {q.dtype} queries and "
            f"{k_pages.dtype}, {v_pages.dtype} pages; choose 'xla' or cast the queries"
        )
    group = num_heads // num_kv_heads
    if group > _ROWS:
        raise ValueError(
            f"paged attention 'pallas_mosaic' takes up to {_ROWS} query heads per key/value head, not {group}; "
            "choose 'pallas_triton'"
        )
    if batch == 0 or page_table.shape[1] == 0:
        return jnp.zeros_like(q)
    max_tokens = page_table.shape[1] * page_size
    if window is not None:
        max_tokens = min(max_tokens, window + BLOCK_TOKENS)
    if num_splits is None:
        num_splits = splits.choose_num_splits(
            num_programs=batch * num_kv_heads,
            max_tokens=max_tokens,
            programs_per_core=_PROGRAMS_PER_CORE,
            num_cores=num_cores,
        )
    call, stored_rows = _kernel_call(
        q.dtype,
        batch=batch,
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=head_size,
        page_size=page_size,
        num_splits=num_splits,
        scale=float(scale),
        window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        interpret=interpret_parameters() if interpret else None,
    )
    grouped = q.reshape(batch, num_kv_heads, group, head_size)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, stored_rows - group), (0, 0)))
    outputs, log_sums = call(grouped, k_pages, v_pages, page_table.astype(jnp.int32), lengths.astype(jnp.int32))
    outputs, log_sums = outputs[:, :, :, :group], log_sums[:, :, :, :group]
    out = outputs[0] if num_splits == 1 else splits.combine(outputs, log_sums)
    return out.reshape(q.shape).astype(q.dtype)


def _is_recent() -> bool:
    return tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)


def _swizzle(head_size: int) -> int:
    """Bytes over which rows of shared memory are swizzled: the widest that the head size is a multiple of."""
    return next(size for size in (128, 64, 32) if head_size % (size // 2) == 0)


def _kernel_call(
    dtype,
    *,
    batch,
    num_kv_heads,
    group,
    head_size,
    page_size,
    num_splits,
    scale,
    window,
    soft_cap,
    interpret,
):
    """The kernel for these shapes, and the number of rows per group that its queries and outputs have."""
    try:
        from jax.experimental.pallas import mosaic_gpu
    except ImportError as error:  # absl-py, on jax 0.10
        raise ValueError(f"paged attention 'pallas_mosaic' needs what Mosaic GPU imports: {error}") from error

    layout = mosaic_gpu.Layout.WGMMA
    row_layout = layout.reduce(1)
    unit = min(page_size, BLOCK_TOKENS)  # tokens of one copy
    copies = BLOCK_TOKENS // unit
    stored_rows = -(-group // _TILE_ROWS) * _TILE_ROWS
    out_dtype = dtype if num_splits == 1 else jnp.float32
    swizzle = _swizzle(head_size)

    def tile(shape, dtype):
        columns = swizzle // jnp.dtype(dtype).itemsize
        transforms = mosaic_gpu.TilingTransform((_TILE_ROWS, columns)), mosaic_gpu.SwizzleTransform(swizzle)
        return mosaic_gpu.SMEM(shape, dtype, transforms=transforms)

    def full(shape, value, layout):
        return mosaic_gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def over_columns(vector, num_columns):
        return lax.broadcast_in_dim(vector, (_ROWS, num_columns), [0])

    def product(num_columns, left, right):
        def run(accumulator):
            mosaic_gpu.wgmma(accumulator, left, right)
            return accumulator[...]  # waits

        return pl.run_scoped(run, mosaic_gpu.WGMMAAccumulatorRef((_ROWS, num_columns), jnp.float32))

    def kernel(
        q_ref,  # [B, K, stored_rows, h]
        k_ref,  # [P, S, K, h]
        v_ref,  # [P, S, K, h]
        table_ref,  # int32 [B, M]
        lengths_ref,  # int32 [B]
        out_ref,  # [splits, B, K, stored_rows, h]
        log_sums_ref,  # float32 [splits, B, K, 64]
        query_barrier,
        key_barriers,
        value_barriers,
    ):
        split, row, head = lax.axis_index("split"), lax.axis_index("row"), lax.axis_index("head")
        length = lengths_ref[row]
        first, last = splits.part_of_row(length, split, num_splits=num_splits, window=window, unit=BLOCK_TOKENS)
        begin = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
        num_blocks = lax.div(jnp.maximum(last - first, 0) + (BLOCK_TOKENS - 1), jnp.int32(BLOCK_TOKENS))

        def attend(q_smem, k_smem, v_smem, weights_smem):
            def fetch(index, slot):
                sources = []
                for copy in range(copies):
                    position = first + index * BLOCK_TOKENS + copy * unit
                    # A block's copies beyond the last token repeat the last page: any page will do, they are masked.
                    position = jnp.minimum(position, lax.div(last - 1, jnp.int32(unit)) * unit)
                    page = table_ref[row, lax.div(position, jnp.int32(page_size))]
                    sources.append((page, pl.ds(lax.rem(position, jnp.int32(page_size)), unit), head))
                # A copy first waits for the whole warpgroup (a barrier that Pallas adds by itself), so nobody still
                # reads the block whose place is filled.
                for copy, source in enumerate(sources):
                    target = slot, pl.ds(copy * unit, unit)
                    mosaic_gpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[target], key_barriers.at[slot])
                for copy, source in enumerate(sources):
                    target = slot, pl.ds(copy * unit, unit)
                    mosaic_gpu.copy_gmem_to_smem(v_ref.at[source], v_smem.at[target], value_barriers.at[slot])

            # Rows beyond the group stay what they are: no row of a product depends on another.
            mosaic_gpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem.at[pl.ds(0, stored_rows)], query_barrier)
            for ahead in range(_STAGES - 1):

                @pl.when(ahead < num_blocks)
                def _(ahead=ahead):
                    fetch(jnp.int32(ahead), jnp.int32(ahead))

            mosaic_gpu.barrier_wait(query_barrier)

            def block(index, carry):
                accumulator, largest, total = carry
                slot = lax.rem(index, jnp.int32(_STAGES))
                start = first + index * BLOCK_TOKENS

                @pl.when(index + (_STAGES - 1) < num_blocks)
                def _():
                    ahead = index + (_STAGES - 1)
                    fetch(ahead, lax.rem(ahead, jnp.int32(_STAGES)))

                mosaic_gpu.barrier_wait(key_barriers.at[slot])
                scores = product(BLOCK_TOKENS, q_smem, k_smem.at[slot].transpose((1, 0)))
                scores = scores * scale if soft_cap is None else soft_cap * jnp.tanh(scores * (scale / soft_cap))
                position = start + mosaic_gpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
                scores = jnp.where((position < last) & (position >= begin), scores, splits.EMPTY)
                new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
                shrink = jnp.exp(largest - new_largest)
                # Each block of a part holds a token that is seen, so the largest is real and masked weights are 0.
                weights = jnp.exp(scores - over_columns(new_largest, BLOCK_TOKENS))
                total = total * shrink + jnp.sum(weights, axis=1)
                weights_smem[...] = weights.astype(dtype)
                mosaic_gpu.barrier_wait(value_barriers.at[slot])

                @pl.when((start < begin) | (start + BLOCK_TOKENS > last))
                def _():
                    shape = BLOCK_TOKENS, head_size
                    place = start + mosaic_gpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                    values = v_smem[slot]
                    v_smem[slot] = jnp.where((place < last) & (place >= begin), values, jnp.zeros_like(values))

                mosaic_gpu.commit_smem()  # weights and zeroed values are written before the product reads them
                accumulator = accumulator * over_columns(shrink, head_size)
                return accumulator + product(head_size, weights_smem, v_smem.at[slot]), new_largest, total

            state = (
                full((_ROWS, head_size), 0.0, layout),
                full((_ROWS,), splits.EMPTY, row_layout),
                full((_ROWS,), 0.0, row_layout),
            )
            return lax.fori_loop(0, num_blocks, block, state)

        accumulator, largest, total = pl.run_scoped(
            attend,
            tile((_ROWS, head_size), dtype),
            tile((_STAGES, BLOCK_TOKENS, head_size), dtype),
            tile((_STAGES, BLOCK_TOKENS, head_size), dtype),
            tile((_ROWS, BLOCK_TOKENS), dtype),
        )
        mosaic_gpu.commit_smem()  # the memory of the loop is used again below

        def store(out_smem, log_sums_smem):
            empty = total == 0.0
            divisor = jnp.where(empty, 1.0, total)
            out_smem[...] = (accumulator / over_columns(divisor, head_size)).astype(out_dtype)
            log_sums_smem[...] = jnp.where(empty, splits.EMPTY, largest + jnp.log(divisor))
            mosaic_gpu.commit_smem()
            mosaic_gpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, stored_rows)], out_ref.at[split, row, head])
            mosaic_gpu.copy_smem_to_gmem(log_sums_smem, log_sums_ref.at[split, row, head])
            mosaic_gpu.wait_smem_to_gmem(0)

        pl.run_scoped(store, tile((_ROWS, head_size), out_dtype), mosaic_gpu.SMEM((_ROWS,), jnp.float32))

    outputs = (
        jax.ShapeDtypeStruct((num_splits, batch, num_kv_heads, stored_rows, head_size), out_dtype),
        jax.ShapeDtypeStruct((num_splits, batch, num_kv_heads, _ROWS), jnp.float32),
    )
    barriers = (
        mosaic_gpu.Barrier(),
        mosaic_gpu.Barrier(num_barriers=_STAGES, num_arrivals=copies),
        mosaic_gpu.Barrier(num_barriers=_STAGES, num_arrivals=copies),
    )
    call = mosaic_gpu.kernel(
        kernel,
        out_type=outputs,
        scratch_types=barriers,
        grid=(num_splits, batch, num_kv_heads),
        grid_names=("split", "row", "head"),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return call, stored_rows
