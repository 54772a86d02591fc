"""Accuracy and pass@k: which reward they count, and over which samples."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.errors import UserError
from jaxrl_llm.evaluate import figures, pass_at_k
from jaxrl_llm.types import Example, Rollouts

NAN = float("nan")
EXAMPLES = [Example(f"{row}@0", "a", np.array([5], np.int32), row=row) for row in range(3)]


def scored(samples: int, **components: list[float]) -> Rollouts:
    """Three prompts, with these components of the reward."""
    values = {name: np.array(column, np.float32) for name, column in components.items()}
    count = len(EXAMPLES) * samples
    return Rollouts(
        examples=EXAMPLES,
        group=np.repeat(np.arange(len(EXAMPLES), dtype=np.int32), samples),
        responses=[np.array([6], np.int32)] * count,
        sampler_logprobs=None,
        texts=["b"] * count,
        finish_reasons=["stop"] * count,
        rewards=next(iter(values.values())),
        components=values,
        metrics={"response/length_mean": 1.0, "response/truncated_fraction": 0.0},
    )


def metrics_of(accuracy_reward: str = "", samples: int = 1, **components: list[float]) -> dict[str, float]:
    config = configs.default_config("grpo")
    config.model.path = "builtin:tiny_addition"
    config.data.eval = "builtin:addition/eval"
    config.rewards = {name: {} for name in components}
    config.eval.accuracy_reward = accuracy_reward
    resolved = configs.resolve(config)
    settings = dataclasses.replace(resolved.eval, samples_per_prompt=samples)
    return figures(scored(samples, **components), settings)


def test_accuracy_counts_the_reward_that_is_named():
    """Caught: the first component, which is the first in the alphabet, as a ConfigDict sorts its keys."""
    brief, right = [1.0, 1.0, 1.0], [1.0, 0.0, 0.5]
    assert metrics_of("right", brief=brief, right=right)["eval/accuracy"] == pytest.approx(1 / 3)
    assert metrics_of("brief", brief=brief, right=right)["eval/accuracy"] == 1.0
    assert metrics_of(right=right)["eval/accuracy"] == pytest.approx(1 / 3)


def test_samples_that_the_reward_does_not_apply_to_are_left_out():
    """Caught: NaN taken for a wrong answer (accuracy 1/3)."""
    metrics = metrics_of("right", brief=[0.5, 1.5, NAN], right=[1.0, NAN, 0.0])
    assert metrics["eval/accuracy"] == 0.5
    assert metrics["eval/unscored_fraction"] == pytest.approx(1 / 3)
    assert metrics["eval/reward/mean"] == 1.0 and metrics["eval/rows"] == 3.0


def test_pass_at_k_is_over_the_prompts_with_k_scored_samples():
    """Caught: the configured number of samples in place of the scored ones; a prompt of one wrong sample counted as
    solved in two."""
    right = [1.0, 0.0, 0.0, 1.0, NAN, 0.0, 1.0, 0.0, NAN, NAN, NAN, 0.0]
    metrics = metrics_of(samples=4, right=right)
    assert metrics["eval/unscored_fraction"] == pytest.approx(1 / 3) and metrics["eval/accuracy"] == 3 / 8
    # Prompts: 2 of 4 right, 1 of 3, 0 of 1.
    assert metrics["eval/pass_at_1"] == pytest.approx((1 / 2 + 1 / 3 + 0) / 3)
    assert metrics["eval/pass_at_2"] == pytest.approx((5 / 6 + 2 / 3) / 2)
    assert metrics["eval/pass_at_4"] == 1.0


def test_figures_over_nothing_are_left_out():
    """Caught: the mean of an empty selection, a warning and NaN."""
    metrics = metrics_of(samples=1, right=[NAN] * 3)
    assert metrics["eval/unscored_fraction"] == 1.0
    assert not {"eval/accuracy", "eval/reward/mean"} & metrics.keys()


def test_a_reward_model_alone_says_what_is_better_and_not_what_is_right():
    """Caught: a score of 1 or more taken for a correct answer."""
    config = configs.default_config("grpo").to_dict()
    config["model"]["path"], config["reward_model"]["path"] = "builtin:tiny_addition", "elsewhere"
    config["data"]["eval"] = "builtin:addition/eval"
    settings = dataclasses.replace(configs.resolve(config).eval, samples_per_prompt=2)
    metrics = figures(scored(2, reward_model=[3.0, -1.0, 2.0, NAN, 0.5, 0.5]), settings)
    assert not [name for name in metrics if "accuracy" in name or "pass_at" in name]
    assert metrics["eval/reward/mean"] == 1.0 and metrics["eval/unscored_fraction"] == pytest.approx(1 / 6)
    config["eval"]["accuracy_reward"] = "reward_model"
    with pytest.raises(UserError, match=r"eval\.accuracy_reward = 'reward_model', and the only reward is the model"):
        configs.resolve(config)


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(4, 1, 1), (4, 1, 2), (6, 2, 3), (5, 0, 2), (3, 3, 2), (8, 7, 2)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples, correct, k):
    """Caught: 1 - (1 - c/n)^k, which is biased."""
    subsets = list(itertools.combinations(range(samples), k))
    expected = sum(any(index < correct for index in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(samples, correct, k) == pytest.approx(expected)
