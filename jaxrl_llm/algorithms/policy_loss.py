"""Token losses that on-policy algorithms share. All take and return float32 ``[R, T]``; nothing is reduced here."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Values = TypeVar("Values", np.ndarray, Array)

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ±20 before `exp`: beyond it the gradient is zero instead of inf or NaN."""

KL3_LIMIT = 10.0

KL_ESTIMATORS = ("k1", "k2", "k3")


def clipped_surrogate(
    actor_logprobs: Float[Array, "*b T"],
    old_logprobs: Float[Array, "*b T"],
    advantages: Float[Array, "*b T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Float[Array, "*b T"], Float[Array, "*b T"]]:
    """PPO's clipped surrogate with clip-higher and dual clip, to be minimised.

    ``r = exp(actor - old)``; ``loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))``, and where ``A < 0``
    also ``loss = min(loss, -A dual_clip)``.

    Sources: PPO arXiv:1707.06347; dual clip arXiv:1912.09729; clip-higher (DAPO) arXiv:2503.14476.

    Args:
      dual_clip: the bound c > 1 on the ratio where the advantage is negative; 0 switches it off.

    Returns:
      The token losses and the ratio r.
    """
    ratio = jnp.exp(jnp.clip(actor_logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    loss = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    if dual_clip:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)
    return loss, ratio


def clip_fractions(
    ratio: Float[Array, "*b T"], advantages: Float[Array, "*b T"], clip_low: float, clip_high: float
) -> tuple[Bool[Array, "*b T"], Bool[Array, "*b T"]]:
    """Where the upper (A > 0) and the lower (A < 0) clip stop the gradient."""
    return (advantages > 0) & (ratio > 1 + clip_high), (advantages < 0) & (ratio < 1 - clip_low)


def kl_penalty(logprobs: Values, ref_logprobs: Values, estimator: str) -> Values:
    """Estimate of KL(policy || reference) at each sampled token; on the host (numpy) or inside a jit.

    With ``d = logprobs - ref_logprobs``: k1 ``= d``, k2 ``= d²/2``, k3 ``= exp(-d) - 1 + d``
    (Schulman, "Approximating KL divergence", 2020). d is clamped to ±20 and k3 to ±10.
    """
    module: Any = np if isinstance(logprobs, np.ndarray) else jnp
    difference = module.clip(logprobs - ref_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * module.square(difference)
    if estimator == "k3":
        return module.clip(module.exp(-difference) - 1 + difference, -KL3_LIMIT, KL3_LIMIT)
    raise ValueError(f"kl_estimator is {estimator!r}; it is one of {', '.join(KL_ESTIMATORS)}")
