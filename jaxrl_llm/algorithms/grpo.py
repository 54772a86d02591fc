"""GRPO: group-relative advantages, PPO's clipped loss, no critic.

    A_i = (r_i - mean(r_group)) / (std(r_group) + 1e-6)          one number for all tokens of sample i
    loss = sum_t w_t [ max(-A r_t, -A clip(r_t, 1-lo, 1+hi)) + kl_coef KL_t - entropy_coef H_t ] / denominator

DeepSeekMath, arXiv:2402.03300. What differs from the paper: the loss averages over tokens of the whole batch by
default (`loss_aggregation`; the paper's is `seq-mean-token-mean`), no KL term unless `kl_coef` is set, and a dual
clip at 3. With one update per rollout the old policy is the current one, so the ratio is exactly 1 and no
extra forward is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import aggregation, policy_loss
from jaxrl_llm.algorithms.advantages import group_advantages, kl_shaped_rewards
from jaxrl_llm.algorithms.interface import Algorithm, Context, Objective, Sequences
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.types import Example, Rollouts, Rows, TokenOutputs


@dataclasses.dataclass(frozen=True)
class GRPOOptions:
    """Options of `algorithm` when its name is `grpo`."""

    advantage_normalization: str = option(
        "std", "divide the centred reward by the group's standard deviation, or not", choices=("std", "none")
    )
    clip_low: float = option(0.2, "the ratio is clipped below at 1 - clip_low", low=0.0, high=1.0)
    clip_high: float = option(0.2, "the ratio is clipped above at 1 + clip_high", low=0.0)
    dual_clip: float = option(3.0, "bound on the ratio where the advantage is negative; 0 = off", low=0.0)
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


def roles(options: GRPOOptions) -> tuple[str, ...]:
    return ("reference",) if options.kl_coef > 0 else ()


def collect(context: Context, examples: Sequence[Example]) -> Rollouts:
    return context.rollouts(examples)


def single_update(options: GRPOOptions, config: RunConfig, num_prompts: int) -> bool:
    """Whether these rollouts are used for exactly one optimizer update, so that old and current policy agree."""
    return options.on_policy and config.training.epochs == 1 and num_prompts <= config.training.mini_batch_size


def overlong_penalty(length: np.ndarray, max_tokens: int, buffer_tokens: int, factor: float) -> np.ndarray:
    """DAPO's soft overlong penalty (arXiv:2503.14476): 0 up to ``max - buffer`` tokens, then linearly to -factor."""
    excess = length - (max_tokens - buffer_tokens)
    return np.clip(-excess / buffer_tokens, -1.0, 0.0) * factor


def prepare(context: Context, rollouts: Rollouts) -> Sequences:
    """Advantages and the log-probs that the loss compares with."""
    options, config = context.options, context.config
    lengths = np.array([len(response) for response in rollouts.responses])
    rewards = rollouts.rewards.astype(np.float32)
    scored = ~np.isnan(rewards)
    truncated = np.array([reason == "length" for reason in rollouts.finish_reasons])
    keep = scored & ~(truncated & options.mask_truncated)

    tokens, masks, written, sampled = [], [], [], []
    for n, response in enumerate(rollouts.responses):
        prompt = rollouts.examples[rollouts.group[n]].prompt_ids
        tokens.append(np.concatenate([prompt, response]).astype(np.int32))
        response_mask = np.arange(len(tokens[-1])) >= len(prompt)
        mask = response_mask & keep[n]
        masks.append(mask)
        written.append(response_mask & scored[n])
        logprobs = np.zeros(len(tokens[-1]), np.float32)
        if rollouts.sampler_logprobs is not None:
            logprobs[len(prompt) :] = rollouts.sampler_logprobs[n]
        sampled.append(np.where(mask, logprobs, 0).astype(np.float32))
    sequences = Sequences(tokens, masks, rollouts.group.astype(np.int32), sampler_logprobs=sampled)

    on_policy = single_update(options, config, len(rollouts.examples))
    kl_in_reward = options.kl_coef > 0 and options.kl_in == "reward"
    # A KL in the reward counts for every scored sample: one that is left out of the loss still is in its group's mean.
    compared = dataclasses.replace(sequences, loss_mask=written) if kl_in_reward else sequences
    if not on_policy or kl_in_reward:
        sequences.old_logprobs = context.logprobs("policy", compared)
    if options.kl_coef > 0:
        sequences.ref_logprobs = context.logprobs("reference", compared)

    if options.overlong_buffer_tokens:
        rewards = rewards + overlong_penalty(
            lengths, config.rollout.max_new_tokens, options.overlong_buffer_tokens, options.overlong_penalty
        ).astype(np.float32)
    if kl_in_reward:
        assert sequences.old_logprobs is not None and sequences.ref_logprobs is not None
        shaped, kl_sum, count = [], 0.0, 0
        for n in range(len(rollouts)):
            old, reference = sequences.old_logprobs[n], sequences.ref_logprobs[n]
            kl = policy_loss.kl_penalty(old, reference, options.kl_estimator)
            shaped.append(kl_shaped_rewards(float(rewards[n]), kl, written[n], options.kl_coef).sum())
            kl_sum, count = kl_sum + float(kl[written[n]].sum()), count + int(written[n].sum())
        rewards = np.where(scored, np.array(shaped, np.float32), np.nan).astype(np.float32)
        sequences.metrics["kl/mean"] = kl_sum / max(count, 1)

    per_sample = group_advantages(rewards, rollouts.group, normalize_std=options.advantage_normalization == "std")
    sequences.advantages = [
        np.where(mask, advantage, 0).astype(np.float32) for mask, advantage in zip(masks, per_sample, strict=True)
    ]
    sequences.metrics["advantage/zero_fraction"] = float((per_sample == 0).mean()) if len(per_sample) else 0.0
    if on_policy:
        sequences.old_logprobs = None  # the update takes the current log-probs in their place
    return sequences


def losses(options: GRPOOptions, outputs: TokenOutputs, rows: Rows) -> Objective:
    """See the module's formula."""
    mask = rows.loss_mask
    actor = jnp.where(mask, outputs.logprobs, 0.0)
    old = rows.old_logprobs
    token_loss, ratio = policy_loss.clipped_surrogate(
        actor,
        old,
        rows.advantages,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    weights = rows.weights
    policy = jnp.sum(weights * token_loss)
    count = jnp.sum(mask, dtype=jnp.float32)
    high, low = policy_loss.clip_fractions(ratio, rows.advantages, options.clip_low, options.clip_high)
    difference = jnp.where(mask, jnp.abs(old - rows.sampler_logprobs), 0.0)
    entropy = jnp.where(mask, outputs.entropy, 0.0)
    total = policy
    counted = {
        "entropy/mean": (jnp.sum(entropy), count),
        "policy/clip_fraction_high": (jnp.sum(high & mask, dtype=jnp.float32), count),
        "policy/clip_fraction_low": (jnp.sum(low & mask, dtype=jnp.float32), count),
        "policy/approx_kl": (jnp.sum(jnp.where(mask, policy_loss.kl_penalty(old, actor, "k1"), 0.0)), count),
        "policy/ratio_mean": (jnp.sum(jnp.where(mask, ratio, 0.0)), count),
        "rollout/logprob_diff_mean": (jnp.sum(difference), count),
    }
    if options.kl_coef > 0 and options.kl_in == "loss":
        kl = jnp.where(mask, policy_loss.kl_penalty(actor, rows.ref_logprobs, options.kl_estimator), 0.0)
        total = total + options.kl_coef * jnp.sum(weights * kl)
        counted["kl/mean"] = (jnp.sum(kl), count)
    if options.entropy_coef > 0:
        total = total - options.entropy_coef * jnp.sum(weights * entropy)
    return Objective(
        total,
        {"loss/policy": policy, "loss/total": total},
        counted,
        {"rollout/logprob_diff_max": jnp.max(difference)},
    )


def validate(options: GRPOOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = []
    if config.rollout.samples_per_prompt < 2:
        found.append(
            (
                "error",
                f"rollout.samples_per_prompt={config.rollout.samples_per_prompt}: grpo compares the samples of one "
                "prompt with each other and needs at least 2; a group of one has no advantage. Set it to 4 or more.",
            )
        )
    if options.dual_clip and options.dual_clip <= 1:
        found.append(
            (
                "error",
                f"algorithm.dual_clip={options.dual_clip}: the dual clip bounds the ratio from above where the "
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
    return found


GRPO = Algorithm(
    name="grpo",
    options=GRPOOptions,
    roles=roles,
    init=lambda options: {},
    collect=collect,
    prepare=prepare,
    losses=losses,
    after_step=lambda options, memory, metrics: memory,
    validate=validate,
    loss_aggregation=lambda options: options.loss_aggregation,
)
