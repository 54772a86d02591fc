"""Losses of preferred and labelled completions: DPO and its kin, KTO, and the Bradley-Terry loss of a reward model.

Everything is per pair or per completion, float32; nothing is reduced here. `P` counts pairs or completions. A
log-probability is that of a whole completion given its prompt: the sum over its trained tokens, EOS included, or
their mean where it says so. Rewards are the implicit ones, ``beta (log policy - log reference)``, for metrics only:
they carry no gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust")

SMOOTHED = ("sigmoid", "robust")
"""The losses of which `label_smoothing` is a part."""


class PairLosses(NamedTuple):
    """What `dpo_loss` gives for each pair. The last two are metrics without gradient."""

    losses: Float[Array, " P"]
    chosen_rewards: Float[Array, " P"]
    rejected_rewards: Float[Array, " P"]

    @property
    def margins(self) -> Float[Array, " P"]:
        """How much more reward the chosen completion has."""
        return self.chosen_rewards - self.rejected_rewards


class LabelLosses(NamedTuple):
    """What `kto_losses` gives for each completion. The rewards are a metric without gradient."""

    losses: Float[Array, " P"]
    rewards: Float[Array, " P"]


def dpo_loss(
    policy_chosen: Float[Array, " P"],
    policy_rejected: Float[Array, " P"],
    ref_chosen: Float[Array, " P"],
    ref_rejected: Float[Array, " P"],
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> PairLosses:
    """Direct preference optimisation, from the log-probs of both completions of each pair.

    With ``d = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)`` and ``e = label_smoothing``:

    * ``sigmoid``: ``-(1 - e) log s(beta d) - e log s(-beta d)``; DPO (arXiv:2305.18290), with e > 0 conservative DPO.
    * ``robust``: ``(-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e)``, unbiased where a share e of the pairs
      is the wrong way round (arXiv:2403.00409). It has no lower bound.
    * ``hinge``: ``max(0, 1 - beta d)``.
    * ``ipo``: ``(d - 1 / (2 beta))²`` (arXiv:2310.12036). The log-probs must be means over tokens, not sums, and the
      rewards are then per token as well.

    Args:
      beta: strength of the pull to the reference, above 0 (IPO's tau).
      label_smoothing: the share of pairs that is supposed to be the wrong way round, in [0, 0.5).

    Raises:
      ValueError: an unknown loss type, a number out of range, smoothing of a loss that has none.
    """
    if loss_type not in DPO_LOSSES:
        raise ValueError(f"loss_type is {loss_type!r}; it is one of {', '.join(DPO_LOSSES)}")
    if beta <= 0:
        raise ValueError(f"beta is {beta}; it must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 0.5)")
    if label_smoothing and loss_type not in SMOOTHED:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, and the loss {loss_type!r} has none; "
            f"set it to 0, or choose {' or '.join(SMOOTHED)}"
        )
    chosen = (policy_chosen - ref_chosen).astype(jnp.float32)
    rejected = (policy_rejected - ref_rejected).astype(jnp.float32)
    difference = chosen - rejected
    if loss_type == "hinge":
        losses = jax.nn.relu(1 - beta * difference)
    elif loss_type == "ipo":
        losses = jnp.square(difference - 1 / (2 * beta))
    else:
        right, wrong = -jax.nn.log_sigmoid(beta * difference), -jax.nn.log_sigmoid(-beta * difference)
        if loss_type == "sigmoid":
            losses = (1 - label_smoothing) * right + label_smoothing * wrong
        else:
            losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    return PairLosses(losses, *(jax.lax.stop_gradient(beta * ratio) for ratio in (chosen, rejected)))


def kto_losses(
    policy: Float[Array, " P"],
    reference: Float[Array, " P"],
    is_desirable: Bool[Array, " P"],
    kl: Float[Array, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LabelLosses:
    """Kahneman-Tversky optimisation (arXiv:2402.01306, equation 7) from one labelled completion each.

    With ``r = policy - reference`` (sums of log-probs): ``desirable_weight (1 - s(beta (r - kl)))`` where desirable,
    ``undesirable_weight (1 - s(beta (kl - r)))`` where not. The paper's constant ``lambda_y`` in front is left out:
    it has no gradient.

    Args:
      kl: the reference point, see `kto_reference_point`; it never carries a gradient.
    """
    ratio = (policy - reference).astype(jnp.float32)
    distance = beta * (ratio - jax.lax.stop_gradient(kl))
    # 1 - s(x) = s(-x), which keeps its digits where s(x) rounds to 1.
    losses = jnp.where(
        is_desirable, desirable_weight * jax.nn.sigmoid(-distance), undesirable_weight * jax.nn.sigmoid(distance)
    )
    return LabelLosses(losses, jax.lax.stop_gradient(beta * ratio))


def kto_reference_point(policy_kl: Float[Array, " P"], ref_kl: Float[Array, " P"]) -> Float[Array, ""]:
    """``max(0, mean(policy_kl - ref_kl))``: KTO's estimate of KL(policy || reference), without gradient.

    Args:
      policy_kl, ref_kl: log-probs (sums) of `mismatched_completions` given the prompts, of the whole optimizer batch
        over all processes: a mean per micro-batch would be another, noisier number.
    """
    mean = jnp.mean((policy_kl - ref_kl).astype(jnp.float32))
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


def mismatched_completions(prompts: Sequence[Hashable]) -> Int[np.ndarray, " P"] | None:
    """Whose completion each row's prompt is paired with for `kto_reference_point`: index ``[P]`` into the batch.

    No row gets a completion of its own prompt. Rows are ordered by prompt (of first appearance) and each takes the
    completion that stands m places before its own, around the end, m being the rows of the most frequent prompt: so
    every completion is used once. Prompts that are all different give m = 1, TRL's rotation by one:
    (x1, y1), …, (xn, yn) -> (x1, yn), (x2, y1), …, (xn, yn-1). Where one prompt has more than half of the rows, its
    rows take the completions of the other prompts in turn, and some are used more than once.

    Args:
      prompts: what tells prompts apart, of the whole batch in order (token ids as bytes, say).

    Returns:
      None where all rows have one prompt, so that no completion belongs to another.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    if len(rows_of) < 2:
        return None
    order = np.array([row for rows in rows_of.values() for row in rows], np.int32)
    largest = max(rows_of.values(), key=len)
    partners = np.empty(len(order), np.int32)
    partners[order] = np.roll(order, len(largest))
    others = np.setdiff1d(order, largest)
    if len(largest) > len(others):
        partners[largest] = np.resize(others, len(largest))
    return partners


def bradley_terry_loss(
    chosen_scores: Float[Array, " P"],
    rejected_scores: Float[Array, " P"],
    margin: Float[Array, " P"] | None = None,
    *,
    center_rewards_coefficient: float = 0.0,
) -> Float[Array, " P"]:
    """``-log s(chosen - rejected - margin) + center_rewards_coefficient (chosen + rejected)²``, of each pair.

    Sources: InstructGPT arXiv:2203.02155; the margin is Llama 2's (arXiv:2307.09288), the centering term, which keeps
    scores around 0, that of arXiv:2312.09244.

    Args:
      margin: by how much the chosen score ought to be above the rejected one; None for 0.
    """
    difference = (chosen_scores - rejected_scores).astype(jnp.float32)
    losses = -jax.nn.log_sigmoid(difference if margin is None else difference - margin)
    if center_rewards_coefficient:
        losses = losses + center_rewards_coefficient * jnp.square(chosen_scores + rejected_scores)
    return losses


def preferred(chosen: Float[Array, " P"], rejected: Float[Array, " P"]) -> Float[Array, " P"]:
    """1 where the chosen completion's reward or score is above the other's, else 0: a tie is not right."""
    return (chosen > rejected).astype(jnp.float32)
