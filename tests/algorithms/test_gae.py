"""GAE against the numeric cases and against the sum that defines it."""

import numpy as np
import pytest

from jaxrl_llm.algorithms.gae import credit_rewards, explained_variance, gae
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.packing import RowShape, pack
from tests.cases import case


def floats(values):
    return np.array(values, np.float32)


def test_l27_termination_and_truncation():
    """Caught: V of the last state as bootstrap; a bootstrap that is not discounted; returns without the values."""
    spec = case("L27")
    given, expected = spec["input"], spec["expected"]
    for end, bootstrap in (("terminated", 0.0), ("truncated", given["value_after_last_token"])):
        advantages, returns = gae(
            floats(given["rewards"]),
            floats(given["values"]),
            np.ones(3, bool),
            gamma=given["gamma"],
            lam=given["lam"],
            bootstrap_value=bootstrap,
        )
        np.testing.assert_allclose(advantages, expected[f"adv_{end}"], atol=1e-6)
        np.testing.assert_allclose(returns, expected[f"returns_{end}"], atol=1e-6)


def test_l29_tool_output_is_no_step():
    """Caught: a recursion over all tokens; the score lost with the masked token it stands on."""
    spec = case("L29")
    given = spec["input"]
    rewards = floats([0, 0, 0, 0, 0, 0, given["score"]])
    mask = np.array(given["mask"], bool)
    advantages, returns = gae(rewards, floats(given["values"]), mask, gamma=given["gamma"], lam=given["lam"])
    np.testing.assert_allclose(advantages, spec["expected"]["adv"], atol=1e-6)
    np.testing.assert_allclose(returns, np.where(mask, advantages + floats(given["values"]), 0), atol=1e-6)


def test_l31_values_and_logits_come_from_the_token_before():
    """The column that predicts a token, also behind a prompt that two completions share. Caught: the token's own."""
    spec = case("L31")
    given, expected = spec["input"], spec["expected"]
    prompt, response = given["prompt_len"], given["response_len"]
    mask = np.arange(prompt + response) >= prompt
    for copies in (1, 2):
        sequences = Sequences([np.zeros(len(mask), np.int32)] * copies, [mask] * copies, np.zeros(copies, np.int32))
        batch, placement = pack(
            sequences, RowShape(8, 1), aggregation="token-mean", max_response_tokens=8, max_micro_batches=1
        )
        for n in range(copies):
            columns = batch.rows.predictors[0, 0, placement.completion[n]]
            first = placement.completion[n].start  # a second completion's later tokens follow its own first one
            assert columns.tolist() == [expected["logit_rows_used"][0], *range(first, first + response - 1)]
        if copies == 1:
            assert columns.tolist() == expected["logit_rows_used"]
            assert np.array(given["value_head_output"])[columns].tolist() == expected["values_for_response"]


def test_gae_is_the_weighted_sum_of_the_td_errors():
    """``A_t = sum_k (gamma lam)^k delta_{t+k}``. Caught: lam or gamma left out of the recursion or of the TD error."""
    generator = np.random.default_rng(0)
    mask = np.array([False, True, True, False, True, True, True, False])
    rewards, values = (generator.normal(size=8).astype(np.float32) for _ in range(2))
    rewards[~mask] = 0
    gamma, lam, bootstrap = 0.9, 0.7, 0.4
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_value=bootstrap)
    steps = np.flatnonzero(mask)
    following = [*values[steps[1:]], bootstrap]
    errors = [rewards[t] + gamma * after - values[t] for t, after in zip(steps, following, strict=True)]
    for index, t in enumerate(steps):
        expected = sum((gamma * lam) ** k * error for k, error in enumerate(errors[index:]))
        assert advantages[t] == pytest.approx(expected, abs=1e-6)
        assert returns[t] == pytest.approx(expected + values[t], abs=1e-6)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_defaults_are_undiscounted():
    """gamma = lam = 1: the return is the reward to come. Caught: either default changed."""
    advantages, returns = gae(floats([0, 0, 2]), floats([0.5, 0.25, 1.0]), np.ones(3, bool))
    np.testing.assert_allclose(returns, [2, 2, 2], atol=1e-6)
    np.testing.assert_allclose(advantages, [1.5, 1.75, 1.0], atol=1e-6)


def test_short_sequences():
    """No token at all, and a single one."""
    advantages, returns = gae(floats([1, 5]), floats([3, 4]), np.array([False, False]))
    assert not advantages.any() and not returns.any()
    advantages, returns = gae(floats([2]), floats([0.5]), np.array([True]), gamma=0.5, bootstrap_value=1.0)
    assert advantages.tolist() == [2.0] and returns.tolist() == [2.5]


def test_a_reward_goes_to_the_token_that_earned_it():
    """Caught: all of them to the last trained token; those before the first one kept; a sum that overwrites."""
    mask = np.array([False, True, False, False, True, False])
    assert credit_rewards(floats([9, 1, 2, 3, 4, 5]), mask).tolist() == [0, 6, 0, 0, 9, 0]


def test_explained_variance():
    """Caught: the ratio without 1 -; the mask left out; means not removed; 0 / 0 for equal returns."""
    returns = floats([0, 1, 2, 3, 50])
    mask = np.array([True, True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)
    assert explained_variance(0 * returns, returns, mask) == 0.0
    assert explained_variance(returns / 2, returns, mask) == pytest.approx(0.75)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, 0 * returns, mask) == 0.0
    assert explained_variance(returns, returns, np.zeros(5, bool)) == 0.0
