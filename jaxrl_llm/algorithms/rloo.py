"""RLOO: REINFORCE with the mean of the prompt's other samples as the baseline.

    A_i = r_i - sum_{j != i} r_j / (k - 1)                        one number for all tokens of sample i

arXiv:2402.14740. The baseline of a sample does not hold its own reward, so the gradient stays unbiased. What differs:
the loss is PPO's clipped one, which with one update per rollout is REINFORCE; the paper's KL stands in the reward, here
where `kl_in` says.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_llm.algorithms import on_policy
from jaxrl_llm.algorithms.advantages import rloo_advantages
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.types import Rollouts


@dataclasses.dataclass(frozen=True)
class RLOOOptions(on_policy.ClippedOptions):
    """Options of `algorithm` when its name is `rloo`."""


def advantages(context: Context, rollouts: Rollouts, scores: on_policy.Scores, sequences: Sequences) -> np.ndarray:
    return rloo_advantages(scores.total, rollouts.group)


RLOO = on_policy.algorithm("rloo", RLOOOptions, advantages)
