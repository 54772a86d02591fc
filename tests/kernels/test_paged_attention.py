"""Paged decode attention: every implementation against a float64 loop and the shared cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.device import Device
from jaxrl_kernels.paged_attention import api, cases

CPU = Device("cpu", "cpu")
# Those for GPUs are checked by interpretation, in test_paged_attention_pallas.py.
NAMES = sorted(name for name in api.IMPLEMENTATIONS if api.why_not(name, CPU, jnp.float32, 64, 16) is None)


def loop(q, k_pages, v_pages, page_table, lengths, *, scale=None, window=None, soft_cap=None):
    """The definition in numpy float64, one head of one sequence at a time."""
    q, k_pages, v_pages = (np.asarray(array, np.float64) for array in (q, k_pages, v_pages))
    group = q.shape[1] // k_pages.shape[2]
    page_size = k_pages.shape[1]
    out = np.zeros(q.shape)
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        places = [(page_table[row, t // page_size], t % page_size) for t in range(first, length)]
        for head in range(q.shape[1] if places else 0):
            keys = np.stack([k_pages[page, offset, head // group] for page, offset in places])
            values = np.stack([v_pages[page, offset, head // group] for page, offset in places])
            scores = keys @ q[row, head] * (q.shape[2] ** -0.5 if scale is None else scale)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_equals_the_definition(case, name):
    """All entries that may not be seen are NaN in the cases.

    Seen to catch: `<=` for `<` in the length mask; a window of W + 1; values not masked (0 * NaN); one page too
    few for a window that begins inside a page; heads paired as i % K.
    """
    arrays = cases.inputs(case)
    options = {"scale": case.scale, "window": case.window, "soft_cap": case.soft_cap}
    got = jax.jit(lambda kwargs: api.paged_attention(**kwargs, **options, implementation=name))(arrays)
    assert got.dtype == arrays["q"].dtype
    tolerance = 1e-5 if case.dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float32), loop(**arrays, **options), atol=tolerance)


KEYS = np.array([[1, 0], [0, 1], [1, 1], [2, 0], [0, 2]], np.float32)
VALUES = np.array([[1, 0], [0, 1], [2, 2], [3, -1], [-1, 3]], np.float32)


def pool(tokens, page_size=2, num_pages=4):
    pages = np.zeros((num_pages * page_size, 1, 2), np.float32)
    pages[: len(tokens), 0] = tokens
    return jnp.asarray(pages.reshape(num_pages, page_size, 1, 2))


@pytest.mark.parametrize("name", NAMES)
def test_window_counts_the_current_token(name):
    """K09, at every position. Seen to catch: `>=` shifted by one (window_4)."""
    table = jnp.tile(jnp.arange(4, dtype=jnp.int32), (5, 1))
    query = jnp.tile(jnp.array([[1.0, 2.0]], jnp.float32), (5, 1))[:, None]
    lengths = jnp.arange(1, 6, dtype=jnp.int32)
    out = api.paged_attention(query, pool(KEYS), pool(VALUES), table, lengths, window=3, implementation=name)
    expected = [[1, 0], [0.33023845, 0.66976155], [1.2919799, 1.4359461], [1.7517449, 1.0069797]]
    np.testing.assert_allclose(out[:, 0], [*expected, [0.41210321, 2.1558876]], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_reused_page_shows_nothing_of_its_past(name):
    """K03: a page that held five tokens serves a sequence of length 1. Seen to catch: no length mask."""
    keys, values = pool(KEYS).at[1, 0, 0].set(jnp.ones(2)), pool(VALUES).at[1, 0, 0].set(jnp.array([5.0, 7.0]))
    table = jnp.array([[1, 0]], jnp.int32)
    query = jnp.array([[[1.0, 2.0]]], jnp.float32)
    out = api.paged_attention(query, keys, values, table, jnp.array([1], jnp.int32), implementation=name)
    np.testing.assert_allclose(out[0, 0], [5.0, 7.0], atol=1e-6)


def test_unable_or_unknown_raises():
    """Nothing falls back silently. Seen to catch: the check of the name left out."""
    arrays = jax.tree.map(jnp.asarray, cases.inputs(cases.CASES[0]))
    with pytest.raises(ValueError, match="'mosaic' is unknown"):
        api.paged_attention(**arrays, implementation="mosaic")
    with pytest.raises(ValueError, match="window is 0"):
        api.paged_attention(**arrays, window=0)
    with pytest.raises(ValueError, match="not a multiple"):
        api.paged_attention(**{**arrays, "q": arrays["q"][:, :5]})
    with pytest.raises(ValueError, match="rows"):
        api.paged_attention(**{**arrays, "lengths": arrays["lengths"][:2]})


def test_window_reads_only_its_pages():
    """The gather of a windowed layer is as wide as the window, not as the table. Seen to catch: no narrowing."""
    case = cases.Case("long", lengths=(400, 390), window=20)
    arrays = cases.inputs(case)
    text = jax.jit(lambda a: api.paged_attention(**a, window=20, implementation="xla")).lower(arrays).as_text()
    assert "tensor<2x3x16x2x64xf32>" in text and "tensor<2x26x16x2x64xf32>" not in text
