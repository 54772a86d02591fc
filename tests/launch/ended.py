"""What each of two processes runs in `test_several_processes.py`: the command line, with a command in which one process
waits for the other, which is busy where Python runs no handler."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from jaxrl_llm import main, processes, trainer


def busy(*_: object) -> None:
    processes.exchange(lambda: True)
    if os.environ["ASKED"] == os.environ["JAXRL_PROCESS"]:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if processes.index() == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # of this thread: the call below is not broken off
        ctypes.CDLL(None).poll(None, ctypes.c_ulong(0), int(os.environ["BUSY_S"]) * 1000)
    processes.exchange(lambda: True)


if __name__ == "__main__":
    trainer.Trainer = lambda *_, **__: None  # no model is needed
    main.COMMANDS["generate"] = busy
    sys.exit(main.main())
