"""In which order the threads of a process start programs, where a run has several processes.

A program of several processes waits, in its collectives, until each of them has started it. One thread starts programs
in the same order everywhere. Two would not, and could wait for each other for ever; so they take turns. The one whose
turn it is may start what it likes, until it waits for something (`waiting`): for a result of the devices, for rewards,
for the other thread. Then the other has its turn, as soon as it asks for one. In process 0 who asks first comes first,
and the other processes are told through the coordinator; their threads come in that very order. So all start the same
programs in the same order, whatever takes how long on which of them. Results do not depend on that order, since the
threads share no array.

A turn costs a message to the coordinator and no work of a device. A run of one process takes no turns.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

from jaxrl_llm import processes
from jaxrl_llm.errors import Interrupted
from jaxrl_llm.launch.joining import coordinator_client

RUN, BESIDE, OVER = 0, 1, 2
"""The thread that began, the one that works beside it, and that no turn follows."""

PATIENCE_MS = 1000  # after so long a thread that follows looks whether turns were abandoned

_turns: Turns | None = None
_numbers = itertools.count()


def begin() -> None:
    """From here on another thread may work `beside` this one, whose turn it is. Each process makes this call, and
    `end`, between the same two programs."""
    global _turns
    assert _turns is None, "two threads take turns, not more"
    if processes.count() == 1:
        return
    number, client = next(_numbers), coordinator_client()

    def key(*numbers: int) -> str:
        return "/".join(["jaxrl_llm/turns", *map(str, numbers)])

    def tell(turn: int, who: int) -> None:
        client.key_value_set(key(number, turn), str(who))

    def told(turn: int) -> int | None:
        try:
            return int(client.blocking_key_value_get(key(number, turn), PATIENCE_MS))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    if processes.is_first():
        client.key_value_delete(key(number - 2))  # all others are past it
        _turns = Turns(tell, None)
    else:
        _turns = Turns(None, told)


def end() -> None:
    """The thread that began is alone again, and it is its turn."""
    global _turns
    turns, _turns = _turns, None
    if turns is not None:
        turns.end()


def abandon() -> None:
    """No more turns: the thread beside ends by an `Interrupted` where it asks for the next one. The same has happened
    in all processes, or this one ends."""
    if _turns is not None:
        _turns.abandon()


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """All that the other thread does.

    Raises:
      Interrupted: see `abandon`.
    """
    turns = _turns
    if turns is None:
        yield
        return
    failed: BaseException | None = None
    try:
        turns.take(BESIDE)
        yield
    except BaseException as error:
        failed = error
        raise
    finally:
        turns.leave(failed)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Around a wait for what was started before: the other thread may have its turn meanwhile. Starts nothing inside.
    A thread waits as many times, and in the same places, in all processes, however short it is there.

    Raises:
      Interrupted: see `abandon`; in the thread beside alone.
    """
    turns = _turns
    who = None if turns is None else turns.who()
    if turns is None or who is None:
        yield
        return
    turns.give(who)
    try:
        yield
    finally:
        turns.take(who)


class Turns:
    """Those of two threads of one process, from `begin` to `end`. Made by the one whose turn it is.

    Args:
      tell: of process 0: tells the others whose the n-th turn is.
      told: of the others: whose it is, or None where nobody has said so for a while.
    """

    def __init__(self, tell: Callable[[int, int], None] | None, told: Callable[[int], int | None] | None):
        self._tell = tell
        self._threads = {threading.get_ident(): RUN}
        self._changed = threading.Condition()
        self._order: list[int] = []  # whose the next turns are
        self._has: int | None = RUN
        self._count, self._abandoned = 0, False
        self._error: Exception | None = None
        self._left = False  # whether the thread beside has ended, and by which error
        self._failed: BaseException | None = None
        self._reader: threading.Thread | None = None
        if told is not None:
            self._reader = threading.Thread(target=self._follow, args=(told,), name="turns", daemon=True)
            self._reader.start()

    def who(self) -> int | None:
        """Which of the two this thread is; None: neither."""
        return self._threads.get(threading.get_ident())

    def take(self, who: int) -> None:
        """Waits for this thread's turn.

        Raises:
          Interrupted: see `abandon`.
          RuntimeError: it never comes: process 0 says nothing more, or waits for a thread that has failed here alone.
        """
        self._threads[threading.get_ident()] = who
        with self._changed:
            if self._tell is not None:
                self._order.append(who)
            self._changed.wait_for(
                lambda: self._abandoned or (self._has is None and (self._order[:1] == [who] or self._alone()))
            )
            if self._error is not None:
                raise RuntimeError("Process 0 does not say which thread's turn it is.") from self._error
            if self._abandoned:
                if who == BESIDE:
                    raise Interrupted
                return
            if self._alone():
                raise RuntimeError("The thread beside has ended here and goes on in process 0.") from self._failed
            self._has = self._order.pop(0)
            if self._tell is not None:
                self._tell(self._count, who)
                self._count += 1

    def give(self, who: int) -> None:
        """Ends this thread's turn."""
        with self._changed:
            if self._has == who:
                self._has = None
                self._changed.notify_all()

    def leave(self, failed: BaseException | None) -> None:
        """The thread beside has ended, by this error if by one; so it does in all processes, or this one fails."""
        with self._changed:
            self._left, self._failed = True, failed
            if self._has == BESIDE:
                self._has = None
            self._changed.notify_all()

    def _alone(self) -> bool:
        return self._left and self._order[:1] == [BESIDE]

    def abandon(self) -> None:
        """No thread waits for its turn any more."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def end(self) -> None:
        """No turn follows."""
        if self._tell is not None and not self._abandoned:
            self._tell(self._count, OVER)
        if self._reader is not None:
            self._reader.join()

    def _follow(self, told: Callable[[int], int | None]) -> None:
        """Takes down whose turn it is, in process 0's order."""
        for turn in itertools.count():
            who = None
            while who is None and not self._abandoned:
                try:
                    who = told(turn)
                except Exception as error:  # noqa: BLE001 - raised where the turn is waited for
                    self._error = error
                    self.abandon()
            if who is None or who == OVER:
                return
            with self._changed:
                self._order.append(who)
                self._changed.notify_all()
