"""Supervised fine-tuning: maximum likelihood of the completion tokens.

    loss = -sum_t w_t log p(token_t | tokens_<t) / denominator

Goes through the same tuple and trainer as the on-policy algorithms, without generation; prompts are not trained on,
nor the other roles' turns in a chat with several of the assistant's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import aggregation
from jaxrl_llm.algorithms.completions import joined
from jaxrl_llm.algorithms.interface import Algorithm, Context, Objective, Sequences
from jaxrl_llm.config import option
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Example, Rollouts, Rows, TokenOutputs


@dataclasses.dataclass(frozen=True)
class SFTOptions:
    """Options of `algorithm` when its name is `sft`."""

    loss_aggregation: str = option("token-mean", "how token losses become one", choices=aggregation.MODES)


def collect(context: Context, examples: Sequence[Example]) -> Rollouts:
    """The data's own completions as rollouts: one a prompt, nothing sampled, nothing scored."""
    for example in examples:
        if example.response_ids is None:
            raise UserError(
                f"data.train={context.config.data.train!r}: row {example.row} has no completion to learn from. "
                "sft reads the columns prompt and completion, or messages that end with the assistant's."
            )
    responses = [example.response_ids for example in examples if example.response_ids is not None]
    return Rollouts(
        examples=examples,
        group=np.arange(len(examples), dtype=np.int32),
        responses=responses,
        sampler_logprobs=None,
        texts=[""] * len(examples),
        finish_reasons=["stop"] * len(examples),
        rewards=np.full(len(examples), np.nan, np.float32),
    )


def prepare(context: Context, rollouts: Rollouts) -> Sequences:
    found = []
    for n, response in enumerate(rollouts.responses):
        example = rollouts.examples[rollouts.group[n]]
        found.append(joined(example.prompt_ids, response, example.response_mask))
    return Sequences([ids for ids, _ in found], [mask for _, mask in found], rollouts.group)


def losses(options: SFTOptions, outputs: TokenOutputs, rows: Rows) -> Objective:
    mask = rows.loss_mask
    logprobs = jnp.where(mask, outputs.logprobs, 0.0)
    total = -jnp.sum(rows.weights * logprobs)
    count = jnp.sum(mask, dtype=jnp.float32)
    entropy = jnp.where(mask, outputs.entropy, 0.0)
    return Objective(
        total,
        {"loss/total": total},
        {"entropy/mean": (jnp.sum(entropy), count), "sft/nll_mean": (-jnp.sum(logprobs), count)},
        {},
    )


SFT = Algorithm(
    name="sft",
    options=SFTOptions,
    collect=collect,
    prepare=prepare,
    losses=losses,
    loss_aggregation=lambda options: options.loss_aggregation,
    generates=False,
    data="completion",
)
