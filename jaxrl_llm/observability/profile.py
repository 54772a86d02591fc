"""What the host and the devices did when, in one step, as XProf shows it."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def step_profile(step: int, folder: pathlib.Path | None) -> Iterator[None]:
    """Names the step in any profile that is being taken, and takes one of it where ``folder`` is given."""
    with contextlib.ExitStack() as stack:
        if folder is not None:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of a Python function would bury the phases
            stack.enter_context(jax.profiler.trace(folder, profiler_options=options))
        stack.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))
        yield
