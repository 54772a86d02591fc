"""Group advantages and reward shaping against the numeric cases."""

import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import group_advantages, kl_shaped_rewards
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
