"""The supervisor, with small programs in place of a training run."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.launch import __main__ as command
from jaxrl_llm.launch.supervisor import Supervisor

# The launcher imports no jax. Here others have, which warns of the fork; the child becomes another program at once.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def supervised(tmp_path: pathlib.Path, program: str, processes: int = 2, **options) -> Supervisor:
    header = (
        "import os, pathlib, signal, sys, time; me = os.environ['JAXRL_PROCESS'];"
        f"here = pathlib.Path({str(tmp_path)!r})"
    )
    return Supervisor(
        [sys.executable, "-c", f"{header}\n{program}"],
        [{"OWN": str(index)} for index in range(processes)],
        tmp_path / "logs",
        **{"grace_s": 0.5, **options},
    )


def test_each_process_knows_its_place_and_has_its_log(tmp_path: pathlib.Path, capfd):
    """Caught: a log that is opened anew by the next try, and process 1's output on the screen."""
    program = (
        "print('out', me, flush=True); print(me, os.environ['OWN'], os.environ['JAXRL_PROCESSES'], file=sys.stderr)"
    )
    assert supervised(tmp_path, program).run() == 0
    assert supervised(tmp_path, program).run() == 0
    logs = [(tmp_path / "logs" / f"process_{index}.log").read_text() for index in range(2)]
    assert logs == ["0 0 2\n" * 2, "out 1\n1 1 2\n" * 2]
    shown = capfd.readouterr()
    assert shown.out == "out 0\n" * 2 and shown.err == "0 0 2\n" * 2


def test_a_killed_process_ends_the_rest_and_all_start_again(tmp_path: pathlib.Path, capfd):
    """The other one waits for ever and does not hear SIGTERM: it is killed too, and both start anew."""
    program = """
(here / f"starts_{me}").open("a").write(f"{os.getpid()}\\n")
if (here / "died").exists():
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"ready_{me}").touch()
while me == "0":
    time.sleep(1)
while not (here / "ready_0").exists():
    time.sleep(0.01)
print("last words", file=sys.stderr, flush=True)
(here / "died").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert supervised(tmp_path, program).run() == 0
    starts = [(tmp_path / f"starts_{index}").read_text().split() for index in range(2)]
    assert [len(pids) for pids in starts] == [2, 2]
    for pid in starts[0] + starts[1]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    told = capfd.readouterr().err
    assert "was ended by SIGKILL" in told and "  | last words\n" in told and "tries left: 2" in told


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (3, 1), (1, 3)])
def test_only_what_may_go_better_is_tried_again(tmp_path: pathlib.Path, code: int, starts: int, capfd):
    program = f"(here / 'starts').open('a').write(me)\nif me == '1': sys.exit({code})\ntime.sleep(60)"
    assert supervised(tmp_path, program, tries=3).run() == code
    assert (tmp_path / "starts").read_text().count("1") == starts


def test_a_users_error_counts_more_than_the_crash_that_it_causes(tmp_path: pathlib.Path, capfd):
    program = "if me == '1': time.sleep(0.3)\nsys.exit(1 if me == '0' else 2)"
    assert supervised(tmp_path, program).run() == 2


def test_tries_count_anew_after_progress(tmp_path: pathlib.Path, capfd):
    program = """
found = len(list(here.glob("step_*")))
if me == "0":
    (here / "starts").open("a").write("x")
    if found < 3:
        (here / f"step_{found}").touch()
sys.exit(1)
"""
    supervisor = supervised(tmp_path, program, 1, tries=2, progress=lambda: len(list(tmp_path.glob("step_*"))))
    assert supervisor.run() == 1
    assert (tmp_path / "starts").read_text() == "x" * 4  # the third got further, so it is the first of two


@pytest.mark.parametrize("code", [75, 1])
def test_sigterm_reaches_every_process_and_ends_the_run(tmp_path: pathlib.Path, code: int, capfd):
    """Also where a process then fails. Caught: code 0 for a run that is not done."""
    program = f"""
def end(*_):
    (here / f"heard_{{me}}").touch()
    sys.exit({code})
signal.signal(signal.SIGTERM, end)
(here / f"ready_{{me}}").touch()
time.sleep(60)
"""

    def ask() -> None:
        while len(list(tmp_path.glob("ready_*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert supervised(tmp_path, program).run() == code
    asking.join()
    assert len(list(tmp_path.glob("heard_*"))) == 2


DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"pid_{me}").write_text(str(os.getpid()))
(here / f"ready_{me}").touch()
time.sleep(60)
"""


def ask_when_ready(tmp_path: pathlib.Path, *pauses_s: float) -> threading.Thread:
    """A thread that sends SIGTERM to this process once both programs run, and again after each pause."""

    def ask() -> None:
        while len(list(tmp_path.glob("ready_*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        for pause in pauses_s:
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("save_s", "grace_s", "pauses_s", "told"),
    [
        (0.4, 60.0, (), "after 0.4 s is killed (--save-grace-s)"),
        (60.0, 0.4, (1.2,), "SIGTERM again: what still runs in 0.4 s is killed"),
        (60.0, 60.0, (1.2, 1.2), "a third kills at once"),
    ],
)
def test_a_run_that_does_not_hear_sigterm_is_killed(
    tmp_path: pathlib.Path, save_s: float, grace_s: float, pauses_s: tuple[float, ...], told: str, capfd
):
    """After the time to save; soon after a second signal; at once after a third. And it does not start again. Caught: a
    launcher that waits for ever, and one that asks the others to end for another grace."""
    asking = ask_when_ready(tmp_path, *pauses_s)
    start = time.monotonic()
    assert supervised(tmp_path, DEAF, save_s=save_s, grace_s=grace_s).run() == 128 + signal.SIGKILL
    assert time.monotonic() - start < 20
    asking.join()
    for index in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid_{index}").read_text()), 0)
    shown = capfd.readouterr().err
    assert told in shown and shown.count("has not ended: killed") == 2 and "start again" not in shown


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path: pathlib.Path, capfd):
    """As `timeout` sends it. Caught: a run that is killed while it saves."""
    program = """
def save(*_):
    time.sleep(1.5)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(here / f"ready_{me}").touch()
time.sleep(60)
"""
    asking = ask_when_ready(tmp_path, 0.3, 0.3)
    assert supervised(tmp_path, program, grace_s=0.0).run() == 75
    asking.join()
    assert "again" not in capfd.readouterr().err


def test_gpus_are_divided_and_never_given_twice():
    assert command.devices_per_process(4, None, {}, 8) == 2
    assert command.device_environment(1, 2, {}, 8) == {"JAX_LOCAL_DEVICE_IDS": "2,3"}
    with pytest.raises(UserError, match="can't be divided"):
        command.devices_per_process(3, None, {}, 8)
    with pytest.raises(UserError, match="needs 12 GPUs"):
        command.devices_per_process(4, 3, {}, 8)
    simulated = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8"}
    assert command.devices_per_process(3, None, simulated, 8) == 1
    flags = command.device_environment(0, 2, simulated, 8)["XLA_FLAGS"]
    assert flags == "--a=1 --xla_force_host_platform_device_count=2"


def test_the_launcher_keeps_its_place_in_the_run_to_itself(capsys):
    with pytest.raises(UserError, match="set by the launcher"):
        command.launch(["--processes", "2", "--", "--config", "run.py", "--process", "1"])
    with pytest.raises(SystemExit):
        command.launch(["--processes", "2", "--config", "run.py"])
    assert "behind --" in capsys.readouterr().err
