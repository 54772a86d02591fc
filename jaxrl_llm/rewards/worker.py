"""``python -m jaxrl_llm.rewards.worker READ_FD WRITE_FD``: a process that scores samples until it is told to stop.

It imports no jax. Its parent kills it, with every process it started, when a call takes too long. Should the
parent die first, the worker notices by its parent process id, or, inside a call that never returns to
Python, is ended by the kernel's alarm.
"""

from __future__ import annotations

import base64
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from typing import Any

from jaxrl_llm.rewards.calling import Call, as_score, bind, find_function
from jaxrl_llm.rewards.protocol import Decoder, encode

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MESSAGE_CHARACTERS = 500
PARENT_POLL_S = 1.0


def main() -> None:
    read_fd, write_fd = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (read_fd, write_fd):
        os.set_inheritable(descriptor, False)  # not for the programs that a reward starts
    own_pid = os.getpid()
    messages = _messages(read_fd)
    setup = next(messages)
    threading.Thread(target=_end_with_parent, args=(setup["parent"],), daemon=True).start()
    _limit_resources(setup["memory_bytes"])
    sys.path += [entry for entry in setup["sys_path"] if entry not in sys.path]
    calls, error = _load(setup["rewards"])
    if error is not None:
        os.write(write_fd, encode({"error": error}))
        return
    os.write(write_fd, encode({"ready": True}))
    for batch in messages:
        for sample, first_reward, *arguments in batch:
            for reward in range(first_reward, len(calls)):
                signal.setitimer(signal.ITIMER_REAL, setup["alarm_s"])
                score, parts, failure = _score(calls[reward], arguments)
                if os.getpid() != own_pid:  # a copy that the reward forked came back too: only the worker speaks
                    os._exit(0)
                os.write(write_fd, encode([sample, reward, score, parts, failure]))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _messages(descriptor: int) -> Any:
    decoder = Decoder()
    while data := os.read(descriptor, 1 << 20):
        yield from decoder.feed(data)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def _limit_resources(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _load(rewards: list[dict[str, Any]]) -> tuple[list[Call], str | None]:
    """The functions in order, or the reason why one can't be had."""
    calls: list[Call] = []
    for reward in rewards:
        try:
            pickled = reward["pickle"]
            function = pickle.loads(base64.b64decode(pickled)) if pickled else find_function(reward["target"])
            calls.append(bind(function, reward["options"]))
        except BaseException as error:  # noqa: BLE001  whatever a user's module raises is reported
            return [], f"rewards.{reward['name']}: {_describe(error)}"
    return calls, None


def _score(call: Call, arguments: list[Any]) -> tuple[float | None, dict[str, float], str | None]:
    """``(score, parts, failure)``: a number, None for "does not apply", or the reason of a failure."""
    try:
        score, parts = as_score(call(*arguments))
    except BaseException as error:  # noqa: BLE001  a sample's failure must not end the run
        return None, {}, _describe(error)
    # Scores are float32 from here on; beyond its range they would become infinite. NaN fails the comparison.
    if not all(abs(value) <= FLOAT32_MAX for value in [*parts.values(), *([] if score is None else [score])]):
        return None, {}, f"returned {parts or score}, which is not finite in float32"
    return score, parts, None


def _describe(error: BaseException) -> str:
    """The error's type, text and place in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception as nested:  # noqa: BLE001  an exception class of the user's
        text = f"its text can't be had ({type(nested).__name__})"
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARACTERS] + place


if __name__ == "__main__":
    main()
