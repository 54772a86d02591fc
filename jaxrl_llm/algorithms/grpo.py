"""GRPO: group-relative advantages, PPO's clipped loss, no critic.

    A_i = (r_i - mean(r_group)) / (std(r_group) + 1e-6)          one number for all tokens of sample i
    loss = sum_t w_t [ max(-A r_t, -A clip(r_t, 1-lo, 1+hi)) + kl_coef KL_t - entropy_coef H_t ] / denominator

DeepSeekMath, arXiv:2402.03300. What differs from the paper: the loss averages over tokens of the whole batch by
default (`loss_aggregation`; the paper's is `seq-mean-token-mean`), no KL term unless `kl_coef` is set, and a dual
clip at 3.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_llm.algorithms import on_policy
from jaxrl_llm.algorithms.advantages import group_advantages
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.types import Rollouts


@dataclasses.dataclass(frozen=True)
class GRPOOptions(on_policy.ClippedOptions, on_policy.GroupOptions):
    """Options of `algorithm` when its name is `grpo`."""


def advantages(context: Context, rollouts: Rollouts, scores: on_policy.Scores, sequences: Sequences) -> np.ndarray:
    normalize = context.options.advantage_normalization == "std"
    return group_advantages(scores.total, rollouts.group, normalize_std=normalize)


GRPO = on_policy.algorithm("grpo", GRPOOptions, advantages)
