"""On-policy distillation: the policy writes, the teacher's distribution at each token it wrote is what it learns.

    loss = sum_t w_t D(pi(. | s_t), teacher(. | s_t)) / denominator       D: reverse KL, forward KL, or generalised JSD

arXiv:2306.13649 (GKD, with all samples from the policy). The divergence is that of whole distributions, or with `top_k`
of the teacher's likeliest tokens and the rest as one; it is computed in chunks, no array of tokens times vocabulary
exists. Gradients go through the policy's distribution alone, not through the sampling. No reward is needed; one that is
given is told.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import aggregation, decoder_difference, on_policy
from jaxrl_llm.algorithms.interface import POLICY, TEACHER, Algorithm, Context, Divergence, Objective, Sequences
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.types import Rollouts, Rows, TokenOutputs


@dataclasses.dataclass(frozen=True)
class DistillationOptions:
    """Options of `algorithm` when its name is `distillation`."""

    loss_aggregation: str = option("token-mean", "how token losses become one", choices=aggregation.MODES)
    beta: float = option(
        1.0, "1 is the reverse KL(policy || teacher), 0 the forward one, between a Jensen-Shannon", low=0.0, high=1.0
    )
    top_k: int = option(0, "compare so many of the teacher's likeliest tokens, and the rest as one; 0 = all", low=0)


def prepare(context: Context, rollouts: Rollouts) -> Sequences:
    sequences = on_policy.trained_sequences(rollouts, np.ones(len(rollouts), bool))
    training = context.config.training
    if training.epochs > 1 or len(rollouts.examples) > training.mini_batch_size:
        sequences.old_logprobs = context.logprobs("policy", sequences)  # later updates are of another policy
    return sequences


def losses(options: DistillationOptions, outputs: TokenOutputs, rows: Rows) -> Objective:
    assert outputs.divergence is not None, "the algorithm asks for it"
    mask = rows.loss_mask
    divergence = jnp.where(mask, outputs.divergence, 0.0)
    total = jnp.sum(rows.weights * divergence)
    count = jnp.sum(mask, dtype=jnp.float32)
    counted_difference, maxima_difference = decoder_difference.of_rows(rows)
    return Objective(
        total,
        {"loss/total": total, "loss/policy": total},
        {
            "distillation/divergence": (jnp.sum(divergence), count),
            "entropy/mean": (jnp.sum(jnp.where(mask, outputs.entropy, 0.0)), count),
            **counted_difference,
        },
        maxima_difference,
    )


def validate(options: DistillationOptions, config: RunConfig) -> list[tuple[str, str]]:
    if config.teacher.path:
        return []
    return [
        (
            "error",
            "teacher.path is empty, and distillation learns from a teacher: give a model that reads the policy's "
            "tokens (one of its family).",
        )
    ]


DISTILLATION = Algorithm(
    name="distillation",
    options=DistillationOptions,
    roles=lambda options: (POLICY, TEACHER),
    collect=on_policy.collect,
    prepare=prepare,
    losses=losses,
    validate=validate,
    loss_aggregation=lambda options: options.loss_aggregation,
    divergence=lambda options: Divergence("teacher", options.beta, options.top_k),
    needs_rewards=False,
)
