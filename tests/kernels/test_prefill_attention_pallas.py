"""The Pallas kernel of prefill attention, interpreted on the CPU, against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.prefill_attention import pallas_triton, reference
from jaxrl_kernels.prefill_attention.cases import CASES, Case, inputs

# float32: a softmax of up to 500 terms summed in another order; 1e-6 was the most seen. bfloat16 and float16: weights
# are rounded to 8 and 11 bits before they meet the values, and the result once more; values are at most 4.
TOLERANCES = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}

UNOPTIMISED = {"xla_backend_optimization_level": 0}  # compiling is most of the time
TOKENS, COLUMNS, PAGES = 521, 40, 43  # no multiples of a block


def arrays_of(case: Case) -> dict[str, jax.Array]:
    """Inputs; those of plain cases in one shape, so that many are one program."""
    arrays = inputs(case)
    own = dataclasses.replace(case, name="", sequences=(), num_tokens=0)
    if own == Case("", (), 0) and case.num_tokens >= 30:
        for name in ("q", "k", "v", "positions", "sequence_ids"):
            wide = np.zeros((TOKENS, *arrays[name].shape[1:]), arrays[name].dtype)
            wide[: case.num_tokens] = arrays[name]
            arrays[name] = wide
        for name in ("k_pages", "v_pages"):
            wide = np.full((PAGES, *arrays[name].shape[1:]), np.nan, np.float32)
            wide[: len(arrays[name])] = arrays[name]
            arrays[name] = wide
        arrays["context"] = np.pad(arrays["context"], ((0, 0), (0, COLUMNS - arrays["context"].shape[1])))
    return {
        name: jnp.asarray(value, case.dtype if value.dtype == np.float32 else None) for name, value in arrays.items()
    }


@functools.cache
def both(scale, window, soft_cap, query_block, key_block):
    """The kernel and the reference as one program."""
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    sizes = {"query_block": query_block, "key_block": key_block}
    kernel = functools.partial(pallas_triton.prefill_attention, **options, **sizes, interpret=True)

    def run(arrays):
        row = [arrays[name] for name in ("q", "k", "v", "positions", "sequence_ids")]
        rest = ((arrays["k_pages"], arrays["v_pages"]), arrays["context"])
        return kernel(*row, *rest), reference.prefill_attention(*row, *rest, **options)

    return jax.jit(run, compiler_options=UNOPTIMISED)


def difference(case: Case, query_block=64, key_block=32):
    """Largest difference from the reference; NaN, which is below no tolerance, where one leaks."""
    scale = case.head_size**-0.5 if case.scale is None else case.scale
    found, expected = both(scale, case.window, case.soft_cap, query_block, key_block)(arrays_of(case))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return np.abs(np.asarray(found, np.float32) - np.asarray(expected, np.float32)).max()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case):
    """Pool entries that count for nobody are NaN.

    Caught: a window of W + 1; entries that count for nobody loaded; a page's count ignored; later tokens, other
    sequences or padding seen; one key/value head of the pool taken for all; cached pages left out; the window of the
    lists of blocks too narrow."""
    assert difference(case) < TOLERANCES[case.dtype]


@pytest.mark.parametrize(
    ("query_block", "key_block", "case"),
    [
        (16, 64, Case("page_of_twelve", ((30, 20), (12, 5), (0, 8)), 50, num_heads=2, num_kv_heads=1, page_size=12)),
        (16, 16, Case("head_96", ((33, 20),), 33, num_heads=2, num_kv_heads=2, head_size=96, dtype="float16")),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_other_blocks_pages_and_head_sizes(query_block, key_block, case):
    assert difference(case, query_block, key_block) < TOLERANCES[case.dtype]


def test_without_pages_and_with_no_column():
    """Caught: a context of no column left to the kernel."""
    arrays = arrays_of(dataclasses.replace(CASES[1], sequences=((0, 3),), num_tokens=5))
    row = [arrays[name] for name in ("q", "k", "v", "positions", "sequence_ids")]
    options = {"scale": 0.3, "window": None, "soft_cap": None}
    expected = reference.prefill_attention(*row, None, None, **options)
    pages = arrays["k_pages"], arrays["v_pages"]
    for rest in ((None, None), (pages, arrays["context"][:, :0])):
        attend = functools.partial(pallas_triton.prefill_attention, **options, interpret=True)
        found = jax.jit(attend, compiler_options=UNOPTIMISED)(*row, *rest)
        np.testing.assert_allclose(found, expected, atol=TOLERANCES["float32"])
    nothing = [x[:0] for x in row]
    assert pallas_triton.prefill_attention(*nothing, None, None, **options, interpret=True).shape == (0, 6, 16)


def test_float32_is_multiplied_as_such():
    """Each product asks for float32; else Triton rounds its operands to 10 bits (tf32), on GPUs only."""
    arrays = arrays_of(dataclasses.replace(CASES[1], head_size=80))
    row = [arrays[name] for name in ("q", "k", "v", "positions", "sequence_ids")]
    attend = functools.partial(pallas_triton.prefill_attention, scale=1.0, window=None, soft_cap=None)
    text = str(jax.make_jaxpr(attend)(*row, (arrays["k_pages"], arrays["v_pages"]), arrays["context"]))
    # Two parts of a head, of cached and of own keys: 2 x 2 inner products, and as many with values.
    assert text.count("dot_general") == text.count("Precision.HIGHEST, Precision.HIGHEST") == 8


@pytest.mark.parametrize(
    ("dtypes", "head_size", "block", "message"),
    [
        (("float64",) * 4, 64, 64, "takes float32, bfloat16, float16, not float64; choose 'xla'"),
        (("bfloat16",) * 4, 24, 64, "head size that is a multiple of 16, not 24; choose 'xla'"),
        (
            ("bfloat16", "bfloat16", "bfloat16", "float16"),
            64,
            64,
            "takes one dtype, not bfloat16, .*, float16, float16",
        ),
        (("float32",) * 4, 64, 8, "power of two and at least 16 tokens, not 8"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(dtypes, head_size, block, message):
    *row, pool = (np.zeros((4, 2, head_size), dtype) for dtype in dtypes)
    ids = np.zeros(4, np.int32)
    options = {"scale": 1.0, "window": None, "soft_cap": None, "key_block": block}
    with pytest.raises(ValueError, match=message):
        pallas_triton.prefill_attention(*row, ids, ids, (pool[None],) * 2, np.zeros((4, 1), np.int32), **options)
