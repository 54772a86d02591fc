"""CISPO: REINFORCE weighted with the clipped ratio, so that a clipped token keeps its gradient.

    loss = -stop_gradient(clip(r_t, 1 - lo, 1 + hi)) A log pi(t)

arXiv:2506.13585, with GRPO's advantages; a `clip_low` of 1 or more is no lower bound, as in the paper.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxrl_llm.algorithms import grpo, on_policy, policy_loss
from jaxrl_llm.config import option
from jaxrl_llm.types import Rows


@dataclasses.dataclass(frozen=True)
class CISPOOptions(on_policy.GroupOptions):
    """Options of `algorithm` when its name is `cispo`."""

    clip_low: float = option(10.0, "the weight is clipped below at 1 - clip_low; 1 or more = not at all", low=0.0)
    clip_high: float = option(0.2, "the weight is clipped above at 1 + clip_high", low=0.0)


def surrogate(options: Any, actor: Float[Array, "R T"], rows: Rows) -> on_policy.TokenLoss:
    bounds = {"clip_low": options.clip_low, "clip_high": options.clip_high}
    loss, ratio = policy_loss.cispo(actor, rows.old_logprobs, rows.advantages, **bounds)
    return on_policy.TokenLoss(loss, ratio, ratio > 1 + options.clip_high, ratio < 1 - options.clip_low)


CISPO = on_policy.algorithm("cispo", CISPOOptions, grpo.advantages, surrogate=surrogate)
