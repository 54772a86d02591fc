"""Accuracy, mean reward and pass@k of a policy on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.algorithms.interface import Context
from jaxrl_llm.config import EvalConfig
from jaxrl_llm.types import Example, Rollouts


def answer(context: Context, examples: Sequence[Example], samples: int, temperature: float) -> Rollouts:
    """The policy's answers with their rewards."""
    return context.rollouts(examples, samples=samples, temperature=temperature)


def figures(rollouts: Rollouts, settings: EvalConfig) -> dict[str, float]:
    """What scored answers say. A sample is correct when its ``eval.accuracy_reward`` is at least 1.

    With ``eval.temperature`` 0 and one sample a prompt, `eval/accuracy` is the greedy accuracy. With more samples it is
    the mean over all of them, and `eval/pass_at_<k>` is added for k = 1, 2, 4 … up to the number of samples.

    Samples that this reward does not apply to (None, for want of an answer, say) are neither right nor wrong: they are
    left out, and `eval/unscored_fraction` is their share. pass@k is over the prompts with at least k samples that it
    applies to. A figure over nothing is left out: so are accuracy and pass@k where no reward says what is correct, as
    with a reward model alone.
    """
    counted = settings.accuracy_reward
    scores = rollouts.components[counted] if counted else rollouts.rewards
    scored = ~np.isnan(scores)
    correct = scores >= 1.0  # False for NaN
    metrics = {
        "eval/unscored_fraction": float(1.0 - scored.mean()),
        "eval/response/length_mean": rollouts.metrics["response/length_mean"],
        "eval/response/truncated_fraction": rollouts.metrics["response/truncated_fraction"],
        "eval/rows": float(len(rollouts.examples)),
    }
    if counted and scored.any():
        metrics["eval/accuracy"] = float(correct[scored].mean())
    rewarded = ~np.isnan(rollouts.rewards)
    if rewarded.any():
        metrics["eval/reward/mean"] = float(rollouts.rewards[rewarded].mean())
    if counted and settings.samples_per_prompt > 1:
        counts = np.bincount(rollouts.group[scored], minlength=len(rollouts.examples))
        right = np.bincount(rollouts.group[correct], minlength=len(rollouts.examples))
        for exponent in range(int(math.log2(settings.samples_per_prompt)) + 1):
            k = 2**exponent
            chances = [pass_at_k(int(n), int(c), k) for n, c in zip(counts, right, strict=True) if n >= k]
            if chances:
                metrics[f"eval/pass_at_{k}"] = float(np.mean(chances))
    return metrics


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct: ``1 - C(n-c, k) / C(n, k)``.

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374.
    """
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
