"""GMPO: the geometric mean of a sequence's token ratios, each clipped before the mean.

    loss_i = -A_i exp(mean_t clip(log(pi(t) / pi_old(t))))      clipped above for A > 0, below for A < 0, at ±0.4

arXiv:2507.20673, with GRPO's advantages; the bounds are log-ratios. A clipped token has no gradient, the others of its
sequence keep theirs. The loss counts each sequence once (`seq-mean-token-mean`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms import aggregation, grpo, on_policy, policy_loss
from jaxrl_llm.config import option
from jaxrl_llm.types import Rows


@dataclasses.dataclass(frozen=True)
class GMPOOptions(on_policy.GroupOptions):
    """Options of `algorithm` when its name is `gmpo`."""

    loss_aggregation: str = option("seq-mean-token-mean", "how token losses become one", choices=aggregation.MODES)
    clip_low: float = option(0.4, "log-ratios are clipped below at -clip_low", low=0.0)
    clip_high: float = option(0.4, "log-ratios are clipped above at clip_high", low=0.0)


def surrogate(options: Any, actor: Float[Array, "R T"], rows: Rows) -> on_policy.TokenLoss:
    bounds = {"clip_low": options.clip_low, "clip_high": options.clip_high}
    loss, ratio = policy_loss.gmpo(
        actor, rows.old_logprobs, rows.advantages, rows.loss_mask, rows.segment_ids, **bounds
    )
    log_ratio = actor - rows.old_logprobs
    high = (rows.advantages > 0) & (log_ratio > options.clip_high)
    low = (rows.advantages < 0) & (log_ratio < -options.clip_low)
    return on_policy.TokenLoss(loss, jnp.broadcast_to(ratio, loss.shape), high, low)


GMPO = on_policy.algorithm("gmpo", GMPOOptions, grpo.advantages, surrogate=surrogate)
