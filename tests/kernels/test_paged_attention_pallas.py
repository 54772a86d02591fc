"""The Pallas kernels of paged decode attention, interpreted on the CPU, against the reference and the shared cases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.device import Device
from jaxrl_kernels.paged_attention import cases, pallas_mosaic, pallas_triton, reference, splits

# float32: the terms of two sums of at most 128 products in another order; 1e-6 was the most seen.
# bfloat16 and float16: weights are rounded to the cache's dtype before they meet the values (2**-9 and 2**-12 of each),
# and the result once more; values and results of the cases are at most 4.
TOLERANCES = {"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3}

HOPPER = Device("gpu", "NVIDIA H200", (9, 0), 132)
MOSAIC_RUNS = jax.__version_info__ >= (0, 11)
needs_simulator = pytest.mark.skipif(
    not MOSAIC_RUNS, reason=f"jax {jax.__version__} simulates no wgmma with a transposed operand; 0.11 does"
)
# It takes no float32 and no page of one token: the first becomes bfloat16, the second is left out.
MOSAIC_CASES = [dataclasses.replace(case, dtype="bfloat16") for case in cases.CASES if case.page_size >= 8]


def difference(kernel, case, **options):
    """Largest difference of a kernel from the reference."""
    arrays = cases.inputs(case)
    static = {
        "scale": case.head_size**-0.5 if case.scale is None else case.scale,
        "window": case.window,
        "soft_cap": case.soft_cap,
    }

    def both(arrays):
        got = kernel(**arrays, **static, **options, interpret=True)
        return got, reference.paged_attention(**arrays, **static)

    # Compiling is most of the time, hence without optimisation.
    got, expected = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(arrays)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    # NaN anywhere makes this NaN, which is not below any tolerance.
    return np.abs(np.asarray(got, np.float32) - np.asarray(expected, np.float32)).max()


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_triton_kernel_equals_the_reference(case):
    """Two parts, blocks of 16 tokens: several of both in the longer rows.

    Caught: `<=` for `<` in the length mask; a window of W + 1; values loaded without the mask; the second part of a
    head of 80 left out; a part's sum in powers of two taken for powers of e; earlier blocks' weights not scaled down.
    """
    assert difference(pallas_triton.paged_attention, case, num_splits=2, block_tokens=16) < TOLERANCES[case.dtype]


@pytest.mark.parametrize(
    ("num_splits", "case"),
    [
        (1, cases.Case("one_part", lengths=(0, 1, 70), dtype="float16")),
        (7, cases.Case("more_parts_than_blocks", lengths=(0, 1, 33, 150), window=100)),
        (3, cases.Case("page_of_twelve", lengths=(11, 12, 13, 40), page_size=12)),
        (2, cases.Case("group_of_twenty", lengths=(40, 3), num_heads=20, num_kv_heads=1, head_size=16)),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_triton_kernel_splits_and_shapes(num_splits, case):
    assert (
        difference(pallas_triton.paged_attention, case, num_splits=num_splits, block_tokens=32) < TOLERANCES[case.dtype]
    )


def test_triton_kernel_multiplies_float32_as_such():
    """Each product of the kernel asks for float32; else Triton rounds its operands to 10 bits (tf32), on GPUs only.
    Caught: no precision given."""
    arrays = cases.inputs(cases.Case("small", lengths=(3,), head_size=80))
    options = {"scale": 1.0, "window": None, "soft_cap": None}
    text = str(jax.make_jaxpr(lambda kwargs: pallas_triton.paged_attention(**kwargs, **options))(arrays))
    assert text.count("dot_general") == text.count("Precision.HIGHEST, Precision.HIGHEST") == 4  # two parts of a head


@needs_simulator
@pytest.mark.parametrize("case", MOSAIC_CASES, ids=lambda case: case.name)
def test_mosaic_kernel_equals_the_reference(case):
    """One part. Caught: values not set to zero beyond the length, and before the window; scores before the window not
    masked; pages read beyond the table's last column.
    """
    assert difference(pallas_mosaic.paged_attention, case, num_splits=1) < TOLERANCES["bfloat16"]


@needs_simulator
def test_mosaic_kernel_splits_without_races(monkeypatch):
    """Three parts of several blocks, pages larger than a block, a window, float16; the simulator also looks for
    accesses that no barrier orders.

    Caught: values used before their copy is awaited; a block fetched into the place of the one in use; the offset in a
    page ignored; a part's largest score left out of its sum.
    """
    from jax.experimental.pallas import mosaic_gpu

    parameters = mosaic_gpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(pallas_mosaic, "interpret_parameters", lambda: parameters)
    case = cases.Case("long", lengths=(300, 70, 0), page_size=128, num_kv_heads=1, window=290, dtype="float16")
    assert difference(pallas_mosaic.paged_attention, case, num_splits=3) < TOLERANCES["float16"]


@pytest.mark.skipif(MOSAIC_RUNS, reason="this jax simulates the kernel")
def test_mosaic_kernel_says_that_it_cannot_be_simulated():
    case = cases.Case("small", lengths=(1,), dtype="bfloat16")
    with pytest.raises(NotImplementedError, match=r"0\.11 or newer"):
        difference(pallas_mosaic.paged_attention, case)


def test_parts_cover_each_seen_token_once():
    """Caught: the window's start ignored; a last part that runs beyond the length."""
    for length in (0, 1, 63, 64, 65, 300):
        for window in (None, 1, 64, 100):
            for num_splits in (1, 2, 5):
                parts = [
                    splits.part_of_row(length, split, num_splits=num_splits, window=window, unit=64)
                    for split in range(num_splits)
                ]
                covered = [token for first, last in parts for token in range(int(first), int(last))]
                begin = 0 if window is None else max(0, length - window)
                assert [token for token in covered if token >= begin] == list(range(begin, length))
                assert all(token >= begin // 64 * 64 for token in covered)  # blocks before the window are not read


def test_combination_is_exact_for_scores_far_apart():
    """Log-sums 200 apart, beyond float32's range of exponents, and an empty part. Weights 1, e^-1 and 0.
    Caught: no largest value taken off first."""
    outputs = jnp.array([[[1.0, 2.0]], [[3.0, 5.0]], [[7.0, 7.0]], [[0.0, 0.0]]], jnp.float32)
    log_sums = jnp.array([[400.0], [399.0], [200.0], [splits.EMPTY]], jnp.float32)
    share = 1 / (1 + np.exp(-1))
    expected = share * np.array([1.0, 2.0]) + (1 - share) * np.array([3.0, 5.0])
    np.testing.assert_allclose(splits.combine(outputs, log_sums)[0], expected, rtol=1e-6)
    nothing = splits.combine(jnp.zeros((2, 1, 2)), jnp.full((2, 1), splits.EMPTY))
    np.testing.assert_array_equal(nothing, np.zeros((1, 2)))


@pytest.mark.parametrize(
    ("num_programs", "max_tokens", "expected"),
    [(8, 10**6, 32), (8, 300, 2), (1, 10**6, 64), (1024, 8192, 1), (1, 16, 1)],
)
def test_number_of_parts(num_programs, max_tokens, expected):
    """Enough to fill 128 cores twice, none shorter than 256 tokens, at most 64. Caught: another chip's cores."""
    got = splits.choose_num_splits(num_programs=num_programs, max_tokens=max_tokens, programs_per_core=2, num_cores=128)
    assert got == expected


@pytest.mark.parametrize(
    ("kernel", "changes", "message"),
    [
        (pallas_triton, {"dtype": "float64"}, "takes float32, bfloat16, float16, not float64; choose 'xla'"),
        (pallas_triton, {"head_size": 24}, "multiple of 16, not 24; choose 'xla'"),
        (pallas_mosaic, {"dtype": "float32"}, "takes bfloat16 and float16, not float32; choose 'pallas_triton'"),
        (pallas_mosaic, {"head_size": 272}, "multiple of 16 up to 256, not 272"),
        (pallas_mosaic, {"page_size": 4}, "power of two and at least 8, not 4; choose 'pallas_triton'"),
        (pallas_mosaic, {"page_size": 24}, "power of two and at least 8, not 24"),
    ],
)
def test_impossible_shapes_and_dtypes_are_named(kernel, changes, message):
    """Caught: pages smaller than a tile of shared memory let through."""
    shape = {"dtype": "bfloat16", "head_size": 64, "page_size": 16} | changes
    assert message in kernel.why_not(HOPPER, **shape)
    arrays = [
        np.zeros((2, 4, shape["head_size"]), shape["dtype"]),
        *[np.zeros((3, shape["page_size"], 2, shape["head_size"]), shape["dtype"])] * 2,
        np.zeros((2, 1), np.int32),
        np.zeros(2, np.int32),
    ]
    with pytest.raises(ValueError, match=message):
        kernel.paged_attention(*arrays, scale=1.0, window=None, soft_cap=None, interpret=True)


def test_mixed_dtypes_are_named():
    arrays = jax.tree.map(jnp.asarray, cases.inputs(cases.CASES[0]))
    arrays["q"] = arrays["q"].astype(jnp.bfloat16)
    for kernel in (pallas_triton, pallas_mosaic):
        with pytest.raises(ValueError, match="takes one dtype, not bfloat16 queries and float32"):
            kernel.paged_attention(**arrays, scale=1.0, window=None, soft_cap=None, interpret=True)


def test_more_heads_than_rows_of_a_wgmma_are_named():
    arrays = jax.tree.map(jnp.asarray, cases.inputs(cases.Case("wide", (3,), 65, 1, dtype="bfloat16")))
    with pytest.raises(ValueError, match="up to 64 query heads per key/value head, not 65; choose 'pallas_triton'"):
        pallas_mosaic.paged_attention(**arrays, scale=1.0, window=None, soft_cap=None, interpret=True)


@pytest.mark.parametrize("kernel", [pallas_triton, pallas_mosaic], ids=["triton", "mosaic"])
def test_table_without_columns_gives_zeros(kernel):
    """Caught: the case left to the Triton kernel, which can't be traced then."""
    arrays = jax.tree.map(jnp.asarray, cases.inputs(cases.Case("empty", (0, 0), dtype="bfloat16")))
    arrays["page_table"] = arrays["page_table"][:, :0]
    out = kernel.paged_attention(**arrays, scale=1.0, window=None, soft_cap=None, interpret=True)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.zeros(out.shape))
