"""Rollout correction against loops over the sequences."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import on_policy
from jaxrl_llm.algorithms import rollout_correction as correction
from jaxrl_llm.types import Rows, TokenOutputs
from tests.cases import case
from tests.packed_rows import PackedRows

LENGTHS = [4, 1, 5, 2, 6]
MASKS = [
    np.array([False, True, True, True]),
    np.array([True]),
    np.array([False, True, True, False, True]),
    np.array([False, False]),
    np.array([False, True, True, True, True, True]),
]
LAYOUTS = [[[0], [1], [2], [3], [4]], [[0, 1, 2], [3, 4]]]


def example(scale=0.4, seed=0):
    """Old and sampler log-probs, junk where masked."""
    generator = np.random.default_rng(seed)
    old = [np.where(mask, generator.normal(-1.5, 0.3, len(mask)), 55.0) for mask in MASKS]
    shift = [np.where(mask, generator.normal(0, scale, len(mask)), -77.0) for mask in MASKS]
    sampler = [one + moved for one, moved in zip(old, shift, strict=True)]
    return old, sampler


def differences(old, sampler):
    """Of the trained tokens of each sequence, in float64."""
    return [
        (np.float64(np.float32(one)) - np.float32(other))[mask]
        for one, other, mask in zip(old, sampler, MASKS, strict=True)
    ]


def arguments(rows, old, sampler):
    return rows.put(old), rows.put(sampler), rows.put(MASKS, bool), rows.ids


@pytest.mark.parametrize("rollout_is", correction.ROLLOUT_IS)
def test_weights(rollout_is):
    """Caught: sampler - old; no truncation; a sum for the mean and the reverse; weights where masked."""
    old, sampler = example()
    cut = 0
    for layout in LAYOUTS:
        rows = PackedRows(LENGTHS, layout, columns=12, junk=3.0)
        weights = correction.rollout_is_weights(
            *arguments(rows, old, sampler), rollout_is=rollout_is, rollout_is_threshold=1.2
        )
        for n, d in enumerate(differences(old, sampler)):
            full = {"token": d, "sequence": d.sum(), "geometric": d.mean() if len(d) else 0.0}[rollout_is]
            expected = np.zeros(LENGTHS[n])
            expected[MASKS[n]] = np.minimum(np.exp(full), 1.2)
            cut += int((np.exp(full) > 1.2).any() if len(d) else 0)
            np.testing.assert_allclose(rows.take(weights)[n], expected, rtol=1e-5)
        assert not np.asarray(weights)[rows.segment_ids == 0].any()
    assert 0 < cut < 8
    # No gradient, and the default bound is 2.
    one = jnp.ones((1, 1), jnp.int32)
    weight = lambda x: correction.rollout_is_weights(x, 0 * x, one > 0, one, rollout_is=rollout_is).sum()  # noqa: E731
    value, slope = jax.value_and_grad(weight)(jnp.full((1, 1), 0.5))
    assert value == pytest.approx(np.exp(0.5), rel=1e-6) and slope[0, 0] == 0.0
    assert weight(jnp.full((1, 1), 300.0)) == 2.0


def test_unknown_names_are_refused():
    one = jnp.ones((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="token, sequence, geometric"):
        correction.rollout_is_weights(1.0 * one, 1.0 * one, one > 0, one, rollout_is="product")
    with pytest.raises(ValueError, match="seq_mean_k3"):
        correction.rollout_rs_mask(
            1.0 * one, 1.0 * one, one > 0, one, rollout_rs="seq_max_k1", rollout_rs_threshold=2.0
        )


@pytest.mark.parametrize("rollout_rs", correction.ROLLOUT_RS)
def test_rejection(rollout_rs):
    """Bounds in the middle of the values. Caught: each bound, estimator and level exchanged; a masked token kept."""
    level, estimator = rollout_rs.rsplit("_", 1)
    kept_tokens = set()
    for seed in range(3):
        old, sampler = example(seed=seed)
        ds = differences(old, sampler)
        bounds = {"k1": (0.8, 1.15), "k2": (None, 0.08), "k3": (None, 0.08)}[estimator]
        if level == "seq_sum" and estimator != "k1":
            bounds = (None, 0.2)
        expected = []
        for d, mask in zip(ds, MASKS, strict=True):
            found = np.zeros(len(mask), bool)
            statistic = {"k1": d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[estimator]
            if len(d):
                whole = {"seq_sum": statistic.sum(), "seq_mean": statistic.mean(), "seq_max": statistic.max()}
                statistic = np.full(len(d), whole[level]) if level in whole else statistic
            if estimator == "k1":
                found[mask] = (np.exp(statistic) >= bounds[0]) & (np.exp(statistic) <= bounds[1])
            else:
                found[mask] = statistic <= bounds[1]
            expected.append(found)
            kept_tokens |= set(found[mask].tolist())
        for layout in LAYOUTS:
            rows = PackedRows(LENGTHS, layout, columns=12, junk=3.0)
            kept = correction.rollout_rs_mask(
                *arguments(rows, old, sampler),
                rollout_rs=rollout_rs,
                rollout_rs_threshold=bounds[1],
                rollout_rs_threshold_lower=bounds[0],
            )
            for n in range(len(LENGTHS)):
                np.testing.assert_array_equal(rows.take(kept)[n], expected[n])
    assert kept_tokens == {True, False}


def test_the_lower_bound_is_the_inverse_of_the_upper_one():
    """Caught: no lower bound by default."""
    old = jnp.log(jnp.array([[0.45, 0.55, 1.9, 2.1]]))
    ids = jnp.ones(old.shape, jnp.int32)
    kept = correction.rollout_rs_mask(old, 0 * old, ids > 0, ids, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    assert kept.tolist() == [[False, True, True, False]]


def test_the_veto_drops_whole_sequences():
    """Caught: only the token; a ratio far above 1; a masked token."""
    rows = PackedRows(LENGTHS, LAYOUTS[1], columns=12)
    sampler = [np.full(length, -1.0) for length in LENGTHS]
    old = [one.copy() for one in sampler]
    old[0][2] -= 9.3  # e^-9.3 = 9.1e-5
    old[1][0] -= 9.1  # 1.1e-4
    old[2][3] -= 50  # masked
    old[4][1] += 50
    kept = correction.rollout_token_veto_mask(*arguments(rows, old, sampler), rollout_token_veto_threshold=1e-4)
    for n, mask in enumerate(MASKS):
        np.testing.assert_array_equal(rows.take(kept)[n], mask & (n != 0))


def test_l35_decoupled_ppo():
    """The loss of every on-policy algorithm, with `rollout_is`: the clip is around the proximal policy (`old`), the
    weight corrects for the behaviour policy (`sampler`). Caught: the weight left out; its inverse."""
    spec = case("L35")
    given, expected = spec["input"], spec["expected"]

    def objective(actor, advantage=given["advantage"], threshold=math.inf):
        one = jnp.ones((1, 1))
        rows = dataclasses.replace(
            Rows.zeros((1, 1), module=jnp),
            segment_ids=one.astype(jnp.int32),
            loss_mask=one > 0,
            weights=one,
            advantages=advantage * one,
            old_logprobs=given["logp_proximal"] * one,
            sampler_logprobs=given["logp_behaviour"] * one,
        )
        options = on_policy.ClippedOptions(
            clip_low=given["eps"],
            clip_high=given["eps"],
            dual_clip=0.0,
            rollout_is="token",
            rollout_is_threshold=threshold,
        )
        outputs = TokenOutputs(actor, jnp.zeros((1, 1)))
        return on_policy.losses(options, outputs, rows, surrogate=on_policy.clipped)

    actor = jnp.full((1, 1), given["logp_theta"])
    found = objective(actor)
    np.testing.assert_allclose(found.total, expected["loss"], atol=1e-6)
    np.testing.assert_allclose(found.counted["policy/ratio_mean"][0], expected["ratio"], atol=1e-6)
    assert jax.grad(lambda x: objective(x).total)(actor)[0, 0] == expected["grad"]
    # Where nothing is clipped the gradient is -A w r, and the weight is truncated like everywhere.
    slope = jax.grad(lambda x: objective(x, -1.0).total)(actor)
    np.testing.assert_allclose(slope, expected["behaviour_weight"] * expected["ratio"], rtol=1e-5)
    np.testing.assert_allclose(objective(actor, threshold=0.5).total, -0.5 * 1.2, rtol=1e-6)


def test_metrics():
    """Caught: each estimate with the wrong sign or level; means over tokens for those over sequences."""
    old, sampler = example()
    ds = [d for d in differences(old, sampler) if len(d)]
    flat = np.concatenate(ds)
    surprise = [
        [-np.mean(one[mask]) for one, mask in zip(each, MASKS, strict=True) if mask.any()] for each in (old, sampler)
    ]
    gap = np.array(surprise[0]) - np.array(surprise[1])
    expected = {
        "kl": np.mean(-flat),
        "k3_kl": np.mean(np.exp(flat) - 1 - flat),
        "chi2_token": np.mean(np.exp(flat) ** 2) - 1,
        "chi2_seq": np.mean([np.prod(np.exp(d)) ** 2 for d in ds]) - 1,
        "training_ppl": np.mean(np.exp(surprise[0])),
        "rollout_ppl": np.mean(np.exp(surprise[1])),
        "log_ppl_diff": np.mean(gap),
        "log_ppl_abs_diff": np.mean(np.abs(gap)),
        "ppl_ratio": np.mean(np.exp(gap)),
    }
    for layout in LAYOUTS:
        rows = PackedRows(LENGTHS, layout, columns=12, junk=3.0)
        counted, maxima = correction.offpolicy_metrics(*arguments(rows, old, sampler))
        assert set(counted) == {f"rollout_corr/{name}" for name in expected}
        for name, value in expected.items():
            total, count = counted[f"rollout_corr/{name}"]
            assert count == (len(flat) if name in ("kl", "k3_kl", "chi2_token") else len(ds))
            assert total / count == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert maxima["rollout_corr/log_ppl_abs_diff_max"] == pytest.approx(np.abs(gap).max(), rel=1e-5)


def test_metrics_of_weights_and_rejection():
    """Caught: the maximum or the means over padding; tokens counted as sequences; the kept in place of the lost."""
    rows = PackedRows(LENGTHS, LAYOUTS[1], columns=12, junk=9.0)
    mask = rows.put(MASKS, bool)
    weights = rows.put([np.full(length, value) for length, value in zip(LENGTHS, (1, 2, 0.5, 8, 1), strict=True)])
    counted, maxima = correction.weight_metrics(weights, mask, 2.0)
    values = np.array([1] * 3 + [2] + [0.5] * 3 + [1] * 5)
    means = {name.removeprefix("rollout_corr/rollout_is_"): total / count for name, (total, count) in counted.items()}
    assert means["mean"] == pytest.approx(values.mean())
    assert means["ratio_fraction_high"] == pytest.approx(1 / 12)
    assert maxima["rollout_corr/rollout_is_max"] == 2.0
    assert means["squared_mean"] == pytest.approx((values**2).mean(), rel=1e-6)

    lost = [np.zeros(4, bool), np.zeros(1, bool), np.array([True, True, False, True, True]), np.ones(2, bool), MASKS[4]]
    kept = mask & ~rows.put(lost, bool)
    fractions = correction.rejection_metrics(kept, mask, rows.ids)
    assert [float(one) for one in fractions["rollout_corr/rollout_rs_masked_fraction"]] == [7, 12]
    assert [float(one) for one in fractions["rollout_corr/rollout_rs_seq_masked_fraction"]] == [2, 4]


def test_far_policies_and_empty_rows_stay_finite():
    """Caught: exp of unclamped sums or perplexities; a NaN off the mask."""
    rows = PackedRows(LENGTHS, LAYOUTS[1], columns=12, junk=np.nan)
    for far in (-300.0, 300.0):
        old = [np.where(mask, far, np.nan) for mask in MASKS]
        sampler = [np.where(mask, -1.0, np.nan) for mask in MASKS]
        given = arguments(rows, old, sampler)
        for level in correction.ROLLOUT_IS:
            weights = correction.rollout_is_weights(*given, rollout_is=level, rollout_is_threshold=float("inf"))
            assert np.isfinite(weights).all()
        assert all(np.isfinite(one) for one in jax.tree.leaves(correction.offpolicy_metrics(*given)))
        assert all(np.isfinite(one) for one in jax.tree.leaves(correction.weight_metrics(weights, given[2], 2.0)))
    nothing = (*given[:2], given[2] & False, given[3])
    counted, maxima = correction.offpolicy_metrics(*nothing)
    assert not any(jax.tree.leaves((counted, maxima)))
