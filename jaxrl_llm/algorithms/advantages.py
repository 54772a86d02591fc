"""Advantages from rewards, on the host in float64 and returned in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.algorithms.gae import credit_rewards

Ragged = Sequence[np.ndarray]
Masks = Sequence[np.ndarray]


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
    for members in _scored_groups(rewards64, group):
        scores = rewards64[members]
        if scores.max() == scores.min():
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


def rloo_advantages(rewards: Float[np.ndarray, " N"], group: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Reward minus the mean reward of the *other* samples of the prompt.

    ``A_i = r_i - sum_{j != i} r_j / (k - 1) = k / (k - 1) (r_i - mean)`` over the k scored samples (RLOO,
    arXiv:2402.14740). The baseline does not hold the sample itself, so the gradient stays unbiased. The paper treats
    the whole response as one action; here all its tokens get the same advantage, which is the same gradient.

    NaN (not scored) takes no part and has advantage 0, as has the only scored sample of a group.
    """
    rewards64 = rewards.astype(np.float64)
    advantages = np.zeros(len(rewards), np.float64)
    for members in _scored_groups(rewards64, group):
        scores = rewards64[members]
        if scores.max() > scores.min():
            advantages[members] = (scores - scores.mean()) * len(scores) / (len(scores) - 1)
    return advantages.astype(np.float32)


def remax_advantages(
    rewards: Float[np.ndarray, " N"], greedy_rewards: Float[np.ndarray, " B"], group: Int[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """Reward minus the reward of the greedy (temperature 0) response to the same prompt: ReMax, arXiv:2310.10505.

    Args:
      greedy_rewards: by prompt, so that ``greedy_rewards[group[n]]`` is sample n's baseline. Where it or the sample's
        own reward is NaN (not scored) the advantage is 0.
    """
    difference = rewards.astype(np.float64) - greedy_rewards.astype(np.float64)[group]
    return np.where(np.isnan(difference), 0.0, difference).astype(np.float32)


def pass_at_k_advantages(
    rewards: Float[np.ndarray, " N"], group: Int[np.ndarray, " N"], *, k: int, epsilon: float = 1e-6
) -> Float[np.ndarray, " N"]:
    """Advantages that train the best of k samples instead of each one: Pass@k training, arXiv:2508.10751.

    Of the n scored samples of a prompt take every subset of k; its reward is its largest one. With the mean m and the
    (population) standard deviation s of these C(n, k) rewards, a subset's advantage is ``(max - m) / (s + epsilon)``,
    and a sample's is the mean over the C(n-1, k-1) subsets it is in. No subset is drawn: with the rewards in ascending
    order ``r_1 <= ... <= r_n`` the maximum is r_j in C(j-1, k-1) of all subsets, and of those with sample i it is
    r_i in C(i-1, k-1) and r_j, j > i, in C(j-2, k-2). For rewards of 0 and 1 with c ones this is the paper's closed
    form, ``m = 1 - C(n-c, k) / C(n, k)``, ``s = sqrt(m (1 - m))``, ``A(1) = (1 - m) / s`` and
    ``A(0) = (1 - m - C(n-c-1, k-1) / C(n-1, k-1)) / s``.

    k = 1 is `group_advantages` with the population standard deviation. A group has advantage 0 where every subset has
    the same maximum: among others if it has at most k scored samples. NaN (not scored) takes no part. verl's
    `grpo_passk` is another one (arXiv:2503.19595): the best sample's lead over the second, 0 for all others.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it is at least 1")
    rewards64 = rewards.astype(np.float64)
    advantages = np.zeros(len(rewards), np.float64)
    for members in _scored_groups(rewards64, group):
        count = len(members)
        order = members[np.argsort(rewards64[members], kind="stable")]
        best = rewards64[order]
        if count < k or best[k - 1] == best[-1]:  # no subset; or every subset holds one of the largest
            continue
        share = np.array([math.comb(j, k - 1) / math.comb(count, k) for j in range(count)])
        mean = share @ best
        deviation = math.sqrt(share @ (best - mean) ** 2)
        containing = math.comb(count - 1, k - 1)
        for i in range(count):
            value = best[i] * (math.comb(i, k - 1) / containing)
            if k > 1:
                value += sum(best[j] * (math.comb(j - 1, k - 2) / containing) for j in range(i + 1, count))
            advantages[order[i]] = (value - mean) / (deviation + epsilon)
    return advantages.astype(np.float32)


def whiten(values: Ragged, mask: Masks, *, shift_mean: bool = True) -> list[np.ndarray]:
    """``(x - mean) / sqrt(var + 1e-8)`` over every valid token of the whole batch; 0 where the mask is False.

    The variance is unbiased (1 / (n - 1)), as in verl's `masked_whiten`; 0 for a single valid token, and values that
    are all equal are centred to exactly 0. Without `shift_mean` the mean is added back: the scale changes only.

    Args:
      values, mask: N arrays ``[t]``. All of them, from every process, or the result depends on the split.
    """
    valid = np.concatenate([one[keep].astype(np.float64) for one, keep in zip(values, mask, strict=True)] or [[]])
    if not len(valid):
        return [np.zeros(len(one), np.float32) for one in values]
    mean = valid.mean() if valid.max() > valid.min() else valid[0]
    variance = np.square(valid - mean).sum() / max(len(valid) - 1, 1)
    offset = 0.0 if shift_mean else mean
    return [
        np.where(keep, (one.astype(np.float64) - mean) / np.sqrt(variance + 1e-8) + offset, 0).astype(np.float32)
        for one, keep in zip(values, mask, strict=True)
    ]


def reinforce_plus_plus_returns(rewards: Ragged, mask: Masks, *, gamma: float = 1.0) -> list[np.ndarray]:
    """Rewards-to-go of every token the policy wrote: ``R_t = r_t + gamma R_{t+1}``; 0 where the mask is False.

    REINFORCE++ (arXiv:2501.03262) whitens them over the whole batch for its advantages:
    ``whiten(reinforce_plus_plus_returns(...), mask)``. There is no critic and no group: one sample a prompt is enough.
    ``t + 1`` is the next token the policy wrote, so tool output neither discounts nor ends a return (in verl it ends
    it), and a reward on it is `gae.credit_rewards`'.

    Args:
      rewards: N arrays ``[t]`` of token rewards, usually `kl_shaped_rewards`.
    """
    returns = []
    for one, keep in zip(rewards, mask, strict=True):
        earned = credit_rewards(one, keep)
        running = 0.0
        for token in np.flatnonzero(keep)[::-1]:
            running = earned[token] + gamma * running
            earned[token] = running
        returns.append(earned.astype(np.float32))
    return returns


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[np.ndarray, " N"], group: Int[np.ndarray, " N"], mask: Masks
) -> list[np.ndarray]:
    """REINFORCE++ with the group's mean as its baseline (arXiv:2501.03262, verl's `reinforce_plus_plus_baseline`).

    The reward minus the mean of the prompt's samples, on every token of the sample, whitened over the whole batch.
    The standard deviation is the batch's, so a prompt with nearly equal rewards is not blown up as in GRPO.

    Args:
      rewards: of whole responses; NaN (not scored) has advantage 0 and its tokens don't count, whatever the mask.
    """
    centred = group_advantages(rewards, group, normalize_std=False)
    valid = [keep & ~np.isnan(reward) for keep, reward in zip(mask, rewards, strict=True)]
    return whiten([np.full(len(keep), value) for keep, value in zip(valid, centred, strict=True)], valid)


REWARD_COMBINATIONS = ("sum", "gdpo")


def combine_rewards(
    components: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    group: Int[np.ndarray, " N"],
    trained_tokens: Int[np.ndarray, " N"],
    *,
    mode: str = "sum",
    normalize_std: bool = True,
) -> Float[np.ndarray, " N"]:
    """One advantage per sample out of several rewards.

    ``sum``: the weighted sum of the rewards, then `group_advantages`. ``gdpo`` (arXiv:2601.05242): each reward
    becomes an advantage of its own within its group, the weighted sum of these is whitened over the batch. Rewards of
    different scale then keep their say, and combinations with equal sums stay apart. The whitening is over trained
    tokens, as verl does it and as everything here is whitened; the paper's is over samples, the same where responses
    are equally long.

    Args:
      components: ``[N]`` unweighted by name; NaN where a reward does not apply, which is left out of that sample's
        sum. A sample that none applies to is not scored and has advantage 0.
      weights: by the same names.
      trained_tokens: of each sample. One that has none does not count in the whitening and has advantage 0.
    """
    if mode not in REWARD_COMBINATIONS:
        raise ValueError(f"reward_combination is {mode!r}; it is one of {', '.join(REWARD_COMBINATIONS)}")
    applies = np.any([~np.isnan(values) for values in components.values()], axis=0)
    total = np.zeros(len(group), np.float64)
    for name, values in components.items():
        if mode == "gdpo":
            values = group_advantages(values, group, normalize_std=normalize_std)
        total += weights[name] * np.where(np.isnan(values), 0.0, values.astype(np.float64))
    if mode == "sum":
        return group_advantages(np.where(applies, total, np.nan), group, normalize_std=normalize_std)
    lengths = np.where(applies, trained_tokens, 0)
    whitened = whiten(
        [np.full(length, value) for length, value in zip(lengths, total, strict=True)],
        [np.ones(length, bool) for length in lengths],
    )
    return np.array([values[0] if len(values) else 0.0 for values in whitened], np.float32)


def _scored_groups(rewards: np.ndarray, group: np.ndarray) -> Iterator[np.ndarray]:
    """The indices of the scored samples of each group that has any."""
    for index in np.unique(group):
        members = np.flatnonzero((group == index) & ~np.isnan(rewards))
        if len(members):
            yield members
