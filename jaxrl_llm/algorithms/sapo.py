"""SAPO: a soft gate on the ratio in place of the clip.

    loss = -A (4 / tau) sigmoid(tau (r_t - 1))               tau = tau_pos where A > 0, tau_neg elsewhere

arXiv:2511.20347, with GRPO's advantages. At r = 1 the slope is that of the plain ratio; it falls off on both sides,
faster for negative advantages.
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
class SAPOOptions(on_policy.GroupOptions):
    """Options of `algorithm` when its name is `sapo`."""

    loss_aggregation: str = option("seq-mean-token-mean", "how token losses become one", choices=aggregation.MODES)
    tau_pos: float = option(1.0, "the gate's temperature where the advantage is positive", above=0.0)
    tau_neg: float = option(1.05, "the gate's temperature where it is not", above=0.0)


def surrogate(options: Any, actor: Float[Array, "R T"], rows: Rows) -> on_policy.TokenLoss:
    loss, ratio = policy_loss.sapo(
        actor, rows.old_logprobs, rows.advantages, tau_pos=options.tau_pos, tau_neg=options.tau_neg
    )
    nowhere = jnp.zeros(ratio.shape, bool)
    return on_policy.TokenLoss(loss, ratio, nowhere, nowhere)


SAPO = on_policy.algorithm("sapo", SAPOOptions, grpo.advantages, surrogate=surrogate)
