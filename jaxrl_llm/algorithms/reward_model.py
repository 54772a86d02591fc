"""Trains a reward model on pairs: the chosen completion's score above the rejected one's (Bradley-Terry).

    loss = -log s(score(chosen) - score(rejected) - margin) + center_rewards_coefficient (sum of both)^2

arXiv:2203.02155; margin arXiv:2307.09288; centering arXiv:2312.09244. The score of a completion is the value head's at
its last token, the end of sequence. The model, exported as a Hugging Face sequence classifier with one label, says so,
and `reward_model.path` of another run then gives the same scores; whoever else uses it ends texts with that token. The
model starts from `model.path` with a new head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import pairs, preference
from jaxrl_llm.algorithms.dpo import collect
from jaxrl_llm.algorithms.interface import Algorithm, Context, Objective, Role, Sequences
from jaxrl_llm.config import option
from jaxrl_llm.types import Example, Rollouts, Rows, ValueOutputs

REWARD_MODEL = Role("reward_model", head="values", trained=True, settings="policy")

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class RewardModelOptions:
    """Options of `algorithm` when its name is `reward_model`."""

    center_rewards_coefficient: float = option(0.0, "pulls the scores of a pair to a sum of 0 (0.01 is usual)", low=0.0)
    margin_column: str = option(
        AUTO,
        "the column with by how much the chosen score ought to be higher; auto = `margin`, as in TRL, where a row has "
        "one; empty = none",
    )


def prepare(context: Context, rollouts: Rollouts) -> Sequences:
    sequences = pairs.sequences_of_pairs(rollouts, np.arange(len(rollouts)).reshape(-1, 2))
    margins = [_margin(context, example) for example in rollouts.examples]
    sequences.extras["margin"] = np.repeat(np.asarray(margins, np.float32), 2)
    sequences.extras["last"] = [_last(mask) for mask in sequences.loss_mask]
    return sequences


def _margin(context: Context, example: Example) -> float:
    column = context.options.margin_column
    if column == AUTO:
        column = "" if example.metadata.get("margin") is None else "margin"
    meaning = "algorithm.margin_column names a column of numbers."
    return pairs.number_of(context, example, column, meaning) if column else 0.0


def _last(mask: np.ndarray) -> np.ndarray:
    """1 at the last token, where the score is read."""
    return (np.arange(len(mask)) == len(mask) - 1).astype(np.float32)


def losses(options: RewardModelOptions, outputs: ValueOutputs, rows: Rows) -> Objective:
    """See the module's formula."""
    chosen, rejected = pairs.both(outputs.ends * rows.extras["last"], rows)
    pair = preference.bradley_terry_loss(
        chosen,
        rejected,
        rows.extras["margin"].reshape(-1),
        center_rewards_coefficient=options.center_rewards_coefficient,
    )
    total = jnp.sum(rows.weights.reshape(-1) * pair)
    return Objective(
        total,
        {"loss/total": total},
        {
            "rewards/accuracies": pairs.mean_of_pairs(preference.preferred(chosen, rejected), rows),
            "rewards/chosen": pairs.mean_of_pairs(chosen, rows),
            "rewards/rejected": pairs.mean_of_pairs(rejected, rows),
            "rewards/margins": pairs.mean_of_pairs(chosen - rejected, rows),
        },
        {},
    )


def evaluate(context: Context, examples: Sequence[Example]) -> dict[str, float]:
    """The share of held-out pairs whose chosen completion has the higher score; a tie is wrong."""
    rollouts = pairs.rollouts_of_pairs(examples)
    sequences = pairs.sequences_of_pairs(rollouts, np.arange(len(rollouts)).reshape(-1, 2))
    scores = np.array([values[-1] for values in context.values("reward_model", sequences)])
    margins = scores[0::2] - scores[1::2]
    return {
        "eval/accuracy": float((margins > 0).mean()),
        "eval/rewards/margins": float(margins.mean()),
        "eval/rows": float(len(examples)),
    }


REWARD_MODEL_TRAINING = Algorithm(
    name="reward_model",
    options=RewardModelOptions,
    roles=lambda options: (REWARD_MODEL,),
    collect=collect,
    prepare=prepare,
    losses=losses,
    loss_aggregation=lambda options: pairs.AGGREGATION,
    extras=lambda options: ("chosen", "margin", "last"),
    generates=False,
    data="preference",
    compares=True,
    evaluate=evaluate,
)
