"""Which log-probs and values a step computes apart from its updates.

The algorithm says so itself: its `collect` and `prepare` are asked for a few short stand-in samples, and what they want
of the trainer is written down.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.interface import Algorithm, Sequences
from jaxrl_llm.config import REWARD_MODEL, RunConfig
from jaxrl_llm.types import Example, Rollouts

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Forward passes of one role over the sequences of a step.

    Attributes:
      kind: ``logprobs``, ``values``, or ``both`` of a role that has both heads and is asked for both: one pass.
      share: how many times all sequences of the step go through; less than 1 where only some do.
    """

    role: str
    kind: str
    share: float

    @property
    def name(self) -> str:
        kinds = {"logprobs": "log-probs", "values": "values", "both": "log-probs and values"}
        return f"{kinds[self.kind]} of {self.role}"


def passes(config: RunConfig, algorithm: Algorithm) -> tuple[Pass, ...]:
    """Those of a usual step: not of the first ones, in which a critic may learn alone.

    An algorithm of a user's file that can't take stand-in samples is told of; each of its frozen roles then counts
    once.
    """
    mini = config.training.mini_batch_size
    single = config.train_batch_size <= mini
    prompts = 2 if single else 4  # of one update, or of two
    training = dataclasses.replace(config.training, mini_batch_size=2)
    small = dataclasses.replace(config, train_batch_size=prompts, training=training)
    context = _Recorder(small, algorithm.init(config.algorithm.options))
    examples = [_example(row) for row in range(prompts)]
    try:
        algorithm.prepare(context, algorithm.collect(context, examples))
    except Exception as error:  # noqa: BLE001 - of a user's code, on samples that mean nothing
        logger.warning("the passes of %s are guessed: on stand-in samples it raised %r", algorithm.name, error)
        frozen = [role.name for role in algorithm.roles(config.algorithm.options) if not role.trained]
        divergence = algorithm.divergence(config.algorithm.options)
        return tuple(Pass(role, "logprobs", 1.0) for role in frozen if not divergence or role != divergence.role)
    usual = prompts * sequences_per_prompt(config, algorithm)
    asked = context.asked
    for role in algorithm.roles(config.algorithm.options):
        if role.head == "both" and (role.name, "logprobs") in asked:
            counts = asked.pop((role.name, "logprobs")), asked.pop((role.name, "values"), 0)
            asked[role.name, "both"] = max(counts)
    return tuple(Pass(role, kind, count / usual) for (role, kind), count in asked.items())


def sequences_per_prompt(config: RunConfig, algorithm: Algorithm) -> int:
    if algorithm.generates:
        return config.rollout.samples_per_prompt
    return 2 if algorithm.data == "preference" else 1


class _AnyColumn(dict[str, Any]):
    """Every column of a row, all zero."""

    def get(self, key: str, default: Any = None) -> float:
        return 0.0


def _example(row: int) -> Example:
    answer = np.array([5, 6], np.int32)
    return Example(
        uid=f"{row}@0",
        prompt="",
        prompt_ids=np.array([2, 3 + row], np.int32),
        metadata=_AnyColumn(),
        response_ids=answer,
        rejected_ids=answer[::-1].copy(),
        label=row % 2 == 0,
        row=row,
    )


class _Recorder:
    """What the trainer offers to an algorithm (`algorithms.interface.Context`), in numbers that mean nothing.

    Attributes:
      asked: by role and kind, how many sequences.
    """

    def __init__(self, config: RunConfig, memory: dict[str, Any]):
        self.config, self.options, self.memory = config, config.algorithm.options, memory
        self.step = config.critic.warmup_steps
        self.asked: dict[tuple[str, str], int] = {}

    def rollouts(
        self,
        examples: Sequence[Example],
        *,
        role: str = "policy",
        samples: int | None = None,
        temperature: float | None = None,
        draw: int = 0,
    ) -> Rollouts:
        samples = self.config.rollout.samples_per_prompt if samples is None else samples
        count = len(examples) * samples
        rewards = (np.arange(count) % 2).astype(np.float32)  # samples of a prompt differ: they teach something
        names = [*self.config.rewards, *([REWARD_MODEL] if self.config.reward_model.path else [])]
        return Rollouts(
            examples=examples,
            group=np.repeat(np.arange(len(examples), dtype=np.int32), samples),
            responses=[np.array([5, 6], np.int32) for _ in range(count)],
            sampler_logprobs=[np.full(2, -1.0, np.float32) for _ in range(count)],
            texts=[""] * count,
            finish_reasons=["stop"] * count,
            rewards=rewards,
            components=dict.fromkeys(names, rewards),
        )

    def more_examples(self) -> Sequence[Example]:
        return [_example(row) for row in range(self.config.train_batch_size)]

    def logprobs(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        return self._asked(role, "logprobs", sequences, -1.0, 0)

    def values(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        return self._asked(role, "values", sequences, 0.5, 1)

    def _asked(self, role: str, kind: str, sequences: Sequences, value: float, more: int) -> list[np.ndarray]:
        count = sum(bool(mask.any()) for mask in sequences.loss_mask)  # the others are not packed
        self.asked[role, kind] = self.asked.get((role, kind), 0) + count
        return [np.full(len(tokens) + more, value, np.float32) for tokens in sequences.tokens]
