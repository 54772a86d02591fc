"""The requests that every contestant of a generation benchmark serves. Imports numpy alone."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Prompts of `prompt_tokens` random ids, `samples` completions of each, of exactly the given lengths by prompt."""

    name: str
    lengths: tuple[int, ...]
    samples: int = 1
    prompt_tokens: int = 64

    @property
    def tokens(self) -> int:
        """In all completions."""
        return sum(self.lengths) * self.samples

    def prompts(self, turn: int) -> list[list[int]]:
        """Other ids in every turn, so that nothing is found in a cache."""
        random = np.random.default_rng([turn, len(self.lengths), self.samples])
        return random.integers(100, 40_000, (len(self.lengths), self.prompt_tokens)).tolist()


def _ragged(count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(1).integers(8, 257, count).tolist())


TRAFFIC = (
    Traffic("batch 1", (64,)),
    Traffic("batch 16", (64,) * 16),
    Traffic("batch 64", (64,) * 64),
    Traffic("64 requests of 8 to 256 tokens", _ragged(64)),
    Traffic("2 prompts x 8 samples", (64,) * 2, samples=8),
    Traffic("8 prompts x 8 samples", (64,) * 8, samples=8),
)
"""What `python -m jaxrl_llm.bench generation` measures; at most 64 sequences run at once."""

NUM_SLOTS = 64
CONTEXT = 512
