"""GDPO: several rewards, each normalised within its group before they are added up.

    A_i = whiten( sum_k w_k (r_{k,i} - mean(r_k of the group)) / (std + 1e-6) )        over the batch's trained tokens

arXiv:2601.05242. Rewards of different scale keep their say, and combinations of equal sums stay apart, which GRPO's
single sum confuses. The weights are those of `rewards`; a length penalty and a KL in the reward have no place here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_llm.algorithms import grpo, on_policy
from jaxrl_llm.algorithms.advantages import combine_rewards
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.config import RunConfig
from jaxrl_llm.types import Rollouts


@dataclasses.dataclass(frozen=True)
class GDPOOptions(grpo.GRPOOptions):
    """Options of `algorithm` when its name is `gdpo`."""


def advantages(context: Context, rollouts: Rollouts, scores: on_policy.Scores, sequences: Sequences) -> np.ndarray:
    weights = {name: reward.weight for name, reward in context.config.rewards.items()}
    if context.config.reward_model.path:
        weights["reward_model"] = context.config.reward_model.weight
    return combine_rewards(
        {name: rollouts.components[name] for name in weights},  # not the parts of a reward that returns several
        weights,
        rollouts.group,
        np.array([int(mask.sum()) for mask in sequences.loss_mask]),
        mode="gdpo",
        normalize_std=context.options.advantage_normalization == "std",
    )


def validate(options: GDPOOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = on_policy.validate(options, config, name="gdpo", min_samples=2)
    if options.overlong_buffer_tokens or (options.kl_coef > 0 and options.kl_in == "reward"):
        found.append(
            (
                "error",
                "gdpo normalises the rewards of config.rewards one by one: algorithm.overlong_buffer_tokens and "
                "kl_in='reward' would be lost. Put the KL into the loss (kl_in='loss') and length into a reward.",
            )
        )
    return found


GDPO = on_policy.algorithm("gdpo", GDPOOptions, advantages, validate=validate)
