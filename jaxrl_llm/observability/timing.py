"""Where the time and the memory of a step went."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from jaxrl_llm.observability.watchdog import seen


class PhaseTimer:
    """Seconds of the phases of one step, which never overlap: an inner phase pauses the outer one.

    ::

        timer = PhaseTimer()
        with timer("generation"):
            ...
        timer.seconds        # {"generation": 1.2}
        timer.metrics()      # {"time/generation_s": 1.2, "time/other_s": 0.1, "time/step_s": 1.3}

    A phase measures host time. Device work is counted where the host waits for it, so a phase that ends before its
    result is needed must wait (``jax.block_until_ready``). A profile shows the phases by name.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._running: list[str] = []
        self._since = self._start
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the time inside to ``phase``; entering the same phase again adds to it."""
        self._switch()
        self._running.append(phase)
        seen(phase)
        try:
            with jax.profiler.TraceAnnotation(phase):
                yield
        finally:
            self._switch()
            self._running.pop()
            seen(self._running[-1] if self._running else f"after {phase}")

    def metrics(self) -> dict[str, float]:
        """``time/<phase>_s`` of each phase, ``time/step_s`` since the timer was made, ``time/other_s`` the rest."""
        step = self._clock() - self._start
        found = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return {**found, "time/other_s": max(step - sum(self.seconds.values()), 0.0), "time/step_s": step}

    def _switch(self) -> None:
        now = self._clock()
        if self._running:
            phase = self._running[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counts the programs that XLA compiled, or loaded from its cache on disk, in this process.

    Attributes:
      count: programs since the counter was made (or since ``take``), cache hits included: each is a shape or function
        that was not in memory.
      cache_hits: how many of them came from the cache on disk.
      seconds: time it took.
    """

    def __init__(self) -> None:
        self.count, self.cache_hits, self.seconds = 0, 0, 0.0
        self._lock = threading.Lock()  # programs may be compiled on several threads
        # jax keeps listeners for the life of the process and has no public way to remove one: closing only mutes it.
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def take(self) -> dict[str, float]:
        """``compile/count`` and ``compile/seconds`` since the last call; starts again at 0."""
        with self._lock:
            found = {"compile/count": float(self.count), "compile/seconds": self.seconds}
            self.count, self.cache_hits, self.seconds = 0, 0, 0.0
        return found

    def close(self) -> None:
        """Stops counting."""
        self._open = False

    def __enter__(self) -> CompileCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if self._open and event == _COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration_secs

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        if self._open and event == _CACHE_HIT_EVENT:
            with self._lock:
                self.cache_hits += 1


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """The most memory used so far, and what exactly was measured."""

    num_bytes: int
    source: str


def peak_memory() -> PeakMemory:
    """The peak of the fullest local device, where its allocator says so; else that of this whole process.

    A CPU has no device allocator to ask: there the number is the largest resident set of the process (arrays,
    temporaries, Python and everything else), which is what has to fit the machine.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    if known:
        return PeakMemory(max(known), "peak bytes in use of the fullest device")
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "peak resident set of the process")


def peak_memory_bytes() -> int:
    """``peak_memory().num_bytes``, for the metric ``memory/peak_bytes``."""
    return peak_memory().num_bytes
