"""Sums of rewards of which some do not apply."""

import numpy as np

from jaxrl_llm.rewards.combine import weighted_sum
from tests.cases import case


def test_rewards_that_do_not_apply():
    """Case R11. Seen to catch: `nansum`, which scores a sample without any reward 0."""
    given = case("R11")["input"]
    scores = np.array(given["per_function"], np.float32)
    components = {"first": scores[:, 0], "second": scores[:, 1]}
    total = weighted_sum(components, dict(zip(components, given["weights"], strict=True)))
    np.testing.assert_array_equal(total, np.array(case("R11")["expected"]["total"], np.float32))
    assert total.dtype == np.float32
