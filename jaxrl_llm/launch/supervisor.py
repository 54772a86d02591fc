"""Starts the processes of a run on this machine, watches them, and starts all again when one has died.

jax can't go on with one process less: the others wait in a collective, or are aborted some time after. So when one
ends by anything but its own decision, the rest is ended too, and all begin again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from jaxrl_llm.errors import EXIT_PREEMPTED, EXIT_RUN_STOPPED, EXIT_USER_ERROR
from jaxrl_llm.launch.joining import COORDINATOR, PROCESS, PROCESSES

INTERRUPTED = 130
FINAL = (EXIT_USER_ERROR, EXIT_RUN_STOPPED, INTERRUPTED)
"""Exit codes that the next try would only repeat."""

POLL_S = 0.1
SAME_S = 1.0  # `timeout`, and a terminal together with a starter such as uv, send a signal twice at once
TAIL_LINES = 20


@dataclasses.dataclass
class Child:
    """One process of the run and its log file."""

    index: int
    process: subprocess.Popen[bytes]
    log: pathlib.Path


class Supervisor:
    """Runs a command as several processes until it is done.

    Args:
      command: of one process; each gets the same.
      environments: what each process's environment has beside this one's.
      logs: the folder of ``process_<i>.log``, which hold what each writes to standard error; process 0's is shown here
        too, and its standard output is this program's.
      progress: how far the run has come, any value.
      tries: failures in a row, at most; one before which `progress` has changed is the first of a new row.
      grace_s: seconds between the request to end and SIGKILL, where another process has died, or this program was
        asked a second time.
      save_s: seconds between the first such request to this program and SIGKILL: SIGTERM means that a step is finished
        and saved, which may take long, but a run that hangs does not hear it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        logs: pathlib.Path,
        *,
        progress: Callable[[], Any] = lambda: None,
        tries: int = 3,
        grace_s: float = 10.0,
        save_s: float = 600.0,
    ):
        self.command, self.environments, self.logs = list(command), environments, logs
        self.progress, self.tries, self.grace_s, self.save_s = progress, tries, grace_s, save_s
        self._asked: list[int] = []  # the signals by which this program was asked to end
        self._asked_at = self._kill_at = math.inf  # by `time.monotonic`

    def run(self) -> int:
        """The exit code: 0 where all processes ended so, otherwise that of the process that failed first."""
        self.logs.mkdir(parents=True, exist_ok=True)
        left = self.tries
        with self._listening():
            while True:
                before = self.progress()
                code = self._once()
                if code == 0 or code in (*FINAL, EXIT_PREEMPTED) or self._asked:
                    return code
                left = (self.tries if self.progress() != before else left) - 1
                if left <= 0:
                    _say(f"no try is left of {self.tries}; the run ends with exit code {code}")
                    return code
                _say(f"all processes start again from the newest checkpoint; tries left: {left}")

    # --- one try ----------------------------------------------------------------------------------------------

    def _once(self) -> int:
        with contextlib.ExitStack() as files:
            first = self.logs / "process_0.log"
            first.touch()
            shown = files.enter_context(first.open("rb"))
            shown.seek(0, os.SEEK_END)  # before anything of this try is written
            children = self._start(files)
            try:
                return self._watch(children, shown)
            finally:
                self._end(children)
                _show(shown)

    def _start(self, files: contextlib.ExitStack) -> list[Child]:
        address = f"127.0.0.1:{_free_port()}"
        children: list[Child] = []
        for index, extra in enumerate(self.environments):
            path = self.logs / f"process_{index}.log"
            log = files.enter_context(path.open("ab"))
            environment = {
                **os.environ,
                **extra,
                COORDINATOR: address,
                "JAX_COORDINATOR_BIND_ADDRESS": address,
                PROCESSES: str(len(self.environments)),
                PROCESS: str(index),
            }
            process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if index == 0 else log,
                stderr=log,
                start_new_session=True,  # Ctrl-C comes here alone and is passed on
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
            children.append(Child(index, process, path))
        return children

    def _watch(self, children: list[Child], shown: IO[bytes]) -> int:
        """Until all have ended, or one has failed; the rest is then ended by the caller."""
        passed = 0
        failed_at = None
        while True:
            time.sleep(POLL_S)
            _show(shown)
            for number in self._asked[passed:]:
                passed += 1
                self._pass_on(number, passed, children)
            if time.monotonic() >= self._kill_at:
                self._kill(children)
            codes = [child.process.poll() for child in children]
            failed = [child for child, code in zip(children, codes, strict=True) if code not in (None, 0)]
            if None not in codes and all(code in (0, EXIT_PREEMPTED) for code in codes):
                return EXIT_PREEMPTED if failed else 0
            bad = [child for child in failed if child.process.returncode != EXIT_PREEMPTED]
            if not bad:
                continue
            # Those that fail for the same reason end by themselves, with a code that says more than a kill's.
            failed_at = failed_at or time.monotonic()
            if None not in codes or time.monotonic() > failed_at + min(1.0, self.grace_s):
                return self._explain(bad)

    def _explain(self, failed: list[Child]) -> int:
        """Shows the end of each failed process's log; returns the exit code that says most."""
        for child in failed:
            name = f"process {child.index} (pid {child.process.pid})"
            _say(f"{name} {_how(child.process.returncode)}; the end of {child.log}:")
            for line in _tail(child.log):
                print(f"  | {line}", file=sys.stderr)
        codes = [child.process.returncode for child in failed]
        code = next((code for code in codes if code in FINAL), codes[0])
        if signal.SIGTERM in self._asked and code == -signal.SIGTERM:
            return EXIT_PREEMPTED  # it came before the training did, so nothing is lost
        return code if code > 0 else 128 - code

    def _pass_on(self, number: int, times: int, children: list[Child]) -> None:
        """A signal to this program, the ``times``-th, to every process; says what comes next."""
        name = signal.Signals(number).name
        if times == 1:
            then = "the step in progress is finished and saved" if number == signal.SIGTERM else "the run is broken off"
            _say(
                f"{name} is passed on: {then}. What still runs after {self.save_s:g} s is killed (--save-grace-s); "
                f"after a second signal, {self.grace_s:g} s later (--grace-s)."
            )
        elif times == 2:
            _say(f"{name} again: what still runs in {self.grace_s:g} s is killed (--grace-s); a third kills at once.")
        for child in children:
            _signal(child, number)

    def _kill(self, children: list[Child]) -> None:
        for child in children:
            if child.process.poll() is None:
                _say(f"process {child.index} (pid {child.process.pid}) has not ended: killed")
                _signal(child, signal.SIGKILL)
                child.process.wait()

    def _end(self, children: list[Child]) -> None:
        """Ends what still runs, by its pid: asks, waits `grace_s`, kills."""
        for child in children:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        while any(child.process.poll() is None for child in children):
            if time.monotonic() >= min(deadline, self._kill_at):
                self._kill(children)
                return
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """While inside, SIGTERM and Ctrl-C are passed on to every process, and no process is started again."""

        def ask(number: int, frame: Any) -> None:
            now = time.monotonic()
            if self._asked and now < self._asked_at + SAME_S:
                return
            patience = {0: self.save_s, 1: self.grace_s}.get(len(self._asked), 0.0)
            self._asked_at, self._kill_at = now, min(self._kill_at, now + patience)
            self._asked.append(number)

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    """In the child: SIGTERM when the launcher has gone, however it went, so that no half-watched run goes on."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal(child: Child, number: int) -> None:
    if child.process.poll() is None:  # its number is still its own until it was waited for
        child.process.send_signal(number)


def _show(log: IO[bytes]) -> None:
    new = log.read()
    if new:
        sys.stderr.write(new.decode("utf-8", errors="replace"))
        sys.stderr.flush()


def _tail(log: pathlib.Path) -> list[str]:
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(0, size - 64 * 1024))
        return file.read().decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
