"""The watchdog tells of a hang, and of nothing else."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
import time

from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.observability.watchdog import Watchdog, seen


def test_a_silence_is_told_with_the_phase_and_every_stack(tmp_path: pathlib.Path):
    """Caught: the phase of the step before, and only the watchdog's own stack."""
    timer, free = PhaseTimer(), threading.Event()

    def where_it_hangs() -> None:
        with timer("generation"), timer("reward"):
            free.wait(10)

    with (tmp_path / "told").open("w+") as file, Watchdog(0.2, "process 3", output=file.fileno()):
        hanging = threading.Thread(target=where_it_hangs)
        hanging.start()
        deadline = time.monotonic() + 5
        while file.tell() == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
            file.seek(0, 2)
        time.sleep(0.05)
        free.set()
        hanging.join()
    told = (tmp_path / "told").read_text()
    assert "process 3 has shown no progress" in told and "phase: reward." in told
    assert "in where_it_hangs" in told and "test_watchdog.py" in told


def test_progress_and_the_end_keep_it_quiet(tmp_path: pathlib.Path):
    with (tmp_path / "told").open("w") as file:
        with Watchdog(0.3, output=file.fileno()):
            for _ in range(12):
                time.sleep(0.05)
                seen()
        with Watchdog(0.0, output=file.fileno()):
            time.sleep(0.2)
        time.sleep(0.6)
    assert (tmp_path / "told").read_text() == ""


def test_python_standing_still_is_told_too():
    """A C function that never gives Python's lock back. Caught: a watchdog that is a Python thread alone."""
    program = """
import ctypes
from jaxrl_llm.observability.watchdog import Watchdog
with Watchdog(0.3):
    import time; time.sleep(0.2)
    ctypes.PyDLL(None).usleep(900_000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "no progress" not in done.stderr.partition("Timeout")[0]  # the stacks came first, from the thread of C
    assert "Timeout" in done.stderr and 'File "<string>", line 6' in done.stderr
