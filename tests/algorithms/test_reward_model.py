"""A reward model's loss and gradient against NumPy in float64, and which state its score is read at."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.reward_model import REWARD_MODEL_TRAINING
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import ValueOutputs
from tests.algorithms.compared_rows import FakeContext, make_config, numbers, over_rows
from tests.algorithms.compared_rows import preferences as make_preferences
from tests.packed_rows import finite_differences

MARGINS = [0.5, 0, 1.25]


def prepared(examples=None, **algorithm):
    context = FakeContext(make_config("reward_model", **algorithm))
    rollouts = REWARD_MODEL_TRAINING.collect(context, make_preferences() if examples is None else examples)
    return REWARD_MODEL_TRAINING.prepare(context, rollouts), context


def outputs_of(ends):
    return ValueOutputs(jnp.full_like(ends, 44.0), ends)


@pytest.mark.parametrize("row_tokens", [11, 40], ids=["a pair a row", "all in one row"])
@pytest.mark.parametrize("column", ["", "margin", "auto"])
def test_loss_gradient_and_metrics_equal_numpy(row_tokens, column):
    """Caught: values before the last token; the sum over a completion; the margin with the other sign, or left out;
    the centering of the difference; `auto` taken for the name of a column, or for none; a row without a margin
    refused by it."""
    options = {"center_rewards_coefficient": 0.1, "margin_column": column}
    given = [one or (None if column == "auto" else 0) for one in MARGINS]
    sequences, context = prepared(make_preferences(margin=given), **options)
    scores = [4 * one + 5 for one in numbers("policy", sequences)]
    loss, metrics, gradient = over_rows(
        "reward_model", context.options, sequences, scores, outputs_of, row_tokens=row_tokens
    )

    def mean(values):
        last = np.array([one[-1] for one in values], np.float64)
        chosen, rejected = last[::2], last[1::2]
        margin = np.array(MARGINS) if column else 0.0
        return (np.log1p(np.exp(rejected + margin - chosen)) + 0.1 * (chosen + rejected) ** 2).mean()

    assert loss == pytest.approx(mean(scores), rel=2e-6)  # float32
    for found, expected in zip(gradient, finite_differences(mean, scores), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert found[-1] and not found[:-1].any()
    last = np.array([one[-1] for one in scores])
    expected = {
        "loss/total": loss,
        "rewards/chosen": last[::2].mean(),
        "rewards/rejected": last[1::2].mean(),
        "rewards/margins": (last[::2] - last[1::2]).mean(),
        "rewards/accuracies": (last[::2] > last[1::2]).mean(),
    }
    assert 0 < expected["rewards/accuracies"] < 1
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("value", [None, "1", True], ids=str)
def test_a_margin_that_is_no_number_is_refused(value):
    with pytest.raises(UserError, match="Example 1: margin is"):
        prepared(make_preferences(margin=[1.0, value, 1.0]), margin_column="margin")


def test_accuracy_of_held_out_pairs():
    """Caught: the score before the last token; ties counted; rejected above chosen."""

    class Context(FakeContext):
        def values(self, role, sequences):
            assert role == "reward_model"
            found = [np.full(len(ids) + 1, 100.0 * (n % 2), np.float32) for n, ids in enumerate(sequences.tokens)]
            for one, score in zip(found, [1.0, 0.5, 2.0, 2.0, -1.0, 1.0], strict=True):
                one[-1] = score
            return found

    found = REWARD_MODEL_TRAINING.evaluate(Context(make_config("reward_model")), make_preferences())
    assert found == {
        "eval/accuracy": pytest.approx(1 / 3),
        "eval/rewards/margins": pytest.approx((0.5 + 0 - 2) / 3),
        "eval/rows": 3.0,
    }
