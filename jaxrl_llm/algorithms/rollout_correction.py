"""Corrections for samples of another policy than the one that is trained: `sampler_logprobs` against `old_logprobs`.

The decoder's numbers differ a little from the trainer's, and an asynchronous rollout is from older parameters. With the
log-ratio ``d_t = old_t - sampler_t`` of each token:

- importance weights ``min(exp(d), threshold)`` on the token losses, by token or by sequence (`rollout_is`);
- rejection of tokens or sequences that are too far off (`rollout_rs`), which leaves the mask and so the loss;
- a veto on sequences with a token that the trainer finds all but impossible (`rollout_token_veto_threshold`).

Names follow verl's rollout correction ("When Speed Kills Stability", richardli.xyz/rl-collapse; truncated weights:
fengyao.notion.site/off-policy-rl). All of it runs inside the jit on ``[R, T]``, takes d as 0 where masked and clamps it
to ±20 before `exp`, and gives no gradient to anything. The batch's denominator is counted before the update: what is
rejected here stays in it, with a loss of 0, where verl leaves it out.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.algorithms.policy_loss import LOG_RATIO_LIMIT
from jaxrl_llm.algorithms.segments import first_tokens, segment_max, segment_mean, segment_sum

ROLLOUT_IS = ("token", "sequence", "geometric")
ROLLOUT_RS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)

Counted = dict[str, tuple[Array, Array]]
Maxima = dict[str, Array]


def _log_ratio(old_logprobs: Array, sampler_logprobs: Array, mask: Array) -> Array:
    return jax.lax.stop_gradient(jnp.where(mask, old_logprobs - sampler_logprobs, 0.0))


def _bounded(log_ratio: Array) -> Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def rollout_is_weights(
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    rollout_is: str = "token",
    rollout_is_threshold: float = 2.0,
) -> Float[Array, "R T"]:
    """Truncated importance weights to multiply the token losses with; 0 where masked.

    | `rollout_is` | weight of a token, before ``min(., rollout_is_threshold)`` |
    |---|---|
    | `token` | ``exp(d_t)``: biased, low variance |
    | `sequence` | ``exp(sum d)`` of its sequence: unbiased but for the truncation, high variance |
    | `geometric` | ``exp(mean d)`` of its sequence: does not grow with the length |

    An infinite threshold truncates nothing.
    """
    difference = _log_ratio(old_logprobs, sampler_logprobs, mask)
    if rollout_is == "sequence":
        difference = segment_sum(difference, segment_ids)
    elif rollout_is == "geometric":
        difference = segment_mean(difference, mask, segment_ids)
    elif rollout_is != "token":
        raise ValueError(f"rollout_is is {rollout_is!r}; it is one of {', '.join(ROLLOUT_IS)}")
    return jnp.where(mask, jnp.minimum(jnp.exp(_bounded(difference)), rollout_is_threshold), 0.0)


def rollout_rs_mask(
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    rollout_rs: str,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float | None = None,
) -> Bool[Array, "R T"]:
    """What rejection leaves of the mask. The bounds themselves are kept.

    Of each token ``k1 = d``, ``k2 = d^2 / 2`` or ``k3 = exp(d) - 1 - d``; of it the token's own (`token_*`) or the sum,
    mean or largest over its sequence (`seq_sum_*`, `seq_mean_*`, `seq_max_*`), which keeps or drops whole sequences.
    Kept where k2 or k3 is at most `rollout_rs_threshold`; and with k1, where the ratio ``exp(k1)`` is within
    ``[rollout_rs_threshold_lower, rollout_rs_threshold]``, the lower bound being 1 / the upper one unless given. (verl
    bounds the inverse ratio, the same with that default.) `token_k1`, `seq_sum_k1` and `seq_mean_k1` are what verl
    called token, sequence and geometric.
    """
    if rollout_rs not in ROLLOUT_RS:
        raise ValueError(f"rollout_rs is {rollout_rs!r}; it is one of {', '.join(ROLLOUT_RS)}")
    level, estimator = rollout_rs.rsplit("_", 1)
    difference = _bounded(_log_ratio(old_logprobs, sampler_logprobs, mask))
    statistic = difference
    if estimator == "k2":
        statistic = 0.5 * jnp.square(difference)
    elif estimator == "k3":
        statistic = jnp.exp(difference) - 1 - difference
    if level == "seq_sum":
        statistic = segment_sum(statistic, segment_ids)
    elif level == "seq_mean":
        statistic = segment_mean(statistic, mask, segment_ids)
    elif level == "seq_max":
        statistic = segment_max(statistic, mask, segment_ids)
    if estimator != "k1":
        return mask & (statistic <= rollout_rs_threshold)
    lower = 1 / rollout_rs_threshold if rollout_rs_threshold_lower is None else rollout_rs_threshold_lower
    return mask & (statistic >= math.log(lower)) & (statistic <= math.log(rollout_rs_threshold))


def rollout_token_veto_mask(
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    rollout_token_veto_threshold: float,
) -> Bool[Array, "R T"]:
    """The mask without the sequences that have a token of ratio ``exp(d)`` below the threshold (1e-4 is usual).

    The trainer holds such a token for impossible: it is not a sample of its policy at all, whatever its weight.
    """
    difference = _log_ratio(old_logprobs, sampler_logprobs, mask)
    lowest = -segment_max(-difference, mask, segment_ids)
    return mask & (lowest >= math.log(rollout_token_veto_threshold))


def offpolicy_metrics(
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
) -> tuple[Counted, Maxima]:
    """How far the sampler's policy is from the trained one, as (sum, count) pairs and maxima.

    By token: `kl` and `k3_kl`, both estimates of KL(sampler || old) in nats, and `chi2_token` = ``E[r^2] - 1`` with
    ``r = exp(d)``. By sequence: `chi2_seq`, the same of the product of its ratios; the perplexities `training_ppl` and
    `rollout_ppl`, their log-difference `log_ppl_diff` (above 0: the trainer is less sure), its size and its maximum
    `log_ppl_abs_diff_max`, and `ppl_ratio`, the mean of training over rollout perplexity.
    """
    difference = _log_ratio(old_logprobs, sampler_logprobs, mask)
    bounded = _bounded(difference)
    first = first_tokens(mask, segment_ids)
    training = _bounded(-segment_mean(jax.lax.stop_gradient(old_logprobs), mask, segment_ids))
    rollout = _bounded(-segment_mean(jax.lax.stop_gradient(sampler_logprobs), mask, segment_ids))
    by_token = {
        "kl": -difference,
        "k3_kl": jnp.exp(bounded) - 1 - bounded,
        "chi2_token": jnp.exp(2 * bounded) - 1,
    }
    by_sequence = {
        "chi2_seq": jnp.exp(2 * _bounded(segment_sum(difference, segment_ids))) - 1,
        "training_ppl": jnp.exp(training),
        "rollout_ppl": jnp.exp(rollout),
        "log_ppl_diff": training - rollout,
        "log_ppl_abs_diff": jnp.abs(training - rollout),
        "ppl_ratio": jnp.exp(training - rollout),
    }
    counted = {f"rollout_corr/{name}": _pair(values, mask) for name, values in by_token.items()}
    counted |= {f"rollout_corr/{name}": _pair(values, first) for name, values in by_sequence.items()}
    largest = jnp.max(jnp.abs(training - rollout))
    return counted, {"rollout_corr/log_ppl_abs_diff_max": largest}


def weight_metrics(
    weights: Float[Array, "R T"], mask: Bool[Array, "R T"], rollout_is_threshold: float
) -> tuple[Counted, Maxima]:
    """Of `rollout_is_weights`, over tokens: mean, mean square, the fraction that was truncated, and the largest.

    The effective sample size per token is the square of the first over the second.
    """
    counted = {
        "rollout_is_mean": weights,
        "rollout_is_squared_mean": jnp.square(weights),
        "rollout_is_ratio_fraction_high": (weights >= rollout_is_threshold).astype(weights.dtype),
    }
    return (
        {f"rollout_corr/{name}": _pair(values, mask) for name, values in counted.items()},
        {"rollout_corr/rollout_is_max": jnp.max(jnp.where(mask, weights, 0.0))},
    )


def rejection_metrics(kept: Bool[Array, "R T"], mask: Bool[Array, "R T"], segment_ids: Int[Array, "R T"]) -> Counted:
    """The fraction of tokens of `mask` that are not in `kept`, and of sequences that lost any token."""
    rejected = mask & ~kept
    some = segment_sum(rejected.astype(jnp.float32), segment_ids)
    return {
        "rollout_corr/rollout_rs_masked_fraction": _pair(rejected.astype(jnp.float32), mask),
        "rollout_corr/rollout_rs_seq_masked_fraction": _pair(
            (some > 0).astype(jnp.float32), first_tokens(mask, segment_ids)
        ),
    }


def _pair(values: Array, where: Array) -> tuple[Array, Array]:
    return jnp.sum(jnp.where(where, values, 0.0)), jnp.sum(where, dtype=values.dtype)
