"""pass@k."""

import itertools

import pytest

from jaxrl_llm.evaluate import pass_at_k


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(4, 1, 1), (4, 1, 2), (6, 2, 3), (5, 0, 2), (3, 3, 2), (8, 7, 2)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples, correct, k):
    """Caught: 1 - (1 - c/n)^k, which is biased."""
    subsets = list(itertools.combinations(range(samples), k))
    expected = sum(any(index < correct for index in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(samples, correct, k) == pytest.approx(expected)
