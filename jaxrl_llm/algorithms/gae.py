"""Generalised advantage estimation over the tokens that the policy wrote, on the host in float64.

    delta_t = r_t + gamma V_{t+1} - V_t            A_t = delta_t + gamma lam A_{t+1}            R_t = A_t + V_t

Schulman et al., arXiv:1506.02438. ``t + 1`` is the next token *that the policy wrote*: tool output and other tokens
that it only read are no steps, neither discount nor value of theirs enters (as in verl). After the last one stands 0
if the episode is over and V of the next state if it was cut.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float


def credit_rewards(rewards: Float[np.ndarray, " t"], mask: Bool[np.ndarray, " t"]) -> Float[np.ndarray, " t"]:
    """The same rewards in float64, each at the token that earned it.

    A reward on a token the policy did not write, such as a score on trailing tool output, belongs to the last token
    before it that the policy did write, and is added there. One before the first such token was earned by nothing
    and is dropped.
    """
    credited = np.where(mask, rewards, 0).astype(np.float64)
    earner = np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))
    stray = ~mask & (earner >= 0)
    np.add.at(credited, earner[stray], rewards[stray].astype(np.float64))
    return credited


def gae(
    rewards: Float[np.ndarray, " t"],
    values: Float[np.ndarray, " t"],
    mask: Bool[np.ndarray, " t"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_value: float = 0.0,
) -> tuple[Float[np.ndarray, " t"], Float[np.ndarray, " t"]]:
    """Advantages and returns of one sequence, float32, 0 where `mask` is False. See the module's formula.

    Args:
      rewards: token rewards; those off the mask are moved by `credit_rewards`.
      values: ``values[t]`` is the critic's value of the state that token t was chosen in, so it is read off the
        hidden state that predicts token t, not off token t's own. Where `mask` is False it does not matter.
      bootstrap_value: the value of the state after the last token: 0 where the episode ended (an end-of-sequence
        token), the critic's value of the *next* state where it was cut (a token budget).
    """
    steps = np.flatnonzero(mask)
    earned = credit_rewards(rewards, mask)[steps]
    state_values = values[steps].astype(np.float64)
    advantages = np.zeros(len(steps), np.float64)
    next_value, following = float(bootstrap_value), 0.0
    for step in range(len(steps) - 1, -1, -1):
        following = earned[step] + gamma * next_value - state_values[step] + gamma * lam * following
        advantages[step] = following
        next_value = state_values[step]
    spread = np.zeros((2, len(mask)), np.float32)
    spread[0, steps] = advantages
    spread[1, steps] = advantages + state_values
    return spread[0], spread[1]


def explained_variance(
    values: Float[np.ndarray, " n"], returns: Float[np.ndarray, " n"], mask: Bool[np.ndarray, " n"]
) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the tokens where `mask` is True.

    1 is a perfect critic, 0 one that is no better than a constant, below 0 a worse one. Returns that are all equal
    (or fewer than two) explain nothing: 0, so that the metric is always finite.
    """
    wanted = returns[mask].astype(np.float64)
    if len(wanted) < 2 or wanted.max() == wanted.min():
        return 0.0
    return float(1.0 - np.var(wanted - values[mask].astype(np.float64)) / np.var(wanted))
