"""DAPO: GRPO with a higher upper clip, a token mean, a penalty for overlong answers, and no prompt without a signal.

    loss = sum_t max(-A r_t, -A clip(r_t, 1 - 0.2, 1 + 0.28)) / trained tokens of the batch
    dynamic sampling: prompts whose rewards are all equal teach nothing; others are drawn until the batch is full

arXiv:2503.14476. The penalty (`overlong_buffer_tokens`, `overlong_penalty`) is off until a buffer is given, since a
good one depends on `rollout.max_new_tokens` (the paper: 4,096 of 20,480). Prompts that are left over when the batch is
full are dropped with their samples, as in verl, so that nothing has to be kept between steps. What is equal is judged
by the rewards before any penalty. Rewards that are not scored (NaN) are no signal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.algorithms import grpo, on_policy
from jaxrl_llm.algorithms.interface import Context
from jaxrl_llm.config import option
from jaxrl_llm.errors import RunStopped
from jaxrl_llm.types import Example, Rollouts


@dataclasses.dataclass(frozen=True)
class DAPOOptions(grpo.GRPOOptions):
    """Options of `algorithm` when its name is `dapo`: those of `grpo` with other defaults, and dynamic sampling."""

    clip_high: float = option(0.28, "the ratio is clipped above at 1 + clip_high", low=0.0)
    dual_clip: float = option(10.0, "bound on the ratio where the advantage is negative; 0 = off", low=0.0)
    dynamic_sampling: bool = option(True, "draw more prompts in place of those whose rewards are all equal")
    max_num_gen_batches: int = option(10, "an error after so many batches of prompts in one step", low=1)


def collect(context: Context, examples: Sequence[Example]) -> Rollouts:
    """Rollouts of as many prompts as were given, each with a signal.

    Raises:
      RunStopped: `max_num_gen_batches` batches did not hold so many.
    """
    rollouts = context.rollouts(examples)
    if not context.options.dynamic_sampling:
        return rollouts
    wanted, calls, drawn = len(examples), [rollouts], len(examples)
    kept = take(rollouts, with_signal(rollouts))
    while len(kept.examples) < wanted:
        if len(calls) == context.options.max_num_gen_batches:
            raise RunStopped(
                f"Dynamic sampling found {len(kept.examples)} prompts with rewards that differ among {drawn} in "
                f"{len(calls)} batches (algorithm.max_num_gen_batches), and a step needs {wanted}. The rewards are too "
                "easy or too hard for this model, or broken: look at samples.jsonl; then choose other prompts, raise "
                "rollout.samples_per_prompt or algorithm.max_num_gen_batches, or set algorithm.dynamic_sampling=False."
            )
        more = context.rollouts(context.more_examples())
        calls, drawn = [*calls, more], drawn + len(more.examples)
        kept = join(kept, take(more, with_signal(more)))
    found = len(kept.examples)
    kept = take(kept, np.arange(wanted))
    kept.metrics = joined_metrics(calls)
    kept.metrics |= {"dapo/prompts_drawn": float(drawn), "dapo/signal_fraction": found / drawn}
    return kept


def with_signal(rollouts: Rollouts) -> np.ndarray:
    """Indices of the prompts whose scored rewards are not all equal."""
    found = []
    for index in range(len(rollouts.examples)):
        scores = rollouts.rewards[rollouts.group == index]
        scores = scores[~np.isnan(scores)]
        if len(scores) and scores.max() > scores.min():
            found.append(index)
    return np.array(found, np.int64)


def take(rollouts: Rollouts, prompts: np.ndarray) -> Rollouts:
    """The rollouts of some prompts, in the order given; metrics stay those of all."""
    members = [np.flatnonzero(rollouts.group == index) for index in prompts]
    chosen = np.concatenate(members) if members else np.zeros(0, np.int64)
    group = np.repeat(np.arange(len(prompts), dtype=np.int32), [len(one) for one in members])

    def pick(values: list) -> list:
        return [values[n] for n in chosen]

    return dataclasses.replace(
        rollouts,
        examples=[rollouts.examples[index] for index in prompts],
        group=group,
        responses=pick(rollouts.responses),
        sampler_logprobs=None if rollouts.sampler_logprobs is None else pick(rollouts.sampler_logprobs),
        texts=pick(rollouts.texts),
        finish_reasons=pick(rollouts.finish_reasons),
        rewards=rollouts.rewards[chosen],
        components={name: values[chosen] for name, values in rollouts.components.items()},
    )


def join(first: Rollouts, second: Rollouts) -> Rollouts:
    """The rollouts of both, with the metrics of the first. A component that only one has does not apply to the other's
    samples (NaN)."""
    sampled = None
    if first.sampler_logprobs is not None and second.sampler_logprobs is not None:
        sampled = first.sampler_logprobs + second.sampler_logprobs
    return dataclasses.replace(
        first,
        examples=[*first.examples, *second.examples],
        group=np.concatenate([first.group, second.group + len(first.examples)]).astype(np.int32),
        responses=first.responses + second.responses,
        sampler_logprobs=sampled,
        texts=first.texts + second.texts,
        finish_reasons=first.finish_reasons + second.finish_reasons,
        rewards=np.concatenate([first.rewards, second.rewards]),
        components={
            name: np.concatenate(
                [part.components.get(name, np.full(len(part), np.nan, np.float32)) for part in (first, second)]
            )
            for name in dict.fromkeys([*first.components, *second.components])
        },
    )


def joined_metrics(calls: Sequence[Rollouts]) -> dict[str, float]:
    """What the step's calls told of all samples that they drew: maxima, and means weighted by the samples."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for call in calls for name in call.metrics):
        told = [(call.metrics[name], len(call)) for call in calls if name in call.metrics]
        values, weights = zip(*told, strict=True)
        joined[name] = float(max(values) if name.endswith("_max") else np.average(values, weights=weights))
    return joined


DAPO = on_policy.algorithm("dapo", DAPOOptions, grpo.advantages, collect=collect)
