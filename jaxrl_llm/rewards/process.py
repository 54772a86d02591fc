"""One reward worker as its parent sees it: started, fed, listened to, killed with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jaxrl_llm
from jaxrl_llm.rewards.protocol import Decoder

READ_BYTES = 1 << 18


class WorkerProcess:
    """A running ``jaxrl_llm.rewards.worker`` in its own session, so that its whole process group can be killed.

    It is a fresh interpreter rather than a fork (which can deadlock once jax has threads) and rather than
    ``multiprocessing``'s spawn (which runs the user's main script or notebook again).

    Attributes:
      ready: it has loaded its functions.
      tasks: samples sent and not yet finished, in the order in which it works on them.
      next_reward: which reward of ``tasks[0]`` it is computing.
      since: ``time.monotonic()`` of its last sign of progress.
    """

    def __init__(self, setup: bytes):
        child_read, self._write_fd = os.pipe()
        self._read_fd, child_write = os.pipe()
        self._decoder = Decoder()
        self.ready = False
        self.tasks: list[Any] = []
        self.next_reward = 0
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxrl_llm.rewards.worker", str(child_read), str(child_write)],
                pass_fds=(child_read, child_write),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints must not mix with the program's output
                start_new_session=True,
                env=_environment(),
            )
        finally:
            os.close(child_read)
            os.close(child_write)
        self.since = time.monotonic()
        self._send(setup)

    def fileno(self) -> int:
        """For ``selectors``: readable when a message came or the process ended."""
        return self._read_fd

    def assign(self, tasks: list[Any], message: bytes) -> None:
        """Sends ``tasks``, of which ``message`` is the encoded form, to a worker that has none."""
        self.tasks, self.next_reward = tasks, tasks[0][1]
        self.since = time.monotonic()
        self._send(message)

    def _send(self, message: bytes) -> None:
        view = memoryview(message)
        # A worker that died is noticed by the end of its messages, here is nothing to do.
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(self._write_fd, view) :]

    def receive(self) -> list[Any] | None:
        """Messages that have come (blocks if none has), or None when the process has ended."""
        data = os.read(self._read_fd, READ_BYTES)
        if not data:
            return None
        self.since = time.monotonic()
        return self._decoder.feed(data)

    def kill(self) -> int:
        """Ends the process and all that it started, at once; returns its exit code (minus a signal's number).

        Sent before the process is waited for, so its number still belongs to it and to no other group.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self._write_fd)
        os.close(self._read_fd)
        return code


def _environment() -> dict[str, str]:
    package_parent = str(Path(jaxrl_llm.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package_parent, inherited] if inherited else [package_parent]),
        "PYTHONHASHSEED": "0",  # the order of a set must not depend on the worker
        "JAX_PLATFORMS": "cpu",  # a reward that imports jax must not take the trainer's devices
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
