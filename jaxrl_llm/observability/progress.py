"""The progress of a run: a live bar in a terminal, plain lines elsewhere (log files, notebooks)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

KL_LABELS = {"kl/mean": "KL", "policy/approx_kl": "KL of a step"}
"""The divergence that is shown: from the reference where there is one, else from the policy before the step."""

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "loss/total", "{:.3f}"),
    *((label, name, "{:.4f}") for name, label in KL_LABELS.items()),
    ("accuracy", "eval/accuracy", "{:.3f}"),
    ("tokens/s", "perf/generation_tokens_per_s", "{:,.0f}"),
)
SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """Shows step, reward, KL, tokens/s and time left. A context manager; ``update`` after each step."""

    def __init__(self, num_steps: int, first_step: int = 0, *, console: Console | None = None):
        """
        Args:
          num_steps: steps of the whole run.
          first_step: how many of them are done already (a resumed run).
          console: where to show; standard error by default, so that standard output stays for results.
        """
        self._console = console or Console(stderr=True)
        self._num_steps, self._first_step = num_steps, first_step
        self._started: tuple[int, float] | None = None  # the first step done here, and when
        self._last_line = -math.inf
        # rich's live display needs ipywidgets in a notebook; lines work everywhere.
        self._live = self._console.is_terminal and not self._console.is_jupyter
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TextColumn("·"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=num_steps, completed=first_step, text="")

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows that ``step`` steps are done, with their last metrics."""
        text = describe(metrics)
        if self._started is None and step > self._first_step:
            self._started = step, time.monotonic()
        if self._live:
            self._bar.update(self._task, completed=step, text=text)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._num_steps:
            self._last_line = now
            line = "  ".join(part for part in (f"step {step}/{self._num_steps}", text, self._left(step, now)) if part)
            self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()

    def _left(self, step: int, now: float) -> str:
        """From the steps after the first one here, which compiles."""
        if self._started is None or step <= self._started[0]:
            return ""
        first, started = self._started
        seconds = (now - started) / (step - first) * (self._num_steps - step)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"


def describe(metrics: Mapping[str, Any]) -> str:
    """The figures worth watching, in one line: those of ``metrics`` that are there and finite."""
    parts = []
    divergence = next((name for name in KL_LABELS if name in metrics), None)
    for label, name, form in _SHOWN:
        value = metrics.get(name, math.nan)
        if math.isfinite(value) and (name not in KL_LABELS or name == divergence):
            parts.append(f"{label} {form.format(value)}")
    return "  ".join(parts)
