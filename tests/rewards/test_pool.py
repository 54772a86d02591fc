"""The pool of reward workers: time-outs, failures, order, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.config import RewardConfig, RewardRunnerConfig
from jaxrl_llm.errors import Interrupted, RunStopped, UserError
from jaxrl_llm.rewards.pool import RewardRunner

HERE = Path(__file__).parent


def hostile(completion: str) -> float | None:
    """Does what the completion says; a word of its own gets its length."""
    import os
    import re
    import subprocess
    import sys

    if completion == "loop":
        while True:
            pass
    if completion == "power":
        return float(len(str(7 ** (7**11))))  # one call into C that holds the interpreter for minutes
    if completion == "regex":
        return float(bool(re.fullmatch(r"(a|a)*b", "a" * 64)))
    if completion == "spawn":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=True)
    if completion == "die":
        os._exit(0)
    if completion == "exit":
        sys.exit(0)
    if completion == "raise":
        raise ZeroDivisionError("as told")
    if completion == "interrupt":
        raise KeyboardInterrupt
    if completion == "fork":
        os.fork()  # and both go on
    if completion == "speechless":

        class Speechless(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise Speechless
    if completion == "beyond float32":
        return 1e39
    if completion == "nan":
        return float("nan")
    if completion == "none":
        return None
    if completion == "print":
        print("x" * 100_000)
    if completion == "memory":
        return float(len(b"x" * (1 << 33)))
    return float(len(completion))


def len_of_completion(completion: str) -> float:
    return float(len(completion))


def runner(function: Callable[..., Any] = hostile, **settings: Any) -> RewardRunner:
    settings = {"num_workers": 2, "timeout_s": 1.0, "failure_score": -1.0, "on_all_failed": "warn", **settings}
    return RewardRunner({}, RewardRunnerConfig(**settings), extra={"it": function})


def score(pool: RewardRunner, completions: list[str], answers: list[Any] | None = None) -> Any:
    count = len(completions)
    return pool.score(["p"] * count, completions, answers or [None] * count, [{}] * count)


def descendants() -> set[int]:
    """Processes below this one, and those that it lost: all of the workers' sessions."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it just ended
            continue
        if b"jaxrl_llm.rewards.worker" in command or b"time.sleep(600)" in command:
            found.add(int(entry.name))
    return {process for process in found if not _of_another_worker(process)}


def _of_another_worker(process: int) -> bool:
    """Whether it stands below another process of this test run (pytest-xdist), whose tests run beside these."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return False
    while process > 1 and process not in (os.getpid(), os.getppid()):
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:  # it just ended
            return False
        process = int(status.partition("PPid:")[2].split()[0])
    return process == os.getppid()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test here ends with the processes it began with. Seen to catch: killing the worker alone, and not
    the group of what it started."""
    before = descendants()
    yield
    deadline = time.monotonic() + 5
    while descendants() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not descendants() - before


def test_hanging_calls_are_killed_step_after_step():
    """Case R07. Seen to catch: a time-out in the worker by `signal.alarm` with a Python handler, which the power
    and the regular expression never reach; re-queueing the stuck sample, which never ends."""
    with runner(num_workers=4) as pool:
        for _ in range(3):
            start = time.monotonic()
            result = score(pool, ["loop", "ab", "power", "abc", "regex", "abcd", "a", "spawn"])
            assert time.monotonic() - start < 1.0 * 2 + 5
            np.testing.assert_array_equal(result.total, np.float32([-1, 2, -1, 3, -1, 4, 1, -1]))
            assert result.failures == 4
            assert "timeout_s = 1 s" in result.failure_messages[0]


def test_failures_get_the_declared_score_and_are_counted():
    """Seen to catch: scoring a NaN as it is, and None as a failure; a score that is infinite in float32; a
    KeyboardInterrupt that ends the worker and is told as an exit code."""
    with runner(memory_bytes=1 << 30) as pool:
        words = [
            "die",
            "abc",
            "exit",
            "raise",
            "nan",
            "none",
            "print",
            "memory",
            "beyond float32",
            "interrupt",
            "speechless",
        ]
        result = score(pool, words)
    np.testing.assert_array_equal(result.total, np.float32([-1, 3, -1, -1, -1, np.nan, 5, -1, -1, -1, -1]))
    np.testing.assert_array_equal(result.components["it"], result.total)
    assert result.failures == 8
    messages = "\n".join(result.failure_messages)
    for expected in (
        "exit code 0",
        "SystemExit",
        "ZeroDivisionError: as told",
        "returned nan, which is not finite",
        "MemoryError",
        "returned 1e+39, which is not finite in float32",
        "KeyboardInterrupt",
        "Speechless: its text can't be had (RuntimeError)",
    ):
        assert expected in messages


def test_a_copy_that_a_reward_makes_of_its_process_is_not_heard():
    """Caught: a score told twice, by the worker and by its fork, which ended the run with an IndexError."""
    with runner(num_workers=1) as pool:
        for _ in range(3):
            result = score(pool, ["fork", "abc", "fork", "a"])
            np.testing.assert_array_equal(result.total, np.float32([4, 3, 4, 1]))


def test_order_does_not_depend_on_who_is_first():
    """Seen to catch: results appended in the order in which they come."""

    def slow_at_first(completion: str) -> float:
        import time

        time.sleep(0.05 if int(completion) < 3 else 0)
        return float(completion)

    with runner(slow_at_first, num_workers=3) as pool:
        result = score(pool, [str(i) for i in range(200)])
    np.testing.assert_array_equal(result.total, np.arange(200, dtype=np.float32))


def test_a_failure_costs_only_its_own_reward():
    """Seen to catch: giving up a sample's other rewards when one hangs."""
    rewards = {
        "exact": RewardConfig("exact_match", weight=2.0),
        "it": RewardConfig(weight=0.5),
        "letter": RewardConfig(f"{HERE / 'reward_file.py'}:first_letter", options={"letter": "l"}),
    }
    settings = RewardRunnerConfig(num_workers=1, timeout_s=1.0, failure_score=-1.0)
    with RewardRunner(rewards, settings, extra={"it": hostile}) as pool:
        result = score(pool, ["loop", "abc", "none"], ["loop", "abc", None])
    np.testing.assert_array_equal(result.components["exact"], np.float32([1, 1, np.nan]))
    np.testing.assert_array_equal(result.components["it"], np.float32([-1, 3, np.nan]))
    np.testing.assert_array_equal(result.components["letter"], np.float32([1, 0, 0]))
    np.testing.assert_array_equal(result.total, np.float32([2 - 0.5 + 1, 2 + 1.5, 0]))


def test_parts_and_metadata():
    rewards = {"it": RewardConfig(f"{HERE / 'reward_file.py'}:verl_style")}
    with RewardRunner(rewards, RewardRunnerConfig(num_workers=1)) as pool:
        metadata = [{"data_source": "abc", "extra_info": {"index": np.int64(i)}} for i in range(2)]
        result = pool.score(["", ""], ["1", "2"], ["1", "1"], metadata)
        with pytest.raises(UserError, match="bytes"):
            pool.score([""], ["1"], ["1"], [{"image": b"x"}])
        again = pool.score(["", ""], ["1", "2"], ["1", "1"], metadata)
    np.testing.assert_array_equal(result.total, np.float32([1, 0]))
    np.testing.assert_array_equal(result.components["it/source_length"], np.float32([3, 3]))
    np.testing.assert_array_equal(again.total, result.total)


def test_a_batch_without_any_score_is_an_alarm():
    """Seen to catch: returning a batch of failure scores as if they were rewards."""
    with runner(on_all_failed="stop") as pool:
        with pytest.raises(RunStopped, match=r"Every score .*calls of it.*ZeroDivisionError"):
            score(pool, ["raise", "raise", "none"])
        with pytest.raises(RunStopped, match="applied to any"):
            score(pool, ["none", "none"])
        assert score(pool, ["raise", "abc"]).failures == 1


def test_one_hopeless_reward_is_a_warning(caplog: pytest.LogCaptureFixture):
    """Seen to catch: a run stopped since one of its rewards failed on the only sample that it applied to."""

    def rare(completion: str) -> float | None:
        if completion.startswith("rare"):
            raise ValueError("as told")
        return None

    settings = RewardRunnerConfig(num_workers=1, on_all_failed="stop")
    with RewardRunner({}, settings, extra={"size": len_of_completion, "rare": rare}) as pool:
        one = score(pool, ["rare", "abc", "ab"])
        assert "on all" not in caplog.text and "1 reward calls failed" in caplog.text
        two = score(pool, ["rare", "abc", "rare 2"])
        assert "The reward rare failed on all 2 samples" in caplog.text
    np.testing.assert_array_equal(one.total, np.float32([4, 3, 2]))
    assert (one.failures, two.failures) == (1, 2)


@pytest.mark.parametrize(("memory_bytes", "limit"), [(1 << 30, 1 << 30), (0, -1)])
def test_the_memory_of_a_worker_is_an_option(memory_bytes: int, limit: int):
    """Seen to catch: the option not given to the workers."""

    def address_space(completion: str) -> float:
        import resource

        return float(resource.getrlimit(resource.RLIMIT_AS)[0])

    with runner(address_space, memory_bytes=memory_bytes, num_workers=1, failure_score=-5.0) as pool:
        assert score(pool, ["a"]).total == np.float32(limit)


def test_what_cannot_work_is_said_at_the_start():
    settings = RewardRunnerConfig(num_workers=1)
    for config, text in [
        (RewardConfig("mth"), "exact_match"),
        (RewardConfig("no_such_module:f"), "no_such_module"),
        (RewardConfig("no_such.py:f"), "no_such.py does not exist"),
        (RewardConfig("os.path:nothing"), "nothing"),
        (RewardConfig("math", options={"mood": 1}), "mood"),
        (RewardConfig(""), "rewards.it.function is empty"),
    ]:
        with pytest.raises(UserError, match=text):
            RewardRunner({"it": config}, settings)
    with pytest.raises(UserError, match="No reward"):
        RewardRunner({}, settings)
    lines = (line for line in "abc")
    with pytest.raises(UserError, match="can't be sent"):
        RewardRunner({}, settings, extra={"it": lambda completion: next(lines)})


def test_an_interrupted_batch_does_not_reach_the_next():
    """Seen to catch: keeping workers that are in the middle of an abandoned batch."""

    def interrupt(*unused: object) -> None:
        raise KeyboardInterrupt

    with runner(timeout_s=30.0) as pool:
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                score(pool, ["loop"] * 4)
        finally:
            signal.signal(signal.SIGALRM, previous)
        np.testing.assert_array_equal(score(pool, ["a", "ab"]).total, np.float32([1, 2]))


def test_a_batch_can_be_ended_from_another_thread():
    """Caught: a batch that goes on to its last call, half a minute later."""
    with runner(timeout_s=1.0, num_workers=1) as pool:
        timer = threading.Timer(0.3, pool.interrupt)
        timer.start()
        with pytest.raises(Interrupted):
            score(pool, ["loop"] * 30)
        timer.join()


SCRIPT = """
from jaxrl_llm.config import RewardRunnerConfig
from jaxrl_llm.rewards.pool import RewardRunner
import sys
print("module runs", flush=True)
assert "jax" not in sys.modules
def mine(completion):
    import sys
    while completion == "loop":
        pass
    return 1.0 if "jax" not in sys.modules else 0.0
pool = RewardRunner({}, RewardRunnerConfig(num_workers=2, timeout_s=60.0), extra={"mine": mine})
print(pool.score([""], ["x"], [None], [{}]).total, flush=True)
if sys.argv[1] == "hang":
    pool.score([""] * 2, ["loop", "loop"], [None] * 2, [{}] * 2)
"""


def script(tmp_path: Path, argument: str) -> subprocess.Popen:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.Popen([sys.executable, file, argument], stdout=subprocess.PIPE, text=True, env=environment)


def test_a_script_without_main_guard_runs_once_and_loads_no_jax(tmp_path: Path):
    """Seen to catch: workers by `multiprocessing`, which run the script again; an import of jax in the worker."""
    with script(tmp_path, "end") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.split("\n") == ["module runs", "[1.]", ""]


def test_workers_end_when_the_trainer_is_killed(tmp_path: Path):
    """Seen to catch: a worker that only waits for the end of its input, which a busy one never reads."""
    with script(tmp_path, "hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() + process.stdout.readline() == "module runs\n[1.]\n"
        time.sleep(0.3)
        process.kill()
    # The fixture waits for the workers to end.


def test_thousands_of_cheap_scores_in_a_second():
    with runner(num_workers=2, timeout_s=30.0) as pool:
        start = time.monotonic()
        result = score(pool, ["abc"] * 4000)
        assert time.monotonic() - start < 4
    assert result.total.sum() == 12000
