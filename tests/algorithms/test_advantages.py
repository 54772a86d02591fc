"""Group advantages and reward shaping against the numeric cases."""

import itertools

import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import (
    combine_rewards,
    group_advantages,
    kl_shaped_rewards,
    pass_at_k_advantages,
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    remax_advantages,
    rloo_advantages,
    whiten,
)
from jaxrl_llm.algorithms.on_policy import overlong_penalty
from tests.cases import case


def advantages(groups, **options):
    """Advantages of a list of groups, as lists."""
    group = np.repeat(np.arange(len(groups)), [len(one) for one in groups]).astype(np.int32)
    flat = group_advantages(np.array([r for one in groups for r in one], np.float32), group, **options)
    return [flat[group == index].tolist() for index in range(len(groups))]


def test_l05_equal_rewards_have_exactly_zero_advantage():
    """Caught: float32 statistics without the max == min test (0.1 seven times: rounding noise over rounding noise)."""
    for group in advantages(case("L05")["input"]["groups"]):
        assert group == [0.0] * len(group)


def test_l07_a_group_of_one_has_zero_advantage():
    """Caught: std with ddof 1 over one value (NaN)."""
    assert advantages(case("L07")["input"]["rewards"]) == [[0.0], [0.0], [0.0]]


def test_l09_without_std():
    """Caught: dividing by the standard deviation under normalize_std=False all the same."""
    (got,) = advantages([case("L09")["input"]["rewards"]], normalize_std=False)
    np.testing.assert_allclose(got, case("L09")["expected"]["advantage"], atol=1e-6)


def test_l45_an_unscored_sample_is_left_out():
    """Caught: NaN as 0, which moves the baseline of the others; NaN spreading over the group."""
    spec = case("L45")
    (got,) = advantages([spec["input"]["rewards"]])
    np.testing.assert_allclose(got, spec["expected"]["advantage"], atol=1e-6)
    assert advantages([[np.nan, 1.0, np.nan, np.nan]]) == [[0.0] * 4]


def test_d09_equal_rows_are_separate_groups():
    """Caught: statistics over both rows at once, as if grouped by their equal ids."""
    spec = case("D09")
    got = advantages(spec["input"]["rewards"])
    np.testing.assert_allclose(got, spec["expected"]["advantage_ddof1"], atol=1e-6)


def test_group_order_does_not_matter():
    """Caught: assuming that the samples of a group stand beside each other."""
    generator = np.random.default_rng(0)
    rewards, group = generator.normal(size=12).astype(np.float32), np.repeat(np.arange(3), 4).astype(np.int32)
    order = generator.permutation(12)
    np.testing.assert_array_equal(
        group_advantages(rewards, group)[order], group_advantages(rewards[order], group[order])
    )


def test_l17_kl_in_the_reward():
    """Caught: the score on the last column instead of the last trained token; the KL of padding in the sum."""
    spec = case("L17")
    given = spec["input"]
    got = kl_shaped_rewards(
        given["score"], np.array(given["k1_per_token"], np.float32), np.array(given["mask"], bool), given["beta"]
    )
    np.testing.assert_allclose(got, spec["expected"]["token_rewards"], atol=1e-6)
    assert got.sum() == pytest.approx(spec["expected"]["sum"], abs=1e-6)


def test_l25_overlong_penalty():
    """Caught: a ramp that starts at the budget instead of before it."""
    spec = case("L25")
    given = spec["input"]
    lengths = np.array(given["length"])
    for factor, expected in ((1.0, "penalty"), (0.5, "factor_0p5")):
        got = overlong_penalty(lengths, given["L_max"], given["L_cache"], factor)
        np.testing.assert_allclose(got, spec["expected"][expected], atol=1e-6)


GROUPS = [
    [1.0, 0.0, 0.5, 0.5],
    [0.1] * 7,
    [2.0, np.nan, -1.0],
    [np.nan, 3.0, np.nan],
    [np.nan],
    [4.0],
    [0.25, -3.0, 7.5, 0.25, 0.0],
]
REWARDS = np.array([reward for one in GROUPS for reward in one], np.float32)
GROUP = np.repeat(np.arange(len(GROUPS)), [len(one) for one in GROUPS]).astype(np.int32)


def test_l21_rloo():
    """Caught: the mean with the sample itself; a group's mean over NaN; equal rewards at rounding, not exactly 0."""
    spec = case("L21")
    for rewards, expected in ((spec["input"]["rewards"], "advantage"), ([1.0, 0.0], "two_samples_1_0")):
        got = rloo_advantages(np.array(rewards, np.float32), np.zeros(len(rewards), np.int32))
        np.testing.assert_allclose(got, spec["expected"][expected], atol=1e-6)
    got = rloo_advantages(REWARDS, GROUP)
    for n in range(len(REWARDS)):
        others = [r for m, r in enumerate(REWARDS) if m != n and GROUP[m] == GROUP[n] and not np.isnan(r)]
        scored = others and not np.isnan(REWARDS[n])
        expected = REWARDS[n] - sum(others) / len(others) if scored else 0.0
        assert got[n] == pytest.approx(expected, abs=1e-6)
    assert not rloo_advantages(np.full(7, 0.1), np.zeros(7, np.int32)).any()


def test_remax():
    """Caught: the baselines in the order of the samples; the sign; NaN in either place."""
    group = np.array([1, 0, 1, 0, 2], np.int32)
    rewards = np.array([1.0, 2.0, np.nan, 3.0, 5.0], np.float32)
    got = remax_advantages(rewards, np.array([0.5, 4.0, np.nan], np.float32), group)
    assert got.tolist() == [-3.0, 1.5, 0.0, 2.5, 0.0]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    """Every subset of k, drawn out. Caught: each binomial off by one; std of the samples; the mean without others."""
    generator = np.random.default_rng(k)
    groups = [
        *([0.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 5, [1.0] * 5, [1.0, 0.0], [np.nan, 1.0, 0.0, 0.0, np.nan, 0.0]),
        *(generator.normal(size=size).tolist() for size in (1, 3, 4, 5, 7)),
        generator.integers(0, 3, 7).tolist(),
    ]
    rewards = np.array([reward for one in groups for reward in one], np.float32)
    group = np.repeat(np.arange(len(groups)), [len(one) for one in groups]).astype(np.int32)
    got = pass_at_k_advantages(rewards, group, k=k)
    for index in range(len(groups)):
        members = np.flatnonzero(group == index)
        scored = [n for n in members if not np.isnan(rewards[n])]
        subsets = list(itertools.combinations(scored, k))
        best = [max(float(rewards[n]) for n in subset) for subset in subsets]
        for n in members:
            own = [reward for reward, subset in zip(best, subsets, strict=True) if n in subset]
            expected = (np.mean(own) - np.mean(best)) / (np.std(best) + 1e-6) if own and len(set(best)) > 1 else 0.0
            assert got[n] == pytest.approx(expected, abs=2e-6)


def test_pass_at_k_of_right_and_wrong_answers():
    """The paper's closed form: 2 right of 6, k = 3. Caught: C(n, k-1) subsets with a sample; each C off by one."""
    got = pass_at_k_advantages(np.array([0, 1, 0, 0, 1, 0], np.float32), np.zeros(6, np.int32), k=3)
    mean = 1 - 4 / 20
    deviation = np.sqrt(mean * (1 - mean))
    np.testing.assert_allclose(got[[1, 4]], (1 - mean) / deviation, rtol=1e-5)
    np.testing.assert_allclose(got[[0, 2, 3, 5]], (1 - mean - 3 / 10) / deviation, rtol=1e-5)
    with pytest.raises(ValueError, match="k is 0"):
        pass_at_k_advantages(np.zeros(2, np.float32), np.zeros(2, np.int32), k=0)


def test_l33_whitening():
    """Caught: statistics over masked values; ddof 0; a mean that is not added back; eps outside the root."""
    spec = case("L33")
    values = [np.array(row, np.float32) for row in spec["input"]["x"]]
    mask = [np.array(row, bool) for row in spec["input"]["mask"]]
    np.testing.assert_allclose(whiten(values, mask), spec["expected"]["whitened_ddof1"], atol=1e-6)
    np.testing.assert_allclose(
        whiten(values, mask, shift_mean=False), spec["expected"]["no_shift_centre_then_add_back"], atol=1e-6
    )
    only = [np.array([False, True, False]), np.zeros(3, bool)]
    np.testing.assert_array_equal(whiten(values, only), np.zeros((2, 3)))
    np.testing.assert_array_equal(whiten(values, [~one for one in [np.ones(3, bool)] * 2]), np.zeros((2, 3)))
    assert whiten([], []) == []
    np.testing.assert_array_equal(whiten([np.full(7, 0.1)], [np.ones(7, bool)])[0], np.zeros(7))
    # 1e-8 inside the root: a spread of 1e-4 is shrunk by sqrt(2), not by 1 + 1e-4.
    small = whiten([np.array([0.0, 1e-4, 2e-4])], [np.ones(3, bool)])[0]
    np.testing.assert_allclose(small, [-np.sqrt(0.5), 0, np.sqrt(0.5)], rtol=1e-5, atol=1e-6)


def test_l23_reinforce_plus_plus():
    """Caught: returns that add the rewards before a token; whitening with masked values or ddof 0."""
    spec = case("L23")
    given, expected = spec["input"], spec["expected"]
    mask = [np.array(row, bool) for row in given["mask"]]
    rewards = [
        kl_shaped_rewards(score, np.array(k1, np.float32), keep, given["beta"])
        for score, k1, keep in zip(given["score"], given["k1"], mask, strict=True)
    ]
    returns = reinforce_plus_plus_returns(rewards, mask, gamma=given["gamma"])
    np.testing.assert_allclose(returns, expected["returns"], atol=1e-6)
    np.testing.assert_allclose(whiten(returns, mask), expected["advantage_ddof1"], atol=1e-5)


def test_returns_discount_by_tokens_of_the_policy():
    """A masked token in the middle. Caught: a discount for it; its reward lost; no discount; one on the own reward."""
    mask = [np.array([False, True, False, True, True, False]), np.array([False, False]), np.array([True])]
    rewards = [np.array(one, np.float32) for one in ([9, 1, 3, 2, 4, 6], [1, 1], [5])]
    got = reinforce_plus_plus_returns(rewards, mask, gamma=0.5)
    assert got[0].tolist() == [0, 4 + 0.5 * (2 + 0.5 * 10), 0, 2 + 0.5 * 10, 10, 0]
    assert got[1].tolist() == [0, 0] and got[2].tolist() == [5]


def test_reinforce_plus_plus_with_a_group_baseline():
    """Caught: no baseline; the group's standard deviation as well; an unscored sample's tokens in the statistics."""
    rewards = np.array([1.0, 0.0, 5.0, np.nan, 2.0], np.float32)
    group = np.array([0, 0, 1, 1, 1], np.int32)
    mask = [np.array(one, bool) for one in ([0, 1, 1], [1], [1, 1, 0, 1], [1, 1], [0, 1])]
    got = reinforce_plus_plus_baseline_advantages(rewards, group, mask)
    centred = [0.5] * 2 + [-0.5] + [1.5] * 3 + [-1.5]
    mean, deviation = np.mean(centred), np.sqrt(np.var(centred, ddof=1) + 1e-8)
    for n, value in enumerate((0.5, -0.5, 1.5, np.nan, -1.5)):
        expected = np.where(mask[n], (value - mean) / deviation, 0) if n != 3 else np.zeros(2)
        np.testing.assert_allclose(got[n], expected, atol=1e-6)


def test_combined_rewards():
    """Caught: the weights left out; GDPO's whitening left out or over samples; no score taken for 0."""
    generator = np.random.default_rng(0)
    group = np.repeat([0, 1, 2], 3).astype(np.int32)
    components = {name: generator.normal(size=9).astype(np.float32) for name in ("right", "form")}
    components["form"][4] = np.nan  # does not apply
    for values in components.values():
        values[8] = np.nan  # not scored at all
    weights = {"right": 2.0, "form": -0.5}
    lengths = np.array([1, 5, 2, 7, 3, 0, 4, 2, 6])

    def grouped(values):
        found = np.zeros(9)
        for index in range(3):
            members = [n for n in range(9) if group[n] == index and not np.isnan(values[n])]
            scores = [float(values[n]) for n in members]
            for n in members:
                found[n] = (values[n] - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6)
        return found

    right, form = (components[name].astype(np.float64) for name in ("right", "form"))
    total = np.where(np.isnan(right), np.nan, 2 * right - 0.5 * np.nan_to_num(form))
    got = combine_rewards(components, weights, group, lengths, mode="sum")
    np.testing.assert_allclose(got, grouped(total), rtol=1e-5, atol=1e-6)

    mixed = 2 * grouped(right) - 0.5 * grouped(form)
    tokens = np.concatenate([np.full(lengths[n], mixed[n]) for n in range(8)])
    expected = (mixed - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    expected[[5, 8]] = 0
    got = combine_rewards(components, weights, group, lengths, mode="gdpo")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="sum, gdpo"):
        combine_rewards(components, weights, group, lengths, mode="mean")


def test_gdpo_keeps_apart_what_a_sum_makes_equal():
    """The paper's example, two rewards and two samples: (0, 1) against (0, 2). Caught: `sum` in its place."""
    group = np.array([0, 0, 1, 1], np.int32)
    components = {"a": np.array([0, 1, 0, 1], np.float32), "b": np.array([0, 0, 0, 1], np.float32)}
    ones, lengths = {"a": 1.0, "b": 1.0}, np.ones(4, np.int64)
    same = combine_rewards(components, ones, group, lengths, mode="sum")
    np.testing.assert_allclose(same[1], same[3], atol=1e-5)
    apart = combine_rewards(components, ones, group, lengths, mode="gdpo")
    assert apart[3] == pytest.approx(2 * apart[1], rel=1e-5)
