"""DPO and its kin: learns from pairs of a chosen and a rejected completion, without rewards or sampling.

    d = (log pi(chosen) - log ref(chosen)) - (log pi(rejected) - log ref(rejected))
    sigmoid: -log s(beta d)      hinge: max(0, 1 - beta d)      ipo: (d - 1 / (2 beta))^2, of token means

arXiv:2305.18290; hinge arXiv:2309.06657; IPO arXiv:2310.12036; conservative and robust DPO by `label_smoothing`
(arXiv:2403.00409). `online_dpo` (arXiv:2402.04792) draws the pair itself: of a prompt's samples the one with the
highest reward is chosen and the one with the lowest rejected, and prompts whose rewards are equal are left out.
Formulas and names are TRL's. What differs: IPO compares token means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import decoder_difference, pairs, preference
from jaxrl_llm.algorithms.interface import POLICY, REFERENCE, Algorithm, Context, Objective, Role, Sequences
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.types import Example, Rollouts, Rows, TokenOutputs

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


@dataclasses.dataclass(frozen=True)
class OnlineDPOOptions:
    """Options of `algorithm` when its name is `online_dpo`."""

    beta: float = option(0.1, "strength of the pull to the reference (ipo: its tau)", above=0.0)
    loss_type: str = option("sigmoid", "which loss of the pair", choices=preference.DPO_LOSSES)
    label_smoothing: float = option(
        0.0, "the share of pairs that is supposed to be the wrong way round (sigmoid, robust)", low=0.0, below=0.5
    )


@dataclasses.dataclass(frozen=True)
class DPOOptions(OnlineDPOOptions):
    """Options of `algorithm` when its name is `dpo`."""

    precompute_ref_log_probs: bool = option(
        False, "read the reference's log-probs from the columns ref_chosen_logps and ref_rejected_logps (sums)"
    )


def roles(options: DPOOptions) -> tuple[Role, ...]:
    return (POLICY,) if options.precompute_ref_log_probs else (POLICY, REFERENCE)


def collect(context: Context, examples: Sequence[Example]) -> Rollouts:
    return pairs.rollouts_of_pairs(examples)


def prepare(context: Context, rollouts: Rollouts) -> Sequences:
    """Pairs with the reference's log-probs of both completions."""
    sequences = pairs.sequences_of_pairs(rollouts, np.arange(len(rollouts)).reshape(-1, 2))
    if not context.options.precompute_ref_log_probs:
        return _with_reference(sequences, _reference_of(context, sequences))
    meaning = (
        "with algorithm.precompute_ref_log_probs=True it must be the sum of the reference's log-probs over that "
        "completion's tokens, the end of sequence included. Set the option to False to compute it."
    )
    columns = [pairs.number_of(context, example, name, meaning) for example in rollouts.examples for name in COLUMNS]
    reference = np.asarray(columns, np.float32)
    if context.options.loss_type == "ipo":
        reference = reference / np.array([mask.sum() for mask in sequences.loss_mask], np.float32)
    return _with_reference(sequences, reference)


def _reference_of(context: Context, sequences: Sequences) -> np.ndarray:
    """The reference's log-prob of each sequence: the sum over its tokens, for IPO the mean."""
    values = context.logprobs("reference", sequences)
    return pairs.per_sequence(values, sequences.loss_mask, mean=context.options.loss_type == "ipo")


def _with_reference(sequences: Sequences, reference: np.ndarray) -> Sequences:
    assert sequences.partner is not None
    sequences.extras["reference"] = reference
    sequences.extras["other_reference"] = reference[sequences.partner]
    return sequences


def collect_online(context: Context, examples: Sequence[Example]) -> Rollouts:
    return context.rollouts(examples)


def best_and_worst(rollouts: Rollouts) -> np.ndarray:
    """``[P, 2]``: of each prompt with unequal rewards its best and its worst sample, the first of equal ones."""
    found = []
    for index in range(len(rollouts.examples)):
        members = np.flatnonzero((rollouts.group == index) & ~np.isnan(rollouts.rewards))
        scores = rollouts.rewards[members]
        if len(members) and scores.max() > scores.min():
            found.append((members[scores.argmax()], members[scores.argmin()]))
    return np.array(found, np.int64).reshape(-1, 2)


def prepare_online(context: Context, rollouts: Rollouts) -> Sequences:
    chosen = best_and_worst(rollouts)
    sequences = pairs.sequences_of_pairs(rollouts, chosen)
    sequences.metrics["dpo/pairs_fraction"] = len(chosen) / max(len(rollouts.examples), 1)
    training = context.config.training
    if training.epochs > 1 or len(chosen) > training.mini_batch_size:
        sequences.old_logprobs = context.logprobs("policy", sequences)  # later updates are of another policy
    return _with_reference(sequences, _reference_of(context, sequences))


def losses(options: OnlineDPOOptions, outputs: TokenOutputs, rows: Rows) -> Objective:
    """See the module's formula."""
    chosen, rejected = pairs.both(outputs.logprobs, rows, mean=options.loss_type == "ipo")
    own, other = (rows.extras[name].reshape(-1) for name in ("reference", "other_reference"))
    is_chosen = rows.extras["chosen"].reshape(-1) > 0
    pair = preference.dpo_loss(
        chosen,
        rejected,
        jnp.where(is_chosen, own, other),
        jnp.where(is_chosen, other, own),
        beta=options.beta,
        loss_type=options.loss_type,
        label_smoothing=options.label_smoothing,
    )
    total = jnp.sum(rows.weights.reshape(-1) * pair.losses)
    entropy = jnp.where(rows.loss_mask, outputs.entropy, 0.0)
    return Objective(
        total,
        {"loss/total": total, "loss/policy": total},
        {
            "rewards/chosen": pairs.mean_of_pairs(pair.chosen_rewards, rows),
            "rewards/rejected": pairs.mean_of_pairs(pair.rejected_rewards, rows),
            "rewards/margins": pairs.mean_of_pairs(pair.margins, rows),
            "rewards/accuracies": pairs.mean_of_pairs(
                preference.preferred(pair.chosen_rewards, pair.rejected_rewards), rows
            ),
            "logps/chosen": pairs.mean_of_pairs(chosen, rows),
            "logps/rejected": pairs.mean_of_pairs(rejected, rows),
            "entropy/mean": (jnp.sum(entropy), jnp.sum(rows.loss_mask, dtype=jnp.float32)),
        },
        {},
    )


def losses_online(options: OnlineDPOOptions, outputs: TokenOutputs, rows: Rows) -> Objective:
    """The same, and how far the decoder is from the policy that it samples for."""
    pair = losses(options, outputs, rows)
    counted, maxima = decoder_difference.of_rows(rows)
    return pair._replace(counted={**pair.counted, **counted}, maxima={**pair.maxima, **maxima})


def validate(options: OnlineDPOOptions, config: RunConfig) -> list[tuple[str, str]]:
    if options.label_smoothing and options.loss_type not in preference.SMOOTHED:
        return [
            (
                "error",
                f"algorithm.label_smoothing={options.label_smoothing}: the loss {options.loss_type!r} has none; set it "
                f"to 0, or algorithm.loss_type to {' or '.join(preference.SMOOTHED)}.",
            )
        ]
    return []


def validate_offline(options: DPOOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = validate(options, config)
    if options.precompute_ref_log_probs and config.data.overlong_prompts.startswith("truncate"):
        found.append(
            (
                "error",
                f"algorithm.precompute_ref_log_probs=True with data.overlong_prompts={config.data.overlong_prompts!r}: "
                "the given sums are of whole prompts and completions and would be compared with cut ones. Set "
                "overlong_prompts to 'filter' or 'error', or compute the log-probs.",
            )
        )
    return found


def validate_online(options: OnlineDPOOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = validate(options, config)
    if config.rollout.samples_per_prompt < 2:
        found.append(
            (
                "error",
                f"rollout.samples_per_prompt={config.rollout.samples_per_prompt}: online_dpo compares two samples of a "
                "prompt. Set it to 2 or more.",
            )
        )
    return found


_SHARED = {
    "loss_aggregation": lambda options: pairs.AGGREGATION,
    "extras": lambda options: ("chosen", "reference", "other_reference"),
    "compares": True,
}

DPO = Algorithm(
    name="dpo",
    options=DPOOptions,
    roles=roles,
    collect=collect,
    prepare=prepare,
    losses=losses,
    validate=validate_offline,
    generates=False,
    data="preference",
    **_SHARED,
)

ONLINE_DPO = Algorithm(
    name="online_dpo",
    options=OnlineDPOOptions,
    roles=lambda options: (POLICY, REFERENCE),
    collect=collect_online,
    prepare=prepare_online,
    losses=losses_online,
    validate=validate_online,
    **_SHARED,
)
