"""The work that every contestant of a GRPO benchmark does: same prompts, same reward, same lengths.

Imports neither jax nor torch, so that each side reads it in its own environment.
"""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """One GRPO step: `prompts` x `samples` completions of exactly `new_tokens` after `prompt_tokens`, one update."""

    prompts: int = 2
    samples: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    steps: int = 5

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def prompt_ids(self, tokenizer, index: int) -> list[int]:
        """Token ids of prompt `index`, exactly `prompt_tokens` long."""
        text = f"Item {index}: write a short sentence with many digits. "
        text += "one two three four five six " * (self.prompt_tokens // 6 + 1)  # a word has a token at least
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: self.prompt_tokens]
        assert len(ids) == self.prompt_tokens, (len(ids), self.prompt_tokens)
        return ids


def digits(text: str) -> float:
    """The reward: how many digits the completion has."""
    return float(sum(character.isdigit() for character in text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each number of a `Workload`."""
    for field in dataclasses.fields(Workload):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)


def from_arguments(arguments: argparse.Namespace) -> Workload:
    return Workload(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Workload)})
