"""Accuracy, mean reward and pass@k of a policy on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.config import RunConfig
from jaxrl_llm.rollout import EVALUATION_STREAM, Rollout
from jaxrl_llm.types import Example, Params


def evaluate(
    rollout: Rollout, params: Params, examples: Sequence[Example], config: RunConfig
) -> dict[str, float]:
    """Answers each prompt and scores it. A sample is correct when its first reward component is at least 1.

    With ``eval.temperature`` 0 and one sample a prompt, `eval/accuracy` is the greedy accuracy. With more samples it is
    the mean over all of them, and `eval/pass_at_<k>` is added for k = 1, 2, 4 … up to the number of samples.
    """
    settings = config.eval
    rollouts = rollout.rollouts(
        params,
        examples,
        step=EVALUATION_STREAM,
        samples=settings.samples_per_prompt,
        temperature=settings.temperature,
    )
    first = next(iter(rollouts.components.values())) if rollouts.components else rollouts.rewards
    correct = np.nan_to_num(first, nan=0.0) >= 1.0
    metrics = {
        "eval/accuracy": float(correct.mean()),
        "eval/reward/mean": float(np.nanmean(rollouts.rewards)),
        "eval/response/length_mean": rollouts.metrics["response/length_mean"],
        "eval/response/truncated_fraction": rollouts.metrics["response/truncated_fraction"],
        "eval/rows": float(len(examples)),
    }
    samples = settings.samples_per_prompt
    if samples > 1:
        right = np.bincount(rollouts.group[correct], minlength=len(examples))
        for exponent in range(int(math.log2(samples)) + 1):
            k = 2**exponent
            metrics[f"eval/pass_at_{k}"] = float(np.mean([pass_at_k(samples, int(c), k) for c in right]))
    return metrics


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct: ``1 - C(n-c, k) / C(n, k)``.

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374.
    """
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
