"""What a trainer offers an algorithm, made of fixed numbers, and fixed rollouts to prepare."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.types import Example, Rollouts

NAN = float("nan")
PROMPTS = ([5, 6], [7], [8, 9, 10], [11])
LENGTHS = (3, 2, 4, 1, 2, 2, 3, 1, 1, 4, 2, 3, 2, 1, 1, 2)
FIRST = (1.0, 0.0, 0.5, NAN, 1.0, 1.0, 1.0, 1.0, 0.0, 2.0, 1.0, 3.0, NAN, NAN, NAN, NAN)
SECOND = (0.0, 0.0, 1.0, NAN, 0.5, 0.5, 0.5, 0.5, 8.0, 0.0, NAN, 2.0, NAN, NAN, NAN, NAN)
TRUNCATED = (9, 5, 13)
"""Of the prompts: one has a sample without a score, one equal rewards, one a truncated response, one no score."""


def logprobs_of(role: str, sequences) -> list[np.ndarray]:
    """Of the tokens in the mask: a number for each role and token."""
    slope = {"policy": 0.1, "reference": 0.07}[role]
    return [
        np.where(mask, -1.0 - slope * (ids % 5), 0).astype(np.float32)
        for ids, mask in zip(sequences.tokens, sequences.loss_mask, strict=True)
    ]


def values_of(role: str, sequences) -> list[np.ndarray]:
    """The value of a state is that of its last token: entry t is of the one before token t."""
    return [np.concatenate([[0.0], 0.25 * (ids % 4)]).astype(np.float32) for ids in sequences.tokens]


@dataclasses.dataclass
class FakeContext:
    config: configs.RunConfig
    step: int = 0
    memory: dict = dataclasses.field(default_factory=dict)
    asked: list = dataclasses.field(default_factory=list)
    generate: Callable | None = None
    more: Callable | None = None

    @property
    def options(self):
        return self.config.algorithm.options

    def rollouts(self, examples, **arguments):
        assert self.generate is not None, "prepare does not generate"
        return self.generate(examples, **arguments)

    def more_examples(self):
        assert self.more is not None
        return self.more()

    def logprobs(self, role, sequences):
        self.asked.append(role)
        return logprobs_of(role, sequences)

    def values(self, role, sequences):
        self.asked.append(f"values of {role}")
        return values_of(role, sequences)


def make_config(name: str, *, samples: int = 4, batch: int = 4, training=(), critic=(), **algorithm):
    config = configs.default_config(name).to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["rewards"] = {"first": {"weight": 1.0}, "second": {"weight": 0.5}}
    config["eval"]["accuracy_reward"] = "first"
    config["train_batch_size"] = batch
    config["rollout"].update(samples_per_prompt=samples, max_new_tokens=4)
    config["data"]["max_prompt_tokens"] = 8
    config["algorithm"].update(algorithm)
    config["training"].update(training)
    config["critic"].update(critic)
    return configs.resolve(config)


def make_examples() -> list[Example]:
    return [
        Example(f"{row}@0", "p" * len(ids), np.array(ids, np.int32), answer="3", row=row)
        for row, ids in enumerate(PROMPTS)
    ]


def make_rollouts() -> Rollouts:
    """Four samples of each of four prompts; the total is that of `make_config`'s weights."""
    generator = np.random.default_rng(0)
    responses = [generator.integers(1, 13, length).astype(np.int32) for length in LENGTHS]
    first, second = np.array(FIRST, np.float32), np.array(SECOND, np.float32)
    return Rollouts(
        examples=make_examples(),
        group=np.repeat(np.arange(4, dtype=np.int32), 4),
        responses=responses,
        sampler_logprobs=[np.full(len(ids), -1.25, np.float32) for ids in responses],
        texts=[""] * 16,
        finish_reasons=["length" if n in TRUNCATED else "stop" for n in range(16)],
        rewards=np.where(np.isnan(first), np.nan, first + 0.5 * np.nan_to_num(second)).astype(np.float32),
        components={"first": first, "second": second},
        baselines=np.array([0.25, 1.0, NAN, 0.0], np.float32),
    )
