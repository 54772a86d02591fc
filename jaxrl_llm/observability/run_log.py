"""Everything a run tells while it goes, in one place: files, progress, the picture and the summary at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxrl_llm.errors import RunStopped
from jaxrl_llm.observability import curve, metrics, samples
from jaxrl_llm.observability.progress import Progress
from jaxrl_llm.observability.summary import print_summary
from jaxrl_llm.observability.timing import CompileCounter, peak_memory_bytes
from jaxrl_llm.types import Rollouts

logger = logging.getLogger(__name__)


class RunLog:
    """The log of one run. Every process makes one and calls the same methods; only process 0 writes and shows.

    Args:
      workdir: the run's folder; None keeps nothing on disk.
    """

    def __init__(self, workdir: str | os.PathLike[str] | None):
        self._folder = None if workdir is None or jax.process_index() else pathlib.Path(workdir)
        self._compiles = CompileCounter()
        self._files = contextlib.ExitStack()
        self._metrics: metrics.MetricsLog | None = None
        self._samples: samples.SamplesLog | None = None
        self._progress: Progress | None = None
        self._refused = False  # the folder has taken no more

    @contextlib.contextmanager
    def progress(self, num_steps: int, first_step: int = 0) -> Iterator[None]:
        """Shows the progress of a run while inside; ``first_step`` steps are done already."""
        if jax.process_index():
            yield
            return
        with Progress(num_steps, first_step) as self._progress:
            try:
                yield
            finally:
                self._progress = None

    def write(self, step: int, values: Mapping[str, Any], rollouts: Rollouts | None = None) -> None:
        """Records a step's metrics and samples, and shows them.

        Raises:
          RunStopped: the folder can't be written to.
        """
        if self._progress is not None:
            self._progress.update(step, values)
        if self._folder is None:
            return
        try:
            if self._metrics is None or self._samples is None:  # files appear with the first step, not with the object
                self._metrics = self._files.enter_context(metrics.MetricsLog(self._folder, first_step=step))
                self._samples = self._files.enter_context(samples.SamplesLog(self._folder))
            self._metrics.write(step, values)
            if rollouts is not None:
                self._samples.write(step, rollouts)
        except OSError as error:
            self._refused = True
            raise self._stopped(f"of step {step}", error) from error

    def machine_metrics(self) -> dict[str, float]:
        """Programs compiled since the last call, and the peak memory so far."""
        return {**self._compiles.take(), "memory/peak_bytes": float(peak_memory_bytes())}

    def summary(self, num_steps: int) -> None:
        """Draws the learning curve and prints the summary of a run of ``num_steps``, from what its folder holds."""
        if self._folder is None or not (self._folder / metrics.METRICS_FILE).exists():
            return
        rows = metrics.read_metrics(self._folder)
        files, drawn = {"folder": str(self._folder)}, None
        try:
            drawn = curve.plot_learning_curve(rows, self._folder / curve.CURVE_FILE, title=self._folder.name)
        except OSError as error:  # the run is done and saved: a full disk takes the picture alone
            logger.warning("the learning curve can't be written: %s", error)
        if drawn is not None:
            files["picture"] = drawn.name
        print_summary(rows, num_steps, files)

    def close(self) -> None:
        """Writes out what is buffered.

        Raises:
          RunStopped: the folder can't be written to, and no `write` has said so: its error is on its way already.
        """
        self._compiles.close()
        try:
            self._files.close()
        except OSError as error:  # a file tries once more to write what it could not
            if not self._refused:
                raise self._stopped("of the last steps", error) from error

    def _stopped(self, which: str, error: OSError) -> RunStopped:
        return RunStopped(
            f"The metrics {which} can't be written to {self._folder}: {error.strerror or error}. Make room on the "
            "disk, then run the same command again: it goes on from the last checkpoint."
        )
