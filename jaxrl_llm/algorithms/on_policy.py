"""What the algorithms that learn from their own samples share: masks, KL, penalties, the loss, and its metrics.

An algorithm is then its advantages, its token loss and its options; `interface` begins with a complete one.

    loss = sum_t w_t [ c_t l_t + kl_coef KL_t - entropy_coef H_t ] / denominator

with the token loss l (of ratio ``r = exp(actor - old)`` and advantage A), the rollout correction's weight c (1 where it
is off), and w and the denominator by `loss_aggregation`. With one update per rollout the old policy is the current one,
so the ratio is exactly 1 and no extra forward is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms import aggregation, decoder_difference, policy_loss, rollout_correction
from jaxrl_llm.algorithms.advantages import kl_shaped_rewards
from jaxrl_llm.algorithms.completions import joined
from jaxrl_llm.algorithms.interface import POLICY, REFERENCE, Algorithm, Context, Objective, Role, Sequences
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.types import Example, Rollouts, Rows, TokenOutputs


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that every on-policy algorithm has."""

    loss_aggregation: str = option("token-mean", "how token losses become one", choices=aggregation.MODES)
    kl_coef: float = option(0.0, "weight of the KL to the frozen reference; 0 = no reference model", low=0.0)
    kl_estimator: str = option("k3", "KL estimator", choices=policy_loss.KL_ESTIMATORS)
    kl_in: str = option("loss", "where the KL goes; never both", choices=("loss", "reward"))
    entropy_coef: float = option(0.0, "weight of the entropy bonus", low=0.0)
    mask_truncated: bool = option(False, "leave responses cut at the token budget out of the loss")
    overlong_buffer_tokens: int = option(
        0, "the last tokens of the budget over which a penalty ramps up (DAPO); 0 = off", low=0, unit="tokens"
    )
    overlong_penalty: float = option(1.0, "penalty at the full budget", low=0.0)
    on_policy: bool = option(
        True,
        "with one update per rollout take the current log-probs as the old ones (ratio 1) and skip a forward",
    )
    rollout_is: str = option(
        "none",
        "importance weights old / sampler on the token losses, for a sampler that is older or of lower precision than "
        "the policy; see rollout_correction.py",
        choices=("none", *rollout_correction.ROLLOUT_IS),
    )
    rollout_is_threshold: float = option(2.0, "the weights are cut here", above=0.0, infinite=True)
    rollout_rs: str = option(
        "none",
        "what tokens or sequences are left out by, where sampler and policy differ too much",
        choices=("none", *rollout_correction.ROLLOUT_RS),
    )
    rollout_rs_threshold: float = option(2.0, "the bound of rollout_rs: a ratio for k1, else the figure", above=0.0)
    rollout_rs_threshold_lower: float = option(0.0, "the lower bound of a ratio; 0 = 1 / rollout_rs_threshold", low=0.0)
    rollout_token_veto_threshold: float = option(
        0.0, "leave a sequence out that has a token of a smaller ratio (1e-4 is usual); 0 = off", low=0.0, below=1.0
    )
    rollout_metrics: bool = option(
        False,
        "tell how far the sampler is from the policy (rollout_corr/…) also without a correction; always on where "
        "rollout.weight_dtype is 8 bits",
    )


@dataclasses.dataclass(frozen=True)
class ClippedOptions(Options):
    """With those of PPO's clipped loss."""

    clip_low: float = option(0.2, "the ratio is clipped below at 1 - clip_low", low=0.0, high=1.0)
    clip_high: float = option(0.2, "the ratio is clipped above at 1 + clip_high", low=0.0)
    dual_clip: float = option(3.0, "bound on the ratio where the advantage is negative; 0 = off", low=0.0)


@dataclasses.dataclass(frozen=True)
class GroupOptions(Options):
    """With those of group-relative advantages."""

    advantage_normalization: str = option(
        "std", "divide the centred reward by the group's standard deviation, or not", choices=("std", "none")
    )


class Scores(NamedTuple):
    """What the samples are worth.

    Attributes:
      rewards: ``[N]`` float32, penalties for length in, KL out; NaN where not scored.
      total: the same with the KL of `kl_in` ``reward`` taken off.
      token_rewards: N arrays ``[t]``: the reward on the last written token, minus the KL at each; 0 elsewhere.
      written: N masks of the tokens that the policy wrote in scored samples. One that is left out of the loss (a
        truncated one) is still in its group's mean.
    """

    rewards: np.ndarray
    total: np.ndarray
    token_rewards: list[np.ndarray]
    written: list[np.ndarray]


Advantages = Callable[[Context, Rollouts, Scores, Sequences], Any]
"""One number for each sample, or an array ``[t]`` of its tokens."""


class TokenLoss(NamedTuple):
    """A token loss and what is told of it; all ``[R, T]``.

    Attributes:
      high, low: where the upper and the lower clip stop the gradient.
    """

    loss: Float[Array, "R T"]
    ratio: Float[Array, "R T"]
    high: Bool[Array, "R T"]
    low: Bool[Array, "R T"]


Surrogate = Callable[[Any, Float[Array, "R T"], Rows], TokenLoss]
"""``surrogate(options, actor_logprobs, rows)``; reads old log-probs and advantages from the rows."""


def collect(context: Context, examples: Sequence[Example]) -> Rollouts:
    return context.rollouts(examples)


def single_update(options: Options, config: RunConfig, num_prompts: int) -> bool:
    """Whether these rollouts are used for exactly one optimizer update, so that old and current policy agree."""
    return options.on_policy and config.training.epochs == 1 and num_prompts <= config.training.mini_batch_size


def overlong_penalty(length: np.ndarray, max_tokens: int, buffer_tokens: int, factor: float) -> np.ndarray:
    """DAPO's soft overlong penalty (arXiv:2503.14476): 0 up to ``max - buffer`` tokens, then linearly to -factor."""
    excess = length - (max_tokens - buffer_tokens)
    return np.clip(-excess / buffer_tokens, -1.0, 0.0) * factor


def penalised(context: Context, rollouts: Rollouts) -> np.ndarray:
    """The rewards ``[N]`` with the penalty for overlong responses, where it is on; NaN where not scored."""
    options, rewards = context.options, rollouts.rewards.astype(np.float32)
    if not options.overlong_buffer_tokens:
        return rewards
    lengths = np.array([len(response) for response in rollouts.responses])
    penalty = overlong_penalty(
        lengths, context.config.rollout.max_new_tokens, options.overlong_buffer_tokens, options.overlong_penalty
    )
    return rewards + penalty.astype(np.float32)


def trained_sequences(rollouts: Rollouts, keep: np.ndarray) -> Sequences:
    """Prompts and responses as sequences; the responses of the samples in `keep` are trained, EOS included."""
    tokens, masks, sampled = [], [], []
    for n, response in enumerate(rollouts.responses):
        prompt = rollouts.examples[rollouts.group[n]].prompt_ids
        ids, mask = joined(prompt, response, np.full(len(response), keep[n]))
        tokens.append(ids)
        masks.append(mask)
        logprobs = np.zeros(len(ids), np.float32)
        if rollouts.sampler_logprobs is not None:
            logprobs[len(prompt) :] = rollouts.sampler_logprobs[n]
        sampled.append(np.where(mask, logprobs, 0).astype(np.float32))
    return Sequences(tokens, masks, rollouts.group.astype(np.int32), sampler_logprobs=sampled)


def prepare(
    context: Context,
    rollouts: Rollouts,
    advantages: Advantages,
    *,
    policy: str = "policy",
    reference: str = "reference",
    group: np.ndarray | None = None,
    learns: bool = True,
) -> tuple[Sequences, Scores]:
    """Sequences with advantages and the log-probs that the loss compares with, and the samples' scores.

    Args:
      policy, reference: names of the roles that wrote the samples and that the KL is measured to.
      group: ``[N]``, the prompts that mini-batches hold whole, where they are not the rollouts'.
      learns: False in a step in which the policy is not updated: its log-probs are then computed here, to be compared
        with the decoder's.
    """
    options, config = context.options, context.config
    rewards = penalised(context, rollouts)
    scored = ~np.isnan(rewards)
    truncated = np.array([reason == "length" for reason in rollouts.finish_reasons])
    keep = scored & ~(truncated & options.mask_truncated)
    sequences = trained_sequences(rollouts, keep)
    written = trained_sequences(rollouts, scored).loss_mask
    if group is not None:
        sequences.group = group.astype(np.int32)

    on_policy = single_update(options, config, len(np.unique(sequences.group)))
    kl_in_reward = options.kl_coef > 0 and options.kl_in == "reward"
    # A KL in the reward counts for every scored sample: one that is left out of the loss still is in its group's mean.
    compared = dataclasses.replace(sequences, loss_mask=written) if kl_in_reward else sequences
    if not on_policy or kl_in_reward or not learns:
        sequences.old_logprobs = context.logprobs(policy, compared)
    if not learns:
        assert sequences.old_logprobs is not None
        sequences.metrics |= decoder_difference.of_sequences(sequences, sequences.old_logprobs)
    if options.kl_coef > 0:
        sequences.ref_logprobs = context.logprobs(reference, compared)

    scores = _scores(context, sequences, rewards, written, kl_in_reward)
    per_sample = advantages(context, rollouts, scores, sequences)
    sequences.advantages = [
        np.where(mask, advantage, 0).astype(np.float32)
        for mask, advantage in zip(sequences.loss_mask, per_sample, strict=True)
    ]
    zero = [not np.any(advantage) for advantage in sequences.advantages]
    sequences.metrics["advantage/zero_fraction"] = float(np.mean(zero)) if zero else 0.0
    if on_policy:
        sequences.old_logprobs = None  # the update takes the current log-probs in their place
    return sequences, scores


def _scores(
    context: Context, sequences: Sequences, rewards: np.ndarray, written: list[np.ndarray], kl_in_reward: bool
) -> Scores:
    coefficient = context.memory.get("kl_coef", context.options.kl_coef) if kl_in_reward else 0.0
    shaped, kl_sum, count = [], 0.0, 0
    for n, mask in enumerate(written):
        kl = np.zeros(len(mask), np.float32)
        if kl_in_reward:
            assert sequences.old_logprobs is not None and sequences.ref_logprobs is not None
            old, reference = sequences.old_logprobs[n], sequences.ref_logprobs[n]
            kl = policy_loss.kl_penalty(old, reference, context.options.kl_estimator)
            kl_sum, count = kl_sum + float(kl[mask].sum()), count + int(mask.sum())
        shaped.append(kl_shaped_rewards(float(np.nan_to_num(rewards[n])), kl, mask, coefficient))
    if kl_in_reward:
        sequences.metrics["kl/mean"] = kl_sum / max(count, 1)
        sequences.metrics["kl/coef"] = coefficient
    total = rewards
    if kl_in_reward:
        total = np.where(np.isnan(rewards), np.nan, [one.sum() for one in shaped]).astype(np.float32)
    return Scores(rewards, total, shaped, written)


def losses(options: Options, outputs: TokenOutputs, rows: Rows, *, surrogate: Surrogate) -> Objective:
    """See the module's formula."""
    mask, weights = rows.loss_mask, rows.weights
    actor, old = jnp.where(mask, outputs.logprobs, 0.0), rows.old_logprobs
    token = surrogate(options, actor, rows)
    count = jnp.sum(mask, dtype=jnp.float32)

    def mean(values: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(mask, values, 0.0), dtype=jnp.float32), count

    corrected, counted_correction, maxima_correction = _corrected(options, rows, old, token.loss)
    policy = jnp.sum(weights * corrected)
    counted_difference, maxima_difference = decoder_difference.of_rows(rows)
    total = policy
    counted = {
        "entropy/mean": mean(outputs.entropy),
        "policy/clip_fraction_high": mean(token.high),
        "policy/clip_fraction_low": mean(token.low),
        "policy/approx_kl": mean(policy_loss.kl_penalty(old, actor, "k1")),
        "policy/ratio_mean": mean(token.ratio),
        **counted_difference,
        **counted_correction,
    }
    if options.kl_coef > 0 and options.kl_in == "loss":
        kl = jnp.where(mask, policy_loss.kl_penalty(actor, rows.ref_logprobs, options.kl_estimator), 0.0)
        total = total + options.kl_coef * jnp.sum(weights * kl)
        counted["kl/mean"] = mean(kl)
    if options.entropy_coef > 0:
        total = total - options.entropy_coef * jnp.sum(weights * jnp.where(mask, outputs.entropy, 0.0))
    maxima = {**maxima_difference, **maxima_correction}
    return Objective(total, {"loss/policy": policy, "loss/total": total}, counted, maxima)


def _corrected(
    options: Options, rows: Rows, old: Float[Array, "R T"], loss: Float[Array, "R T"]
) -> tuple[Float[Array, "R T"], dict[str, tuple[Array, Array]], dict[str, Array]]:
    """The token losses after the rollout correction, 0 where masked, and its metrics."""
    mask, policies = rows.loss_mask, (old, rows.sampler_logprobs, rows.loss_mask, rows.segment_ids)
    loss = jnp.where(mask, loss, 0.0)
    counted, maxima = {}, {}
    active = (options.rollout_is, options.rollout_rs) != ("none", "none") or options.rollout_token_veto_threshold
    if active or options.rollout_metrics:
        counted, maxima = rollout_correction.offpolicy_metrics(*policies)
    if options.rollout_is != "none":
        threshold = options.rollout_is_threshold
        importance = rollout_correction.rollout_is_weights(
            *policies, rollout_is=options.rollout_is, rollout_is_threshold=threshold
        )
        loss = loss * importance
        more, largest = rollout_correction.weight_metrics(importance, mask, threshold)
        counted, maxima = counted | more, maxima | largest
    kept = mask
    if options.rollout_rs != "none":
        kept &= rollout_correction.rollout_rs_mask(
            *policies,
            rollout_rs=options.rollout_rs,
            rollout_rs_threshold=options.rollout_rs_threshold,
            rollout_rs_threshold_lower=options.rollout_rs_threshold_lower or None,
        )
    if options.rollout_token_veto_threshold:
        kept &= rollout_correction.rollout_token_veto_mask(
            *policies, rollout_token_veto_threshold=options.rollout_token_veto_threshold
        )
    if kept is not mask:
        counted |= rollout_correction.rejection_metrics(kept, mask, rows.segment_ids)
        loss = jnp.where(kept, loss, 0.0)
    return loss, counted, maxima


def clipped(options: Any, actor: Float[Array, "R T"], rows: Rows) -> TokenLoss:
    """PPO's clipped surrogate, for options `clip_low`, `clip_high` and `dual_clip`."""
    loss, ratio = policy_loss.clipped_surrogate(
        actor,
        rows.old_logprobs,
        rows.advantages,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    high, low = policy_loss.clip_fractions(ratio, rows.advantages, options.clip_low, options.clip_high)
    return TokenLoss(loss, ratio, high, low)


def likelihood(options: Any, actor: Float[Array, "R T"], rows: Rows) -> TokenLoss:
    """``-A r`` without a clip: REINFORCE where the ratio is 1."""
    ratio = jnp.exp(jnp.clip(actor - rows.old_logprobs, -policy_loss.LOG_RATIO_LIMIT, policy_loss.LOG_RATIO_LIMIT))
    nowhere = jnp.zeros(ratio.shape, bool)
    return TokenLoss(-rows.advantages * ratio, ratio, nowhere, nowhere)


def roles(options: Options) -> tuple[Role, ...]:
    return (POLICY, REFERENCE) if options.kl_coef > 0 else (POLICY,)


def validate(options: Any, config: RunConfig, *, name: str, min_samples: int) -> list[tuple[str, str]]:
    found = []
    samples = config.rollout.samples_per_prompt
    if samples < min_samples:
        found.append(
            (
                "error",
                f"rollout.samples_per_prompt={samples}: {name} compares the samples of one "
                "prompt with each other and needs at least 2; a group of one has no advantage. Set it to 4 or more.",
            )
        )
    dual_clip = getattr(options, "dual_clip", 0.0)
    if dual_clip and dual_clip <= 1:
        found.append(
            (
                "error",
                f"algorithm.dual_clip={dual_clip}: the dual clip bounds the ratio from above where the "
                "advantage is negative, so it must be greater than 1 (3.0 is usual), or 0 to switch it off.",
            )
        )
    if options.overlong_buffer_tokens > config.rollout.max_new_tokens:
        found.append(
            (
                "error",
                f"algorithm.overlong_buffer_tokens={options.overlong_buffer_tokens}: the penalty's ramp cannot be "
                f"longer than a response (rollout.max_new_tokens={config.rollout.max_new_tokens}).",
            )
        )
    upper = options.rollout_rs_threshold
    lower = options.rollout_rs_threshold_lower or 1 / upper
    if options.rollout_rs.endswith("k1") and lower >= upper:
        found.append(
            (
                "error",
                f"algorithm.rollout_rs_threshold={upper}: {options.rollout_rs} keeps ratios from {lower:g} to {upper:g}"
                ", which is nothing. Set it above 1, or algorithm.rollout_rs_threshold_lower below it.",
            )
        )
    if options.kl_coef > 0 and options.kl_in == "loss" and options.kl_estimator == "k1":
        found.append(
            (
                "warning",
                "algorithm.kl_estimator='k1' in the loss: its expected gradient is zero, so it holds nothing near the "
                "reference. Use 'k3' or 'k2', or kl_in='reward'.",
            )
        )
    return found


def algorithm(
    name: str,
    options: type,
    advantages: Advantages,
    *,
    surrogate: Surrogate = clipped,
    min_samples: int = 2,
    **fields: Any,
) -> Algorithm:
    """An on-policy algorithm.

    Args:
      options: a frozen dataclass that extends `Options`.
      surrogate: its token loss; `clipped` needs the options clip_low, clip_high and dual_clip.
      min_samples: of a prompt, below which it has nothing to compare.
      fields: of `Algorithm`, in place of the shared ones.
    """
    shared: dict[str, Any] = {
        "collect": collect,
        "prepare": lambda context, rollouts: prepare(context, rollouts, advantages)[0],
        "losses": functools.partial(losses, surrogate=surrogate),
        "roles": roles,
        "validate": functools.partial(validate, name=name, min_samples=min_samples),
        "loss_aggregation": lambda options: options.loss_aggregation,
    }
    return Algorithm(name=name, options=options, **(shared | fields))
