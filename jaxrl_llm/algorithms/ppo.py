"""PPO with a critic: generalised advantage estimation over the tokens the policy wrote, two clipped losses.

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lambda A_{t+1}          R_t = A_t + V_t
    policy: max(-A r_t, -A clip(r_t, 1-lo, 1+hi))             with A whitened over the batch's trained tokens
    critic: 0.5 max((v_t - R_t)^2, (clip(v_t, V_t - c, V_t + c) - R_t)^2)

arXiv:1707.06347; GAE arXiv:1506.02438; for language models arXiv:1909.08593 and arXiv:2203.02155, whose KL penalty in
the reward is `kl_in` ``reward`` with a fixed or adaptive weight. The critic is a model of its own (`critic.*`), or with
`shared_trunk` a value head on the policy, whose loss is then added to the policy's. A response cut at the token budget
is bootstrapped with the critic's value of the state it was cut in (`bootstrap_truncated`), a finished one with 0. What
differs: no KL unless `kl_coef` is set; gamma and lambda are 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import kl_controller, on_policy, policy_loss
from jaxrl_llm.algorithms.advantages import whiten
from jaxrl_llm.algorithms.gae import explained_variance, gae
from jaxrl_llm.algorithms.interface import CRITIC, Algorithm, Context, Objective, Role, Sequences
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.types import Rollouts, Rows, TokenOutputs, ValueOutputs


@dataclasses.dataclass(frozen=True)
class PPOOptions(on_policy.ClippedOptions):
    """Options of `algorithm` when its name is `ppo`."""

    gamma: float = option(1.0, "discount per token", low=0.0, high=1.0)
    lam: float = option(1.0, "GAE's lambda", low=0.0, high=1.0)
    whiten_advantages: bool = option(True, "to mean 0 and variance 1 over the trained tokens of the batch")
    value_clip: float = option(0.5, "a value may move so far from the one before the update; 0 = off", low=0.0)
    bootstrap_truncated: bool = option(
        True,
        "a response cut at the token budget ends in the critic's value of what would follow, beside its score; False "
        "takes it for finished: right where the reward scores what was cut as it is, for value and score then add up "
        "and, with gamma 1, a policy that never ends earns ever more",
    )
    shared_trunk: bool = option(False, "a value head on the policy in place of a critic of its own")
    value_coef: float = option(0.1, "weight of the value loss with shared_trunk", low=0.0)
    kl_controller: str = option("fixed", "the weight of a KL in the reward", choices=kl_controller.KL_CONTROLLERS)
    kl_target: float = option(0.1, "the KL per token that the adaptive controller aims at", above=0.0, unit="nats")
    kl_horizon: int = option(10_000, "how slowly it gets there", low=1, unit="samples")


def roles(options: PPOOptions) -> tuple[Role, ...]:
    shared = on_policy.roles(options)
    if options.shared_trunk:
        return (dataclasses.replace(shared[0], head="both"), *shared[1:])
    return (*shared, CRITIC)


def init(options: PPOOptions) -> dict[str, float]:
    return {"kl_coef": options.kl_coef}


def advantages(
    context: Context,
    rollouts: Rollouts,
    scores: on_policy.Scores,
    sequences: Sequences,
    *,
    policy: str = "policy",
    critic: str = "critic",
) -> list[np.ndarray]:
    """GAE; leaves the values and the returns in the sequences' extras, and the explained variance in their metrics.

    Args:
      policy, critic: names of the roles; with `shared_trunk` the policy has the values.
    """
    options = context.options
    role = policy if options.shared_trunk else critic
    values = context.values(role, dataclasses.replace(sequences, loss_mask=scores.written))
    found, returns = [], []
    for n, mask in enumerate(scores.written):
        cut = options.bootstrap_truncated and rollouts.finish_reasons[n] == "length"
        one, goal = gae(
            scores.token_rewards[n],
            values[n][:-1],
            mask,
            gamma=options.gamma,
            lam=options.lam,
            bootstrap_value=float(values[n][-1]) if cut else 0.0,
        )
        found.append(one)
        returns.append(goal)
    sequences.extras = {"values": [one[:-1] for one in values], "returns": returns}
    written = np.concatenate(scores.written) if scores.written else np.zeros(0, bool)
    if written.any():
        flat = np.concatenate(sequences.extras["values"]), np.concatenate(returns)
        sequences.metrics["critic/explained_variance"] = explained_variance(*flat, written)
        sequences.metrics["critic/return_mean"] = float(flat[1][written].mean())
    return whiten(found, sequences.loss_mask) if options.whiten_advantages else found


def prepare(context: Context, rollouts: Rollouts) -> Mapping[str, Sequences]:
    sequences, _ = on_policy.prepare(context, rollouts, advantages, learns=not warming_up(context))
    return trained(context, sequences, policy="policy", critic="critic")


def rests(options: PPOOptions, config: RunConfig, role: Role) -> int:
    """A policy beside a critic, while that learns alone."""
    return 0 if options.shared_trunk or role.section == "critic" else config.critic.warmup_steps


def warming_up(context: Context) -> bool:
    """Whether this is one of the first steps, in which the critic alone learns."""
    return context.step < context.config.critic.warmup_steps


def trained(context: Context, sequences: Sequences, *, policy: str, critic: str) -> dict[str, Sequences]:
    """Who learns from the sequences in this step: the critic alone in its first ones."""
    if context.options.shared_trunk:
        return {policy: sequences}
    if warming_up(context):
        return {critic: sequences}
    return {policy: sequences, critic: sequences}


def value_objective(options: PPOOptions, values: Any, rows: Rows) -> Objective:
    """The critic's loss, of the values that the rows' tokens have now."""
    mask = rows.loss_mask
    loss, clipped = policy_loss.value_loss(
        values, rows.extras["values"], rows.extras["returns"], cliprange_value=options.value_clip or math.inf
    )
    total = jnp.sum(rows.weights * jnp.where(mask, loss, 0.0))
    count = jnp.sum(mask, dtype=jnp.float32)
    return Objective(
        total,
        {"loss/value": total},
        {
            "critic/value_mean": (jnp.sum(jnp.where(mask, values, 0.0)), count),
            "critic/clip_fraction": (jnp.sum(clipped & mask, dtype=jnp.float32), count),
        },
        {},
    )


def critic_losses(options: PPOOptions, outputs: ValueOutputs, rows: Rows) -> Objective:
    return value_objective(options, outputs.values, rows)


def policy_losses(options: PPOOptions, outputs: TokenOutputs, rows: Rows) -> Objective:
    policy = on_policy.losses(options, outputs, rows, surrogate=on_policy.clipped)
    if not options.shared_trunk:
        return policy
    value = value_objective(options, outputs.values, rows)
    total = policy.total + options.value_coef * value.total
    return Objective(
        total,
        {**policy.weighted, **value.weighted, "loss/total": total},
        {**policy.counted, **value.counted},
        policy.maxima,
    )


def after_step(options: PPOOptions, memory: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
    if "kl/mean" not in metrics:
        return memory
    coefficient = kl_controller.next_kl_coef(
        memory["kl_coef"],
        metrics["kl/mean"],
        kl_controller=options.kl_controller,
        target_kl=options.kl_target,
        horizon=options.kl_horizon,
        n_steps=int(metrics.get("rollout/samples", 1)),
    )
    return {**memory, "kl_coef": coefficient}


def validate(options: PPOOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = on_policy.validate(options, config, name="ppo", min_samples=1)
    if options.kl_controller == "adaptive" and not (options.kl_coef > 0 and options.kl_in == "reward"):
        found.append(
            (
                "error",
                "algorithm.kl_controller='adaptive' steers a KL in the reward: set algorithm.kl_coef above 0 and "
                "algorithm.kl_in='reward', or the controller to 'fixed'.",
            )
        )
    samples = config.train_batch_size * config.rollout.samples_per_prompt
    if options.kl_controller == "adaptive" and kl_controller.ERROR_LIMIT * samples >= options.kl_horizon:
        found.append(
            (
                "error",
                f"algorithm.kl_horizon={options.kl_horizon} is too short for {samples} samples a step: set it to "
                f"several times {samples}.",
            )
        )
    if options.shared_trunk and (config.critic.path or config.critic.warmup_steps):
        found.append(
            (
                "error",
                "algorithm.shared_trunk=True makes no critic of its own, so critic.path and critic.warmup_steps mean "
                "nothing: clear them, or set shared_trunk=False.",
            )
        )
    return found


PPO: Algorithm = on_policy.algorithm(
    "ppo",
    PPOOptions,
    advantages,
    roles=roles,
    init=init,
    prepare=prepare,
    losses={"policy": policy_losses, "critic": critic_losses},
    after_step=after_step,
    rests=rests,
    validate=validate,
    extras=lambda options: ("values", "returns"),
)
