"""Two threads of each process start programs in the same order in all processes, whoever is late where."""

from __future__ import annotations

import threading
import time

import pytest

from jaxrl_llm import turns as module
from jaxrl_llm.errors import Interrupted
from jaxrl_llm.turns import BESIDE, RUN, Turns


class Told:
    """In place of the coordinator: what process 0 has said so far."""

    def __init__(self):
        self.said: dict[int, int] = {}
        self._changed = threading.Condition()

    def tell(self, turn, who):
        with self._changed:
            assert turn not in self.said
            self.said[turn] = who
            self._changed.notify_all()

    def told(self, turn):
        with self._changed:
            self._changed.wait_for(lambda: turn in self.said, 0.02)
            return self.said.get(turn)


def work(turns, who, pause_s, log):
    for number in range(6):
        turns.take(who)
        log.append((who, number))
        time.sleep(0.001)  # the other must not start anything here
        log.append((who, number))
        turns.give(who)
        time.sleep(pause_s)


def process(told, first, pauses, log):
    turns = Turns(told.tell, None) if first else Turns(None, told.told)
    other = threading.Thread(target=work, args=(turns, BESIDE, pauses[BESIDE], log), daemon=True)
    other.start()
    turns.give(RUN)
    work(turns, RUN, pauses[RUN], log)
    other.join()
    turns.take(RUN)
    turns.end()


def test_all_processes_follow_the_first_one():
    """Each has another slow thread, or none.

    Caught: an order of their own; turns that two threads have at once; one that comes before its turn."""
    told, logs = Told(), [[] for _ in range(3)]
    pauses = [{RUN: 0.01, BESIDE: 0.002}, {RUN: 0.0, BESIDE: 0.02}, {RUN: 0.0, BESIDE: 0.0}]
    running = [
        threading.Thread(target=process, args=(told, index == 0, pause, log), daemon=True)
        for index, (pause, log) in enumerate(zip(pauses, logs, strict=True))
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(10)
        assert not thread.is_alive()
    assert logs[0] == logs[1] == logs[2]
    assert logs[0][::2] == logs[0][1::2]
    whose = [who for who, _ in logs[0][::2]]
    assert whose[-1] == RUN and whose.index(RUN) < 6  # the slow one did not wait for the other to end
    for who in (RUN, BESIDE):
        assert [number for owner, number in logs[0][::2] if owner == who] == list(range(6))


@pytest.mark.parametrize("first", [True, False])
def test_turns_that_are_abandoned_end_the_thread_beside(first):
    """Whether it waits for its turn or asks for it later; the one that began goes on.

    Caught: a thread that waits for ever."""
    turns = Turns(Told().tell, None) if first else Turns(None, Told().told)
    raised = []

    def ask():
        for _ in range(2):
            try:
                turns.take(BESIDE)
            except Interrupted as error:
                raised.append(error)

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    turns.abandon()
    waiting.join(10)
    assert len(raised) == 2
    turns.give(RUN)
    turns.take(RUN)
    turns.end()


def test_a_coordinator_that_is_gone_is_an_error():
    """Caught: one that follows and waits for ever."""

    def told(turn):
        raise OSError("gone")

    raised = []

    def ask():
        turns = Turns(None, told)
        turns.give(RUN)
        try:
            turns.take(RUN)
        except RuntimeError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    waiting.join(10)
    assert raised == ["Process 0 does not say which thread's turn it is."]


@pytest.mark.parametrize("told_late", [True, False])
def test_a_thread_that_fails_in_one_process_ends_the_other_one_there(told_late, monkeypatch):
    """Process 0 goes on with the turns of a thread that has ended here: the one that trains says so, and of what it
    ended. Caught: one that waits for ever."""
    told, raised, begun = Told(), [], threading.Event()
    told.tell(0, BESIDE)

    def sample():
        with pytest.raises(ZeroDivisionError), module.beside():
            begun.set()
            raise ZeroDivisionError

    def train():
        monkeypatch.setattr(module, "_turns", Turns(None, told.told))
        beside = threading.Thread(target=sample, daemon=True)
        try:
            with module.waiting():
                beside.start()
                beside.join(10)
                if not told_late:
                    told.tell(1, BESIDE)
                else:
                    threading.Timer(0.1, told.tell, (1, BESIDE)).start()
        except RuntimeError as error:
            raised.append(error.__cause__)
        module.abandon()
        module.end()

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(10)
    assert begun.is_set()
    assert [type(error) for error in raised] == [ZeroDivisionError]
