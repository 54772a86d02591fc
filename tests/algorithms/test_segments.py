"""Values per sequence of packed rows, against loops over the sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.segments import first_tokens, segment_max, segment_mean, segment_sum, sum_at
from tests.packed_rows import PackedRows

LENGTHS = [3, 1, 4, 2, 5]
ONE_ROW_EACH = [[0], [1], [2], [3], [4]]
LAYOUTS = [ONE_ROW_EACH, [[0, 1, 2], [3, 4]], [[4, 2, 3], [1, 0]], [[0, 1, 2, 3, 4], []]]
MASKS = [
    np.array([False, True, True]),
    np.array([True]),
    np.array([False] * 4),  # nothing of it counts
    np.array([True, True]),
    np.array([False, True, False, True, True]),
]


def ragged(seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=length).astype(np.float32) for length in LENGTHS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_sequence_has_its_own_value_wherever_it_stands(layout):
    """Caught: values of padding; the mask left out of the mean's sum or count; a mean over 0 tokens."""
    rows = PackedRows(LENGTHS, layout, columns=16, junk=7.0)
    values = ragged()
    masked = [np.where(mask, one, np.nan) for mask, one in zip(MASKS, values, strict=True)]
    mask = rows.put(MASKS, bool)
    sums = segment_sum(rows.put(values), rows.ids)
    means = segment_mean(rows.put(masked), mask, rows.ids)
    maxima = segment_max(rows.put(values), mask, rows.ids)
    first = first_tokens(mask, rows.ids)
    for n, one in enumerate(values):
        chosen = one[MASKS[n]]
        np.testing.assert_allclose(rows.take(sums)[n], one.sum(dtype=np.float64), rtol=1e-6, atol=1e-6)
        mean = chosen.mean(dtype=np.float64) if len(chosen) else 0.0
        np.testing.assert_allclose(rows.take(means)[n], mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(rows.take(maxima)[n], chosen.max() if len(chosen) else -np.inf)
        expected = np.zeros(len(one), bool)
        expected[np.flatnonzero(MASKS[n])[:1]] = True
        np.testing.assert_array_equal(rows.take(first)[n], expected)
    padding = rows.segment_ids == 0
    assert not np.asarray(sums)[padding].any() and not np.asarray(first)[padding].any()


def test_a_sum_keeps_its_digits_behind_a_large_one():
    """Caught: sums as differences of a running total, which leaves 0 of the second sequence here."""
    ids = jnp.array([[1, 1, 2, 2]])
    got = segment_sum(jnp.array([[1e8, 1e8, 0.25, 0.5]], jnp.float32), ids)
    assert got.tolist() == [[2e8, 2e8, 0.75, 0.75]]


def test_the_sum_of_another_segment():
    """Pairs: each asks for the other. Caught: the own segment's sum; padding at id 0; NaN where no segment is."""
    ids = jnp.array([[1, 1, 2, 3, 0], [1, 2, 2, 2, 2]])
    wanted = jnp.array([[2, 2, 1, 0, 1], [2, 1, 1, 1, 9]])
    values = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert sum_at(values, ids, wanted).tolist() == [[4, 4, 3, 0, 3], [4, 1, 1, 1, 0]]


def test_gradients_reach_every_token_of_the_segment_that_was_summed():
    """d(sum_t c_t S_t)/dx_u is the sum of c over the segment of u. Caught: the sum without a gradient."""
    rows = PackedRows(LENGTHS, LAYOUTS[1], columns=16, junk=7.0)
    coefficients = ragged(1)
    weights = jnp.where(rows.ids > 0, rows.put(coefficients), 0.0)
    mask = rows.put(MASKS, bool)
    of_sum = jax.grad(lambda x: jnp.sum(weights * segment_sum(x, rows.ids)))(rows.put(ragged()))
    of_mean = jax.grad(lambda x: jnp.sum(weights * segment_mean(x, mask, rows.ids)))(rows.put(ragged()))
    for n, one in enumerate(coefficients):
        np.testing.assert_allclose(rows.take(of_sum)[n], one.sum(), rtol=1e-5, atol=1e-6)
        share = np.where(MASKS[n], one.sum() / max(MASKS[n].sum(), 1), 0.0)
        np.testing.assert_allclose(rows.take(of_mean)[n], share, rtol=1e-5, atol=1e-6)
    assert not np.asarray(of_sum)[rows.segment_ids == 0].any()


def test_rows_on_several_devices_exchange_nothing():
    """Rows are sharded. Caught: one flat scatter over all rows, for which the partitioner gathers or reduces."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    rows = PackedRows(LENGTHS, [[0, 1], [2], [3], [4]], columns=8)
    values, mask, ids = (jax.device_put(one, sharding) for one in (rows.put(ragged()), rows.put(MASKS, bool), rows.ids))
    function = jax.jit(lambda *args: jax.grad(lambda x: jnp.sum(segment_mean(x, *args[1:]) ** 2))(args[0]))
    text = function.lower(values, mask, ids).compile().as_text()
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute") if word in text]
