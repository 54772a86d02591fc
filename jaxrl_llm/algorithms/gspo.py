"""GSPO: clips whole sequences, by the geometric mean of their token ratios.

    s_i = exp(mean_t log(pi(t) / pi_old(t)))           loss_i = max(-A_i s_i, -A_i clip(s_i, 1-lo, 1+hi))

arXiv:2507.18071, with its narrow bounds (3e-4 below, 4e-4 above) and GRPO's advantages. `token_level` is GSPO-token:
the same ratio in value, the token's own gradient. The loss counts each sequence once (`seq-mean-token-mean`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxrl_llm.algorithms import aggregation, grpo, on_policy, policy_loss
from jaxrl_llm.config import option
from jaxrl_llm.types import Rows


@dataclasses.dataclass(frozen=True)
class GSPOOptions(on_policy.GroupOptions):
    """Options of `algorithm` when its name is `gspo`."""

    loss_aggregation: str = option("seq-mean-token-mean", "how token losses become one", choices=aggregation.MODES)
    clip_low: float = option(3e-4, "a sequence's ratio is clipped below at 1 - clip_low", low=0.0, high=1.0)
    clip_high: float = option(4e-4, "a sequence's ratio is clipped above at 1 + clip_high", low=0.0)
    token_level: bool = option(False, "GSPO-token: the token's own gradient")


def surrogate(options: Any, actor: Float[Array, "R T"], rows: Rows) -> on_policy.TokenLoss:
    loss_of = policy_loss.gspo_token if options.token_level else policy_loss.gspo
    place = rows.loss_mask, rows.segment_ids
    bounds = {"clip_low": options.clip_low, "clip_high": options.clip_high}
    loss, ratio = loss_of(actor, rows.old_logprobs, rows.advantages, *place, **bounds)
    high, low = policy_loss.clip_fractions(ratio, rows.advantages, **bounds)
    return on_policy.TokenLoss(loss, ratio, high, low)


GSPO = on_policy.algorithm("gspo", GSPOOptions, grpo.advantages, surrogate=surrogate)
