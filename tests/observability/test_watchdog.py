"""The watchdog tells of a hang, and of nothing else."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from jaxrl_llm.config import default_config, resolve
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.observability.watchdog import Watchdog, beside, seen
from jaxrl_llm.trainer import Trainer


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


class Broken(Exception):
    """Ends a hang that was told."""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A run on the shipped model; its programs are compiled before anything may hang."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "3+4=", "answer": "7"}) + "\n")
    config = default_config("grpo")
    config.num_steps = 9
    config.train_batch_size = 1
    config.model.path = "builtin:tiny_addition"
    config.model.layers = "loop"
    config.data.train = str(folder / "rows.jsonl")
    config.data.max_prompt_tokens = 8
    config.rewards = {"exact": {"function": "exact_match"}}
    config.reward_runner.num_workers = 1
    config.rollout.samples_per_prompt = 4
    config.rollout.max_new_tokens = 4
    config.rollout.num_slots = 4
    config.training.micro_batch_tokens = 64
    made = Trainer(resolve(config), folder / "run", devices=jax.devices()[:1])
    assert made.data is not None
    metrics, _ = made.step(next(made.data))
    made.save(metrics)
    yield made
    made.close()


HANGS: dict[str, Callable[[Trainer], tuple[Any, str]]] = {
    "generation": lambda trainer: (trainer.rollout.engine, "generate"),
    "reward": lambda trainer: (trainer.rollout.reward_runner, "_run"),
    "update": lambda trainer: (trainer.models["policy"], "update"),
    "checkpoint": lambda trainer: (trainer.checkpoints._manager, "save"),
}
"""By the phase that is told, what hangs."""


@pytest.mark.parametrize("phase", HANGS)
def test_a_hang_in_each_phase_of_a_step_is_told_with_its_name(
    trainer: Trainer, phase: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Caught: a save that is told as the update before it."""
    free = threading.Event()

    def where_it_hangs(*_: Any, **__: Any) -> None:
        free.wait(20)
        raise Broken

    owner, name = HANGS[phase](trainer)
    with monkeypatch.context() as patch:
        # A frozen record of programs is one of them.
        patch.setitem(owner.__dict__, name, where_it_hangs)
        with (tmp_path / "told").open("w+") as file, Watchdog(0.5, "process 1", output=file.fileno()):

            def free_when_told() -> None:
                while not free.is_set():
                    time.sleep(0.05)
                    if f"phase: {phase}." in (tmp_path / "told").read_text():
                        time.sleep(0.1)  # until the stacks stand there
                        free.set()

            freeing = threading.Thread(target=free_when_told)
            freeing.start()
            try:
                with pytest.raises(Broken):
                    metrics, _ = trainer.step(next(trainer.data))
                    trainer.save(metrics)
                told_in_time = free.is_set()
            finally:
                free.set()
                freeing.join()
    told = (tmp_path / "told").read_text()
    assert told_in_time, told
    assert "in where_it_hangs" in told.partition(f"phase: {phase}.")[2]


def test_a_silence_of_0_seconds_watches_nothing():
    """`watchdog_s = 0`. Caught: a thread that tells of everything."""
    before = threading.active_count()
    with Watchdog(0.0):
        assert threading.active_count() == before


def test_the_phase_of_a_thread_beside_the_run_is_told_as_well(tmp_path: pathlib.Path):
    """Caught: the phase of the thread in place of the run's; one that is told after its thread has ended."""
    timer, inside, free = PhaseTimer(), threading.Event(), threading.Event()

    def works_beside() -> None:
        with beside("sampling"), PhaseTimer()("generation"):
            inside.set()
            free.wait(10)

    def told_of(name: str) -> str:
        with (tmp_path / name).open("w+") as file, Watchdog(0.1, output=file.fileno()):
            deadline = time.monotonic() + 5
            while file.tell() == 0 and time.monotonic() < deadline:
                time.sleep(0.02)
                file.seek(0, 2)
        return (tmp_path / name).read_text()

    thread = threading.Thread(target=works_beside)
    with timer("update"):
        thread.start()
        inside.wait(10)
        assert "phase: update; sampling: generation." in told_of("both")
        free.set()
        thread.join()
        assert "phase: update." in told_of("after")
