"""Pass@k training: rewards the best of k samples in place of each one.

    a subset S of k samples has the reward max(S); A_i = mean of (max(S) - m) / s over the subsets that hold i

with m and s the mean and the deviation of these rewards over all subsets, in closed form: no subset is drawn.
arXiv:2508.10751. Advantages as in `advantages.pass_at_k_advantages`; the loss is PPO's clipped one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_llm.algorithms import on_policy
from jaxrl_llm.algorithms.advantages import pass_at_k_advantages
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.types import Rollouts


@dataclasses.dataclass(frozen=True)
class PassAtKOptions(on_policy.ClippedOptions):
    """Options of `algorithm` when its name is `pass_at_k`."""

    k: int = option(4, "how many samples are one try", low=1)


def advantages(context: Context, rollouts: Rollouts, scores: on_policy.Scores, sequences: Sequences) -> np.ndarray:
    return pass_at_k_advantages(scores.total, rollouts.group, k=context.options.k)


def validate(options: PassAtKOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = on_policy.validate(options, config, name="pass_at_k", min_samples=2)
    if options.k >= config.rollout.samples_per_prompt:
        found.append(
            (
                "error",
                f"algorithm.k={options.k}: of rollout.samples_per_prompt={config.rollout.samples_per_prompt} samples "
                "every subset of so many has the same best one, so nothing is learned. Lower k or draw more samples.",
            )
        )
    return found


PASS_AT_K = on_policy.algorithm("pass_at_k", PassAtKOptions, advantages, validate=validate)
