"""Prefill attention in blocks against the dense specification, and a sequence in pieces against the whole."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.prefill_attention import xla
from jaxrl_kernels.prefill_attention.api import prefill_attention
from jaxrl_kernels.prefill_attention.cases import CASES, Case, inputs


def run(case: Case, implementation: str) -> np.ndarray:
    arrays = {
        name: jnp.asarray(value, case.dtype if value.dtype == np.float32 else None)
        for name, value in inputs(case).items()
    }
    attend = jax.jit(
        functools.partial(
            prefill_attention,
            scale=case.scale,
            window=case.window,
            soft_cap=case.soft_cap,
            implementation=implementation,
        )
    )
    row = (arrays[name] for name in ("q", "k", "v", "positions", "sequence_ids"))
    out = attend(*row, (arrays["k_pages"], arrays["v_pages"]), arrays["context"])
    assert out.dtype == case.dtype
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_dense_reference(case):
    """float32: a softmax of up to 500 terms summed in another order; bfloat16: 8 bits of the weights and the output."""
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-6
    np.testing.assert_allclose(run(case, "xla"), run(case, "reference"), atol=tolerance, rtol=tolerance)


def test_padding_is_zero_and_pages_of_nobody_are_not_read():
    """Every pool entry that counts for nobody is NaN in the cases."""
    case = next(case for case in CASES if case.name == "cached_to_mid_page")
    out = run(case, "xla")
    assert np.isfinite(out).all()
    assert (out[44:] == 0).all() and (np.abs(out[:44]).max(axis=(1, 2)) > 0).all()


@pytest.mark.parametrize("block", [1, 7, 64])
def test_the_block_size_changes_nothing(block):
    case = next(case for case in CASES if case.name == "cached_and_fresh")
    arrays = {name: jnp.asarray(value) for name, value in inputs(case).items()}
    row = [arrays[name] for name in ("q", "k", "v", "positions", "sequence_ids")]
    rest = ((arrays["k_pages"], arrays["v_pages"]), arrays["context"])
    options = {"scale": 0.25, "window": None, "soft_cap": None}
    outs = [
        jax.jit(functools.partial(xla.prefill_attention, **options, block_tokens=tokens))(*row, *rest)
        for tokens in (block, 128)
    ]
    np.testing.assert_allclose(*outs, atol=2e-6)  # softmax of up to 290 terms in another order


def test_a_sequence_in_pieces_equals_the_whole():
    """70 tokens at once, and as pieces of 16, 30 and 24 whose predecessors lie in pages. The pieces start in the middle
    of a page, too."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((70, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    positions, ids = jnp.arange(70, dtype=jnp.int32), jnp.ones(70, jnp.int32)
    whole = np.asarray(prefill_attention(q, k, v, positions, ids))
    pools = [np.full((6, 16, 2, 16), np.nan, np.float32) for _ in range(2)]
    table = [4, 1, 3, 0, 5]
    for first, last in ((0, 16), (16, 46), (46, 70)):
        columns = [(table[at // 16], 1, at, min(16, first - at)) for at in range(0, first, 16)]
        context = np.array(columns, np.int32).reshape(-1, 4).T
        piece = slice(first, last)
        row = (x[piece] for x in (q, k, v, positions, ids))
        out = prefill_attention(*row, tuple(map(jnp.asarray, pools)), jnp.asarray(context))
        np.testing.assert_allclose(out, whole[piece], atol=2e-6)
        for position in range(first, last):
            pools[0][table[position // 16], position % 16] = k[position]
            pools[1][table[position // 16], position % 16] = v[position]


def test_scores_of_a_long_row_never_exist_whole():
    case = Case("long", ((512, 2048),), 2048, num_heads=2, num_kv_heads=1, page_size=64)
    arrays = {name: jnp.asarray(value) for name, value in inputs(case).items()}
    row = [arrays[name] for name in ("q", "k", "v", "positions", "sequence_ids")]
    rest = ((arrays["k_pages"], arrays["v_pages"]), arrays["context"])
    text = jax.jit(prefill_attention).lower(*row, *rest).compile().as_text()
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) <= 2 * 2048 * xla.BLOCK_TOKENS


def test_bad_arguments_are_named():
    arrays = inputs(CASES[0])
    row = [jnp.asarray(arrays[name]) for name in ("q", "k", "v", "positions", "sequence_ids")]
    with pytest.raises(ValueError, match="'fast' is unknown; choose auto or reference, xla"):
        prefill_attention(*row, implementation="fast")
    with pytest.raises(ValueError, match="belong together"):
        prefill_attention(*row, context=jnp.zeros((4, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"context must be integers \[4, C\]"):
        prefill_attention(*row, (jnp.zeros((1, 16, 2, 16)),) * 2, jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(ValueError, match="window is 0"):
        prefill_attention(*row, window=0)
