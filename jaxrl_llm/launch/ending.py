"""SIGTERM where there is nothing to save: all processes of the run end at once, with the code of a preempted run.

Training finishes the step in progress and saves it (`Trainer.train`). Before its first step, and in ``eval``,
``generate`` and ``export``, nothing would be lost. There the main thread may be in a compiler for minutes, or wait for
another process, where Python runs no handler: so a thread hears of the signal, the other processes hear of it through
jax's coordinator, and none is left waiting for one that has gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

from jaxrl_llm.errors import EXIT_PREEMPTED
from jaxrl_llm.launch.joining import coordinator_client, end_together

TOLD = "jaxrl_llm/ended_by_sigterm"  # the key at the coordinator
POLL_S = 1.0  # of each process: a small question to the coordinator

left_to_training = threading.Event()
"""Set while SIGTERM means that a step is finished and saved; not by the signal's own thread."""


def end_at_sigterm() -> None:
    """From here on SIGTERM ends this program, except while `left_to_training`. From the main thread of a program of our
    own: the handler stays."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # C writes the number there, whatever Python does
    signal.signal(signal.SIGTERM, lambda *_: None)  # but only where there is a handler

    def listen() -> None:
        while True:
            if signal.SIGTERM in os.read(read, 64) and not left_to_training.is_set():
                _end(tell=True)

    threading.Thread(target=listen, name="sigterm", daemon=True).start()


def end_with_others() -> None:
    """From here on this process ends when another of the run was ended by SIGTERM. Does nothing in a run of one."""
    client = coordinator_client()
    if client is None:
        return

    def ask() -> None:
        while True:
            time.sleep(POLL_S)
            try:
                client.key_value_try_get(TOLD)
            except Exception as error:  # noqa: BLE001 - jax has no class for it
                if "NOT_FOUND" in str(error):
                    continue
                return  # the coordinator has gone, and the run with it
            _end(tell=False)

    threading.Thread(target=ask, name="sigterm of others", daemon=True).start()


def _end(tell: bool) -> None:
    whose = "ended by SIGTERM" if tell else "another process was ended by SIGTERM, and this one with it"
    print(f"{whose}: there was nothing to save. The same command starts from the last checkpoint.", file=sys.stderr)
    client = coordinator_client()
    if client is not None:
        if tell:
            with contextlib.suppress(Exception):  # not connected yet, or no longer
                client.key_value_set(TOLD, "yes", allow_overwrite=True)
        end_together(EXIT_PREEMPTED)
    sys.stderr.flush()
    os._exit(EXIT_PREEMPTED)
