"""KTO: learns from completions that are each labelled desirable or not; no pairs.

    r = log pi(completion) - log ref(completion)     z = max(0, mean over mismatched completions of log pi - log ref)
    desirable: w_d (1 - s(beta (r - z)))             undesirable: w_u (1 - s(beta (z - r)))

arXiv:2402.01306. z, the reference point, is measured on completions put to prompts that are not theirs, over the whole
batch and before its update, and carries no gradient; formulas and names are TRL's. What differs: TRL measures z on each
device's micro-batch, here it is one number for the batch, so that the result depends on no split. That needs one update
per batch, which the configuration checks. TRL takes the next row's completion also where that row has the same prompt;
here no row gets a completion of its own prompt, and a batch that holds one prompt only, which shuffling can bring,
keeps the z of the batch before it (0 at first).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import pairs, preference
from jaxrl_llm.algorithms.completions import joined
from jaxrl_llm.algorithms.interface import POLICY, REFERENCE, Algorithm, Context, Objective, Sequences
from jaxrl_llm.algorithms.segments import first_tokens, segment_sum
from jaxrl_llm.algorithms.sft import collect
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Rollouts, Rows, TokenOutputs

POINT = "kl/reference_point"
"""The metric, and what is kept of it from one batch to the next."""


@dataclasses.dataclass(frozen=True)
class KTOOptions:
    """Options of `algorithm` when its name is `kto`."""

    beta: float = option(0.1, "strength of the pull to the reference", above=0.0)
    desirable_weight: float = option(1.0, "weight of desirable completions", low=0.0)
    undesirable_weight: float = option(1.0, "weight of the others", low=0.0)


def prepare(context: Context, rollouts: Rollouts) -> Sequences:
    """Labelled sequences with the reference's log-probs and the batch's reference point.

    Raises:
      UserError: more examples than one update takes.
    """
    size = context.config.training.mini_batch_size
    if len(rollouts) > size:
        raise UserError(
            f"A step was given {len(rollouts)} examples, and kto measures its reference point once, before its one "
            f"update of train_batch_size={size}. Give at most so many, or raise it."
        )
    sequences = _sequences(rollouts, np.arange(len(rollouts)))
    reference = pairs.per_sequence(context.logprobs("reference", sequences), sequences.loss_mask)
    labels = np.array([1.0 if example.label else -1.0 for example in rollouts.examples], np.float32)
    point = _reference_point(context, rollouts)
    sequences.extras = {
        "label": labels,
        "reference": reference,
        "kl": np.full(len(labels), point, np.float32),
    }
    sequences.metrics[POINT] = point
    return sequences


def _reference_point(context: Context, rollouts: Rollouts) -> float:
    """See the module's text."""
    order = preference.mismatched_completions([example.prompt_ids.tobytes() for example in rollouts.examples])
    if order is None:
        return context.memory.get(POINT, 0.0)
    mismatched = _sequences(rollouts, order)
    policy, reference = (
        pairs.per_sequence(context.logprobs(role, mismatched), mismatched.loss_mask) for role in ("policy", "reference")
    )
    return float(preference.kto_reference_point(jnp.asarray(policy), jnp.asarray(reference)))


def _sequences(rollouts: Rollouts, completions: np.ndarray) -> Sequences:
    """Each prompt with the completion of the row that is named for it."""
    found = [
        joined(example.prompt_ids, rollouts.responses[n])
        for example, n in zip(rollouts.examples, completions, strict=True)
    ]
    return Sequences([ids for ids, _ in found], [mask for _, mask in found], np.arange(len(found), dtype=np.int32))


def losses(options: KTOOptions, outputs: TokenOutputs, rows: Rows) -> Objective:
    """See the module's formula."""
    mask = rows.loss_mask
    policy = segment_sum(jnp.where(mask, outputs.logprobs, 0.0), rows.segment_ids)
    desirable = rows.extras["label"] > 0
    # The same number at every trained token of the batch.
    point = jnp.max(rows.extras["kl"])
    one = preference.kto_losses(
        policy.reshape(-1),
        rows.extras["reference"].reshape(-1),
        desirable.reshape(-1),
        point,
        beta=options.beta,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
    )
    total = jnp.sum(rows.weights.reshape(-1) * one.losses)
    first = first_tokens(mask, rows.segment_ids)
    rewards = one.rewards.reshape(mask.shape)

    def mean(values: jnp.ndarray, where: jnp.ndarray) -> tuple[jnp.ndarray, jnp.ndarray]:
        return jnp.sum(jnp.where(where, values, 0.0)), jnp.sum(where, dtype=jnp.float32)

    return Objective(
        total,
        {"loss/total": total, "loss/policy": total},
        {
            "rewards/chosen": mean(rewards, first & desirable),
            "rewards/rejected": mean(rewards, first & ~desirable),
            "logps/mean": mean(policy, first),
            "entropy/mean": mean(outputs.entropy, mask),
        },
        {},
    )


def validate(options: KTOOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = []
    if config.training.epochs > 1 or config.training.mini_batch_size not in (0, config.train_batch_size):
        found.append(
            (
                "error",
                f"training.epochs={config.training.epochs} and "
                f"training.mini_batch_size={config.training.mini_batch_size}: kto measures its reference point once a "
                "batch, before its one update. Set epochs to 1 and mini_batch_size to 0, and train_batch_size to the "
                "size of an update.",
            )
        )
    if config.train_batch_size < 2:
        found.append(
            (
                "error",
                f"train_batch_size={config.train_batch_size}: kto's reference point is measured on completions put to "
                "other prompts, so a batch needs 2 or more (32 is usual).",
            )
        )
    return found


KTO = Algorithm(
    name="kto",
    options=KTOOptions,
    roles=lambda options: (POLICY, REFERENCE),
    collect=collect,
    prepare=prepare,
    losses=losses,
    init=lambda options: {POINT: 0.0},
    after_step=lambda options, memory, metrics: {POINT: metrics[POINT]},
    validate=validate,
    loss_aggregation=lambda options: pairs.AGGREGATION,
    extras=lambda options: ("label", "reference", "kl"),
    generates=False,
    data="label",
)
