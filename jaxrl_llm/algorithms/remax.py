"""ReMax: REINFORCE with the reward of the greedy answer as the baseline.

    A_i = r_i - r(greedy answer to the same prompt)

arXiv:2310.10505. One more answer a prompt is generated, at temperature 0; it is scored and not trained on. The penalty
for overlong answers is part of both rewards; a KL in the reward is taken off the sampled answers alone. The loss is
PPO's clipped one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.algorithms import on_policy
from jaxrl_llm.algorithms.advantages import remax_advantages
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.types import Example, Rollouts


@dataclasses.dataclass(frozen=True)
class ReMaxOptions(on_policy.ClippedOptions):
    """Options of `algorithm` when its name is `remax`."""


def collect(context: Context, examples: Sequence[Example]) -> Rollouts:
    rollouts = context.rollouts(examples)
    greedy = context.rollouts(examples, samples=1, temperature=0.0)
    rollouts.baselines = on_policy.penalised(context, greedy)
    scored = greedy.rewards[~np.isnan(greedy.rewards)]
    if len(scored):
        rollouts.metrics["reward/greedy/mean"] = float(scored.mean())
    return rollouts


def advantages(context: Context, rollouts: Rollouts, scores: on_policy.Scores, sequences: Sequences) -> np.ndarray:
    assert rollouts.baselines is not None, "collect gives the greedy rewards"
    return remax_advantages(scores.total, rollouts.baselines, rollouts.group)


REMAX = on_policy.algorithm("remax", ReMaxOptions, advantages, collect=collect, min_samples=1)
