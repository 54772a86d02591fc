"""How long the device had nothing to do because the host was at work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class HostClock:
    """Counts the seconds in which no program was running on the device while the host did something.

    Where the device ran out of work unseen, between two looks at it, all of that time counts: ``seconds`` is never too
    small by more than the launch of a program.

    Args:
      idle: whether the device has finished all that was queued; asked before each program is queued and each wait.
    """

    def __init__(self, idle: Callable[[], bool], clock: Callable[[], float] = time.perf_counter):
        self._idle, self._clock = idle, clock
        self._since = clock()
        self.seconds = 0.0

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Around the call that queues a program."""
        idle = self._idle()
        yield
        self._count(idle)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for a result, which is no work."""
        self._count(self._idle())
        yield
        self._since = self._clock()

    def stop(self) -> float:
        """Counts what the host did last; ``seconds``."""
        self._count(self._idle())
        return self.seconds

    def _count(self, idle: bool) -> None:
        now = self._clock()
        self.seconds += now - self._since if idle else 0.0
        self._since = now
