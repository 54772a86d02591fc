"""DPO from data rows to loss and gradient, against NumPy in float64; the pairs of online DPO."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.dpo import DPO, ONLINE_DPO
from jaxrl_llm.algorithms.preference import DPO_LOSSES
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Rollouts, TokenOutputs
from tests.algorithms.compared_rows import CHOSEN, PROMPTS, REJECTED, FakeContext, make_config, numbers, over_rows
from tests.algorithms.compared_rows import preferences as make_preferences
from tests.packed_rows import finite_differences

SMOOTHING = {"sigmoid": 0.1, "robust": 0.2, "hinge": 0.0, "ipo": 0.0}
BETA = 0.7


def prepared(examples=None, **algorithm):
    context = FakeContext(make_config("dpo", **algorithm))
    rollouts = DPO.collect(context, make_preferences() if examples is None else examples)
    return DPO.prepare(context, rollouts), context


def outputs_of(logprobs):
    return TokenOutputs(logprobs, jnp.ones_like(logprobs))


def one_pair(loss_type, smoothing, chosen, rejected):
    """Of the trained tokens' (policy, reference) log-probs, as the papers write it."""
    reduce = np.mean if loss_type == "ipo" else np.sum
    difference = reduce(chosen[0] - chosen[1]) - reduce(rejected[0] - rejected[1])
    if loss_type == "hinge":
        return max(0.0, 1 - BETA * difference)
    if loss_type == "ipo":
        return (difference - 1 / (2 * BETA)) ** 2
    right, wrong = np.log1p(np.exp(-BETA * difference)), np.log1p(np.exp(BETA * difference))
    if loss_type == "sigmoid":
        return (1 - smoothing) * right + smoothing * wrong
    return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)


def test_pairs_of_the_data():
    """Caught: the rejected completion first; the prompt trained; two pairs in one group; a partner of another pair."""
    sequences, context = prepared()
    expected = [
        [*prompt, *completion] for prompt, *pair in zip(PROMPTS, CHOSEN, REJECTED, strict=True) for completion in pair
    ]
    assert [ids.tolist() for ids in sequences.tokens] == expected
    assert [int(mask.sum()) for mask in sequences.loss_mask] == [3, 2, 2, 4, 5, 1]
    assert not any(mask[: len(prompt)].any() for mask, prompt in zip(sequences.loss_mask[::2], PROMPTS, strict=True))
    assert sequences.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert sequences.partner.tolist() == [1, 0, 3, 2, 5, 4]
    assert context.asked == ["reference"]


@pytest.mark.parametrize("row_tokens", [11, 40], ids=["a pair a row", "all in one row"])
@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_loss_gradient_and_metrics_equal_numpy(loss_type, row_tokens):
    """Caught: a sum over both completions of the row in place of each one's; sums for IPO; the reference of the own
    completion for both; a pair counted twice; margins of the log-probs without the reference; the gradient of the
    chosen completion alone."""
    smoothing = SMOOTHING[loss_type]
    sequences, context = prepared(loss_type=loss_type, label_smoothing=smoothing, beta=BETA)
    policy, reference = numbers("policy", sequences), numbers("reference", sequences)
    loss, metrics, gradient = over_rows("dpo", context.options, sequences, policy, outputs_of, row_tokens=row_tokens)

    def mean_of_pairs(values):
        trained = [
            (np.float64(one[mask]), np.float64(other[mask]))
            for one, other, mask in zip(values, reference, sequences.loss_mask, strict=True)
        ]
        pairs = zip(trained[::2], trained[1::2], strict=True)
        return np.mean([one_pair(loss_type, smoothing, *pair) for pair in pairs])

    # float32 sums of ten numbers of size 1
    assert loss == pytest.approx(mean_of_pairs(policy), rel=2e-6)
    for found, expected in zip(gradient, finite_differences(mean_of_pairs, policy), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)
    reduce = np.mean if loss_type == "ipo" else np.sum
    sums = [[reduce(values[n][mask]) for n, mask in enumerate(sequences.loss_mask)] for values in (policy, reference)]
    rewards = BETA * (np.array(sums[0]) - np.array(sums[1]))
    margins = rewards[::2] - rewards[1::2]
    assert 0 < (margins > 0).mean() < 1
    expected = {
        "loss/total": loss,
        "rewards/chosen": rewards[::2].mean(),
        "rewards/rejected": rewards[1::2].mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).mean(),
        "logps/chosen": np.mean(sums[0][::2]),
        "logps/rejected": np.mean(sums[0][1::2]),
        "entropy/mean": 1.0,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_given_reference_logprobs_are_the_computed_ones(loss_type):
    """Caught: columns exchanged; IPO with sums; the reference asked for, or made, all the same."""
    sequences, _ = prepared(loss_type=loss_type)
    values = numbers("reference", sequences)
    sums = [float(one[mask].sum()) for one, mask in zip(values, sequences.loss_mask, strict=True)]
    examples = make_preferences(ref_chosen_logps=sums[::2], ref_rejected_logps=sums[1::2])
    given, context = prepared(examples, loss_type=loss_type, precompute_ref_log_probs=True)
    assert not context.asked and [role.name for role in DPO.roles(context.options)] == ["policy"]
    for name in ("reference", "other_reference"):
        np.testing.assert_allclose(given.extras[name], sequences.extras[name], rtol=1e-6)
    assert sequences.extras["reference"][0] == sequences.extras["other_reference"][1]


@pytest.mark.parametrize("value", [None, "-1", True, float("nan")], ids=str)
def test_a_reference_logprob_that_is_none_is_refused(value):
    """Caught: True taken for 1; a text that NumPy would parse."""
    examples = make_preferences(ref_chosen_logps=[-1.0, value, -1.0], ref_rejected_logps=[-1.0] * 3)
    with pytest.raises(UserError, match="Example 1: ref_chosen_logps"):
        prepared(examples, precompute_ref_log_probs=True)


def sampled(rewards):
    """Samples of three prompts, three each."""
    examples = [dataclasses.replace(example, response_ids=None) for example in make_preferences()]
    count = len(rewards)
    responses = [np.full(1 + n % 4, n + 1, np.int32) for n in range(count)]
    group = np.repeat(np.arange(3, dtype=np.int32), 3)
    return Rollouts(examples, group, responses, None, [""] * count, ["stop"] * count, np.array(rewards, np.float32))


def test_online_dpo_compares_the_best_with_the_worst():
    """Of equal ones the first; prompts with equal rewards, or one scored sample, have no pair. Caught: the last of
    equal ones; a sample without a score as the worst; pairs of equal rewards; a group's number taken for the prompt's
    index."""
    nan = float("nan")
    context = FakeContext(make_config("online_dpo", {"rewards": {"exact": {"function": "exact_match"}}}))
    sequences = ONLINE_DPO.prepare(context, sampled([0.5, 0.5, 0.5, nan, 1.0, nan, 2.0, nan, -1.0]))
    assert [ids.tolist() for ids in sequences.tokens] == [[8, 9, 10, 7, 7, 7], [8, 9, 10, 9]]
    assert sequences.metrics["dpo/pairs_fraction"] == pytest.approx(1 / 3)
    assert sequences.extras["chosen"].tolist() == [1, -1]
    sequences = ONLINE_DPO.prepare(context, sampled([3.0, 3.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    assert [ids[-1] for ids in sequences.tokens] == [1, 3, 5, 4]
    assert sequences.group.tolist() == [0, 0, 1, 1]


def test_online_dpo_without_a_pair_is_an_empty_batch():
    """Caught: pairs of equal rewards."""
    context = FakeContext(make_config("online_dpo", {"rewards": {"exact": {"function": "exact_match"}}}))
    sequences = ONLINE_DPO.prepare(context, sampled([1.0] * 9))
    assert not sequences.tokens and sequences.metrics["dpo/pairs_fraction"] == 0


def test_options_that_cannot_work_are_refused():
    """Caught: both checks taken out."""
    with pytest.raises(UserError, match=r"label_smoothing=0\.1: the loss 'hinge' has none"):
        make_config("dpo", loss_type="hinge", label_smoothing=0.1)
    rewards = {"exact": {"function": "exact_match"}}
    with pytest.raises(UserError, match="samples_per_prompt=1: online_dpo compares two"):
        make_config("online_dpo", {"rewards": rewards, "rollout": {"samples_per_prompt": 1}})


def test_given_sums_of_whole_completions_are_not_compared_with_cut_ones():
    """Caught: the combination let through, which is silent."""
    config = configs.default_config("dpo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["algorithm"]["precompute_ref_log_probs"] = True
    configs.resolve(config)
    config["data"]["overlong_prompts"] = "truncate_left"
    with pytest.raises(UserError, match=r"precompute_ref_log_probs=True with data\.overlong_prompts='truncate_left'"):
        configs.resolve(config)
