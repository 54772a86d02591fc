"""What each of two processes runs in `test_several_processes.py`: roles on blocks of which each process has a part.

Three steps follow each other; from then on the next one is sampled while a step learns, and the processes dawdle in
different places: in the first the thread that samples is late, in the other the one that learns. Without turns they
would start programs in different orders. At last an update fails while the other thread samples, which ends too.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import sys
import threading
import time

from jaxrl_llm import processes, turns
from jaxrl_llm.launch.joining import find, join, leave

PLAIN_STEPS, GOOD_STEPS = 3, 6
DAWDLE_S = 1.0
LIMIT_S = 100


def main(file: str, workdir: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # where the two wait for each other
    join(find(os.environ), heartbeat_s=10, join_timeout_s=60)
    import jax

    from jaxrl_llm.config import resolve
    from jaxrl_llm.config_file import read_config
    from jaxrl_llm.staleness import THREAD
    from jaxrl_llm.trainer import Trainer

    assert (processes.count(), len(jax.devices())) == (2, 4)
    trainer = Trainer(resolve(read_config(file)), pathlib.Path(workdir))
    ahead, score, learn = trainer._next_step, trainer.rollout._score, trainer._learn

    def late(where: int) -> None:
        with turns.waiting():
            time.sleep(DAWDLE_S if processes.index() == where and trainer.step_index >= PLAIN_STEPS else 0.0)

    def next_step(data):
        return trainer.step(next(data)) if trainer.step_index < PLAIN_STEPS else ahead(data)

    def late_score(*given):
        late(0)
        return score(*given)

    def late_learn(*given):
        late(1)
        if trainer.step_index == GOOD_STEPS:
            raise ZeroDivisionError
        return learn(*given)

    trainer._next_step, trainer.rollout._score, trainer._learn = next_step, late_score, late_learn
    try:
        trainer.train(then_ends=True)
    except ZeroDivisionError:
        assert all(thread.name != THREAD for thread in threading.enumerate())
    else:
        raise AssertionError("an update has failed, and the run goes on")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        import traceback

        traceback.print_exc()
        leave(1)
        raise
