"""``samples.jsonl``: what the policy wrote and what it got for it, to be read by a person."""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

from jaxrl_llm.observability.metrics import open_for_lines, read_lines, write_line
from jaxrl_llm.types import Rollouts

SAMPLES_FILE = "samples.jsonl"


class SamplesLog:
    """Appends some samples of each step to a work folder."""

    def __init__(self, workdir: str | os.PathLike[str], *, samples_per_step: int = 16):
        folder = pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_for_lines(folder / SAMPLES_FILE)
        self._limit = samples_per_step

    def write(self, step: int, rollouts: Rollouts) -> None:
        """Appends the first samples of the step: whole groups, as far as they fit, so that rewards can be compared."""
        for n in range(min(len(rollouts), self._limit)):
            write_line(self._file, {"step": step, **_record(rollouts, n)})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> SamplesLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_samples(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every sample written, oldest first."""
    return read_lines(pathlib.Path(workdir) / SAMPLES_FILE)


def _record(rollouts: Rollouts, n: int) -> dict[str, Any]:
    example = rollouts.examples[int(rollouts.group[n])]
    return {
        "uid": example.uid,
        "prompt": example.prompt,
        "completion": rollouts.texts[n],
        "answer": example.answer,
        "reward": _score(rollouts.rewards[n]),
        "rewards": {name: _score(values[n]) for name, values in rollouts.components.items()},
        "finish_reason": rollouts.finish_reasons[n],
        "response_tokens": len(rollouts.responses[n]),
    }


def _score(value: Any) -> float | None:
    """A score as JSON; null where the reward does not apply."""
    return float(value) if math.isfinite(value) else None
