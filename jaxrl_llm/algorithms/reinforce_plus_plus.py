"""REINFORCE++: rewards-to-go of every token, whitened over the whole batch; no critic and no group.

    G_t = r_t + gamma G_{t+1},  r_t = -kl_coef KL_t, the score added at the last token          A = whiten(G)

arXiv:2501.03262. The baseline variant takes the mean of the prompt's samples off the score first, and whitens what is
left over the batch (`reinforce_plus_plus_baseline`, two samples a prompt or more; its KL belongs into the loss). The
loss is PPO's clipped one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_llm.algorithms import on_policy
from jaxrl_llm.algorithms.advantages import (
    reinforce_plus_plus_baseline_advantages,
    reinforce_plus_plus_returns,
    whiten,
)
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.config import option
from jaxrl_llm.types import Rollouts


@dataclasses.dataclass(frozen=True)
class ReinforcePlusPlusOptions(on_policy.ClippedOptions):
    """Options of `algorithm` when its name is `reinforce_plus_plus`."""

    kl_estimator: str = option("k1", "KL estimator", choices=on_policy.policy_loss.KL_ESTIMATORS)
    kl_in: str = option("reward", "where the KL goes; never both", choices=("loss", "reward"))
    gamma: float = option(1.0, "discount per token", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class BaselineOptions(on_policy.ClippedOptions):
    """Options of `algorithm` when its name is `reinforce_plus_plus_baseline`."""

    kl_estimator: str = option("k2", "KL estimator", choices=on_policy.policy_loss.KL_ESTIMATORS)


def advantages(
    context: Context, rollouts: Rollouts, scores: on_policy.Scores, sequences: Sequences
) -> list[np.ndarray]:
    returns = reinforce_plus_plus_returns(scores.token_rewards, scores.written, gamma=context.options.gamma)
    return whiten(returns, sequences.loss_mask)


def baseline_advantages(
    context: Context, rollouts: Rollouts, scores: on_policy.Scores, sequences: Sequences
) -> list[np.ndarray]:
    return reinforce_plus_plus_baseline_advantages(scores.total, rollouts.group, sequences.loss_mask)


REINFORCE_PLUS_PLUS = on_policy.algorithm("reinforce_plus_plus", ReinforcePlusPlusOptions, advantages, min_samples=1)
REINFORCE_PLUS_PLUS_BASELINE = on_policy.algorithm("reinforce_plus_plus_baseline", BaselineOptions, baseline_advantages)
