"""Advantages from rewards, on the host in float64 and returned in float32."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def group_advantages(
    rewards: Float[np.ndarray, " N"],
    group: Int[np.ndarray, " N"],
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> Float[np.ndarray, " N"]:
    """Advantage of each sample against the other samples of its prompt.

    ``A = (r - mean) / (std + epsilon)`` with the unbiased standard deviation (GRPO, arXiv:2402.03300), or
    ``A = r - mean`` without `normalize_std` (Dr. GRPO, arXiv:2503.20783).

    A reward that is NaN (not scored) takes no part: its advantage is 0 and the others' statistics leave it
    out. A group whose scored rewards are all equal, or that has only one, has exactly zero advantage:
    otherwise rounding of the mean, divided by a standard deviation that is rounding too, would be a signal.
    """
    rewards64 = rewards.astype(np.float64)
    advantages = np.zeros(len(rewards), np.float64)
    for index in np.unique(group):
        members = np.flatnonzero((group == index) & ~np.isnan(rewards64))
        scores = rewards64[members]
        if len(scores) < 2 or scores.max() == scores.min():
            continue
        centred = scores - scores.mean()
        advantages[members] = centred / (scores.std(ddof=1) + epsilon) if normalize_std else centred
    return advantages.astype(np.float32)


def kl_shaped_rewards(
    score: float, kl: Float[np.ndarray, " t"], mask: np.ndarray, kl_coef: float
) -> Float[np.ndarray, " t"]:
    """Token rewards ``-kl_coef * kl[t]``, with the score added at the last trained token; 0 where masked.

    With the penalty here it must not be in the loss too (the configuration refuses both).
    """
    rewards = np.where(mask, -kl_coef * kl, 0.0)
    trained = np.flatnonzero(mask)
    if len(trained):
        rewards[trained[-1]] += score
    return rewards.astype(np.float32)
