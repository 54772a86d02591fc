"""KTO from labelled rows to loss and gradient, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.kto import KTO
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Example, TokenOutputs
from tests.algorithms.compared_rows import (
    CHOSEN,
    PROMPTS,
    REJECTED,
    SLOPE,
    FakeContext,
    make_config,
    numbers,
    over_rows,
)
from tests.packed_rows import finite_differences

LABELS = (True, False, False, True)
OPTIONS = {"beta": 0.8, "desirable_weight": 0.7, "undesirable_weight": 1.3}
PROMPT_OF, COMPLETIONS = (0, 1, 2, 0), (CHOSEN[0], CHOSEN[2], CHOSEN[1], REJECTED[2])
MISMATCHED = (1, 0, 3, 2)
"""Whose completion each row's prompt is put to: ordered by prompt the rows are 0, 3, 1, 2, and each takes the one two
places before its own, as two is how often the most frequent prompt is there."""


def prepared():
    examples = [
        Example(f"{n}@0", "", np.array(PROMPTS[prompt], np.int32), response_ids=np.array(ids, np.int32), label=label)
        for n, (prompt, ids, label) in enumerate(zip(PROMPT_OF, COMPLETIONS, LABELS, strict=True))
    ]
    context = FakeContext(make_config("kto", {"train_batch_size": 4}, **OPTIONS))
    return KTO.prepare(context, KTO.collect(context, examples)), context


def outputs_of(logprobs):
    return TokenOutputs(logprobs, jnp.full_like(logprobs, 2.0))


def sums(role, sequences):
    return [
        np.float64(one[mask]).sum() for one, mask in zip(numbers(role, sequences), sequences.loss_mask, strict=True)
    ]


def reference_point(policy, reference):
    """The mean, over prompts put to another row's completion, of the sum of log-ratios; not bounded."""
    ratios = []
    for row, other in enumerate(MISMATCHED):
        prompt = PROMPTS[PROMPT_OF[row]]
        ids = np.array([*prompt, *COMPLETIONS[other]])
        falls = (3 * ids + np.roll(ids, 1) + np.arange(len(ids))) % 7
        ratios.append((reference - policy) * falls[len(prompt) :].sum())
    return np.mean(ratios)


def test_the_reference_point_is_the_policys_on_other_prompts(monkeypatch):
    """The policy of these numbers is below its reference, so that the point is 0; the other way round it is above.
    Caught: ratios of the rows' own completions; policy and reference exchanged; no bound at 0; a mean over tokens."""
    sequences, context = prepared()
    assert context.asked == ["reference", "policy", "reference"]
    assert reference_point(SLOPE["policy"], SLOPE["reference"]) < -0.1 and set(sequences.extras["kl"]) == {0.0}
    monkeypatch.setitem(SLOPE, "policy", 0.01)
    sequences, _ = prepared()
    point = reference_point(0.01, 0.07)
    assert sequences.metrics["kl/reference_point"] == pytest.approx(point, rel=1e-5)
    np.testing.assert_allclose(sequences.extras["kl"], point, rtol=1e-5)


def test_a_batch_of_one_prompt_keeps_the_reference_point_of_the_one_before(monkeypatch):
    """No completion of another prompt is there to measure it on. Caught: 0 for it; the rows' own completions."""
    monkeypatch.setitem(SLOPE, "policy", 0.01)
    sequences, context = prepared()
    point = sequences.metrics["kl/reference_point"]
    assert point > 0.1 and context.memory == {}
    memory = KTO.after_step(context.options, KTO.init(context.options), sequences.metrics)
    alone = [
        Example(f"{n}@0", "", np.array(PROMPTS[0], np.int32), response_ids=np.array(CHOSEN[n], np.int32), label=n > 0)
        for n in range(3)
    ]
    for before, expected in ((memory, point), (KTO.init(context.options), 0.0)):
        context = FakeContext(context.config, memory=before)
        sequences = KTO.prepare(context, KTO.collect(context, alone))
        assert set(sequences.extras["kl"]) == {np.float32(expected)} and context.asked == ["reference"]
        assert KTO.after_step(context.options, before, sequences.metrics) == before


@pytest.mark.parametrize("row_tokens", [9, 40], ids=["several rows", "all in one row"])
def test_loss_gradient_and_metrics_equal_numpy(row_tokens, monkeypatch):
    """Caught: the sum over a whole row; weights or labels exchanged; the point of the row's own ratios; a mean over
    tokens in place of sequences; rewards of the undesirable ones among the others."""
    monkeypatch.setitem(SLOPE, "policy", 0.01)
    sequences, context = prepared()
    policy, reference = numbers("policy", sequences), sums("reference", sequences)
    point = float(sequences.metrics["kl/reference_point"])
    loss, metrics, gradient = over_rows("kto", context.options, sequences, policy, outputs_of, row_tokens=row_tokens)

    def mean(values):
        total = 0.0
        for one, mask, ref, label in zip(values, sequences.loss_mask, reference, LABELS, strict=True):
            utility = 0.8 * (np.float64(one[mask]).sum() - ref - point) * (1 if label else -1)
            total += (0.7 if label else 1.3) * (1 - 1 / (1 + np.exp(-utility)))
        return total / 4

    assert point > 0.1 and loss == pytest.approx(mean(policy), rel=2e-6)  # float32
    for found, expected in zip(gradient, finite_differences(mean, policy), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    rewards = 0.8 * (np.array(sums("policy", sequences)) - reference)
    expected = {
        "loss/total": loss,
        "rewards/chosen": rewards[[0, 3]].mean(),
        "rewards/rejected": rewards[[1, 2]].mean(),
        "logps/mean": np.mean(sums("policy", sequences)),
        "entropy/mean": 2.0,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"epochs": 2}}, r"training\.epochs=2"),
        ({"train_batch_size": 4, "training": {"mini_batch_size": 2}}, r"training\.mini_batch_size=2"),
        ({"train_batch_size": 1}, "train_batch_size=1"),
    ],
    ids=str,
)
def test_more_than_one_update_of_a_batch_is_refused(changes, message):
    """Caught: each check taken out."""
    with pytest.raises(UserError, match=message):
        make_config("kto", changes)
