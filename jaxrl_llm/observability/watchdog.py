"""Makes a hang visible: after a silence, the phase and the stacks of all threads are printed.

`seen` is called wherever something was reached: a phase of a step (`timing.PhaseTimer`), a dispatch of the decoder, a
checkpoint. It costs two assignments. What it remembers is of the process, as the stacks are; where a thread works
beside the run's own (`beside`), its phase is told as well. A silence is one of all threads: whoever waits for one that
hangs is silent too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_phase = "start"
_last = time.monotonic()
_beside: dict[int, tuple[str, str]] = {}  # by thread: what it is called and its phase


def seen(phase: str | None = None) -> None:
    """Notes a sign of progress, and the phase that begins; None stays in the one that is."""
    global _phase, _last
    _last = time.monotonic()
    if phase is None:
        return
    thread = threading.get_ident()
    if thread in _beside:
        _beside[thread] = (_beside[thread][0], phase)
    else:
        _phase = phase


@contextlib.contextmanager
def beside(name: str) -> Iterator[None]:
    """While inside, phases of this thread are told under `name`, beside that of the run."""
    thread = threading.get_ident()
    _beside[thread] = (name, "start")
    try:
        yield
    finally:
        del _beside[thread]


class Watchdog:
    """A context manager: while inside, each silence of ``silence_s`` seconds is told.

    Where Python itself stands still (a library holds its lock), its thread can't tell; then the stacks alone are
    printed, half as late again, by a thread of C.

    Args:
      silence_s: 0 watches nothing.
      name: of this process, in what is printed.
      output: a file descriptor; standard error by default.
    """

    def __init__(
        self, silence_s: float, name: str = "", *, output: int = 2, clock: Callable[[], float] = time.monotonic
    ):
        self._silence_s, self._name, self._output, self._clock = silence_s, name, output, clock
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        seen()
        if self._silence_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        told = _last
        while not self._end.wait(self._silence_s / 10):
            faulthandler.dump_traceback_later(1.5 * self._silence_s, file=self._output)
            now = self._clock()
            if now - max(_last, told) >= self._silence_s:
                told = now
                self._tell(now - _last)

    def _tell(self, silence_s: float) -> None:
        others = "".join(f"; {name}: {phase}" for name, phase in list(_beside.values()))
        text = (
            f"\nwatchdog: {self._name or f'process {os.getpid()}'} has shown no progress for {silence_s:.0f} s; phase: "
            f"{_phase}{others}. Its threads (watchdog_s sets the time, 0 switches this off):\n"
        )
        sys.stderr.flush()
        os.write(self._output, text.encode())
        faulthandler.dump_traceback(file=self._output, all_threads=True)
