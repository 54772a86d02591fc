"""The package's log messages on standard error, in step with the progress bar."""

from __future__ import annotations

import logging
import sys


class _CurrentStderr(logging.Handler):
    """Writes to what ``sys.stderr`` is now: a live progress bar replaces it, to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def show_logs(level: str) -> None:
    """Shows messages of this package and its kernels from ``level`` on, and warnings of every other library.

    Args:
      level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("jaxrl_llm", "jaxrl_kernels"):
        logging.getLogger(package).setLevel(level.upper())
    # orbax logs through absl: each file it moves, and as a warning that a reader was asked to read only.
    logging.getLogger("absl").setLevel(logging.WARNING if level == "debug" else logging.ERROR)
