"""Token losses that on-policy algorithms share. All take and return float32 ``[R, T]``; nothing is reduced here.

Each returns the token losses, to be minimised, and the ratio that they use. ``A`` is the advantage, ``r`` the token's
ratio ``exp(actor - old)``, ``sg`` stops the gradient. Those of whole sequences (`gspo`, `gmpo`) put the sequence's loss
on each of its tokens, and with `seq-mean-token-mean` it counts once, as in their papers; a sequence is what the mask
leaves of a segment, so neither the packing nor a shared prompt matters. Log-ratios are clamped before `exp`, so that
whatever stands where the mask is False gives finite losses and gradients, which the weights of 0 there then remove.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.segments import segment_mean

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
    ratio = jnp.exp(_bounded(actor_logprobs - old_logprobs))
    loss = _pessimistic(ratio, advantages, clip_low, clip_high)
    if dual_clip:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)
    return loss, ratio


def _bounded(log_ratio: Array) -> Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _pessimistic(ratio: Array, advantages: Array, clip_low: float, clip_high: float) -> Array:
    """The larger loss of the ratio and of the clipped ratio."""
    return jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high))


def gspo(
    actor_logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """GSPO, arXiv:2507.18071: clips whole sequences by the geometric mean of their token ratios.

    ``s = exp(mean_t(actor_t - old_t))`` and ``loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))`` with A the
    mean of the sequence's token advantages (all the same in the paper). The gradient goes through s, so each token
    has ``-A s / length``. The bounds are the paper's; verl clamps ``log s`` at 10, here it is ±20.
    """
    ratio = jnp.exp(_bounded(segment_mean(actor_logprobs - old_logprobs, mask, segment_ids)))
    advantage = segment_mean(advantages, mask, segment_ids)
    return jnp.where(mask, _pessimistic(ratio, advantage, clip_low, clip_high), 0.0), ratio


def gspo_token(
    actor_logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """GSPO-token, arXiv:2507.18071 (verl's `gspo`): the sequence's ratio, the token's own advantage and gradient.

    ``s_t = sg(s) exp(actor_t - sg(actor_t))``, in value the `s` of `gspo`, and
    ``loss_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high))``. Where all tokens of a sequence have one
    advantage, its loss and gradient equal those of `gspo`, summed over the sequence.
    """
    log_ratio = jax.lax.stop_gradient(segment_mean(actor_logprobs - old_logprobs, mask, segment_ids))
    ratio = jnp.exp(_bounded(log_ratio + actor_logprobs - jax.lax.stop_gradient(actor_logprobs)))
    return jnp.where(mask, _pessimistic(ratio, advantages, clip_low, clip_high), 0.0), ratio


def gmpo(
    actor_logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """GMPO, arXiv:2507.20673 (verl's `geo_mean`): the geometric mean of token ratios, each clipped before the mean.

    With ``d_t = actor_t - old_t`` bounded above by `clip_high` where A > 0 and below by ``-clip_low`` where A < 0:
    ``loss = -A exp(mean_t d_t)``, A the mean of the sequence's token advantages. The bounds are log-ratios, unlike
    everywhere else: 0.4 clips at e^0.4. A clipped token has no gradient, the others of its sequence keep theirs.
    """
    log_ratio = _bounded(actor_logprobs - old_logprobs)
    advantage = segment_mean(advantages, mask, segment_ids)
    clipped = jnp.where(advantage > 0, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low))
    ratio = jnp.exp(segment_mean(clipped, mask, segment_ids))
    return jnp.where(mask, -advantage * ratio, 0.0), ratio


def cispo(
    actor_logprobs: Float[Array, "*b T"],
    old_logprobs: Float[Array, "*b T"],
    advantages: Float[Array, "*b T"],
    *,
    clip_low: float = 10.0,
    clip_high: float = 0.2,
) -> tuple[Float[Array, "*b T"], Float[Array, "*b T"]]:
    """CISPO, arXiv:2506.13585: REINFORCE weighted with the clipped ratio, so that a clipped token keeps a gradient.

    ``loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A actor``. A clip_low of 1 or more is no lower bound, as in the
    paper; the defaults are those of verl's example. The loss itself is no measure of progress, only its gradient is.
    """
    ratio = jnp.exp(_bounded(actor_logprobs - old_logprobs))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return -weight * advantages * actor_logprobs, ratio


def sapo(
    actor_logprobs: Float[Array, "*b T"],
    old_logprobs: Float[Array, "*b T"],
    advantages: Float[Array, "*b T"],
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Float[Array, "*b T"], Float[Array, "*b T"]]:
    """SAPO, arXiv:2511.20347: a soft gate in place of the clip.

    ``loss = -A (4 / tau) sigmoid(tau (r - 1))``, tau = `tau_pos` where A > 0 and `tau_neg` elsewhere. At r = 1 the
    slope in r is 1, as without a gate, and it falls off smoothly on both sides: faster for negative advantages.
    """
    ratio = jnp.exp(_bounded(actor_logprobs - old_logprobs))
    tau = jnp.where(advantages > 0, tau_pos, tau_neg).astype(ratio.dtype)
    return -advantages * (4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)), ratio


def value_loss(
    values: Float[Array, "*b T"],
    old_values: Float[Array, "*b T"],
    returns: Float[Array, "*b T"],
    *,
    cliprange_value: float = 0.5,
) -> tuple[Float[Array, "*b T"], Bool[Array, "*b T"]]:
    """The critic's loss of PPO: ``0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)``, c = `cliprange_value`.

    As in the code of PPO (arXiv:1707.06347 does not print it) and in verl, whose 0.5 and default these are; an
    infinite `cliprange_value` switches the clip off. `values` off the mask are to be 0, as the other fields are.

    Returns:
      The token losses, and where the clipped value counts (there the gradient is 0).
    """
    clipped = jnp.clip(values, old_values - cliprange_value, old_values + cliprange_value)
    plain, bounded = jnp.square(values - returns), jnp.square(clipped - returns)
    return 0.5 * jnp.maximum(plain, bounded), bounded > plain


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
