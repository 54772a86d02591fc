"""Runs of several processes give what one process gives, whatever happens to one of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import resolve
from jaxrl_llm.config_file import read_config
from jaxrl_llm.launch.supervisor import Supervisor
from jaxrl_llm.observability.metrics import read_lines, read_metrics
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.trainer import StepContext, Trainer

# The launcher imports no jax. Here others have, which warns of the fork; the child becomes another program at once.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])

CONFIG = """
import pytest

from jaxrl_llm.config import default_config

def get_config():
    config = default_config("grpo")
    config.num_steps = 3
    config.train_batch_size = 6
    config.model.path = "builtin:tiny_addition"
    config.model.layers = "loop"  # compiles fast
    config.data.train = "builtin:addition/train"
    config.data.max_prompt_tokens = 8
    config.rewards = {"exact": {"function": "FOLDER/reward.py:reward"}}
    config.reward_runner.num_workers = 1
    config.rollout.samples_per_prompt = 4
    config.rollout.max_new_tokens = 4
    config.rollout.num_slots = 8
    config.training.micro_batch_tokens = 128
    config.optimizer.name = "sgd"  # Adam would hide or magnify a difference
    config.optimizer.learning_rate = 1.0
    config.checkpoint.every_steps = 1
    config.checkpoint.keep = 9
    config.algorithm.kl_coef = 0.05  # a reference
    config.hybrid_engine.update(OFFLOAD)
    return config
"""

BLOCKS = """
    config.num_steps = 8  # fails in the seventh
    config.mesh.fsdp = config.placement.generation.fsdp = 2
    config.placement.staleness, config.placement.uncorrected = 1, True
    return config
"""

OFFLOAD = {"offload_optimizer": True, "offload_reference": True, "offload_actor_layers": 1}

REWARD = """
import os, pathlib, signal, time

here, process = pathlib.Path("FOLDER"), os.environ.get("JAXRL_PROCESS", "alone")
calls, trainer = 0, os.getppid()

def once(mark):
    try:
        (here / mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def reward(prompt, completion, answer):
    global calls
    calls += 1
    with (here / f"scored_{process}").open("a") as file:
        file.write(prompt + "\\n")
    if process == "1":
        if not (here / "killed").exists():
            if calls > 12 and once("killed"):  # in the second step: 12 samples each
                while not (here / "several" / "checkpoints" / "1").is_dir():  # of the first, written in the background
                    time.sleep(0.05)
                os.kill(trainer, signal.SIGKILL)
                os._exit(1)
        elif once("asked"):
            os.kill(trainer, signal.SIGTERM)
    return float(completion == answer)
"""


def write_run(
    folder: pathlib.Path, reward: str = REWARD, *, offload: dict[str, int] | None = None, name: str = "run.py"
) -> pathlib.Path:
    """The configuration and its reward; returns the file of the former."""
    (folder / "reward.py").write_text(reward.replace("FOLDER", str(folder)))
    (folder / name).write_text(CONFIG.replace("FOLDER", str(folder)).replace("OFFLOAD", str(offload or {})))
    return folder / name


@dataclasses.dataclass(frozen=True)
class Alone:
    """A run of this process by itself, with four devices: its folder, and its parameters before and after."""

    folder: pathlib.Path
    trainer: Trainer
    start: np.ndarray
    end: np.ndarray

    def require_equal(self, folder: pathlib.Path, trainer: Trainer) -> None:
        """Of another run: the same samples and rewards in all steps, and the same parameters."""
        samples = [{row for row in told(path) if row[0] <= 3} for path in (folder, self.folder)]
        assert samples[0] == samples[1] and {step for step, *_ in samples[0]} == {1, 2, 3}
        rewards = [
            [row.get("reward/mean") for row in read_metrics(path) if row["step"] <= 3] for path in (folder, self.folder)
        ]
        assert rewards[0] == rewards[1]
        # Sums in another order round differently; the run itself moved them by much more.
        assert np.abs(self.end - self.start).max() > 1e-3
        assert np.abs(flat(trainer) - self.end).max() < 1e-5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    config = resolve(read_config(str(write_run(folder))))
    trainer = Trainer(config, folder / "run", devices=jax.devices()[:4])
    start = flat(trainer)
    trainer.train()
    return Alone(folder / "run", trainer, start, flat(trainer))


def test_one_that_is_killed_and_one_that_is_asked_to_end_change_nothing(tmp_path: pathlib.Path, alone: Alone):
    """Two processes with two devices each, which offload; process 1 is killed in step 2, and after the restart it alone
    gets SIGTERM. The last step is done by one process with four devices, which does not offload. Everything is as in a
    run of one process that nothing happened to and that never offloads.

    Caught: offloaded layers behind the others in a checkpoint."""
    file = write_run(tmp_path, offload=OFFLOAD)
    folder = tmp_path / "several"
    options = ["--processes", "2", "--devices-per-process", "2", "--grace-s", "1"]
    run = ["--config", str(file), "--workdir", str(folder)]
    launched = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.launch", *options, "--", *run],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert launched.returncode == 75, launched.stderr[-4000:]
    assert "process 1" in launched.stderr and "was ended by SIGKILL" in launched.stderr
    assert (tmp_path / "asked").exists() and (folder / "logs" / "process_1.log").exists()

    # Scored once, by one of them, each its half of the prompts.
    scored = [set((tmp_path / f"scored_{process}").read_text().splitlines()) for process in ("0", "1")]
    assert scored[0].isdisjoint(scored[1])
    done = max(row["step"] for row in read_lines(folder / "samples.jsonl"))
    assert done < 3
    assert scored[0] | scored[1] == {e.prompt for number in range(done) for e in alone.trainer.data.batch(number)}
    assert len(list((folder / "tensorboard").iterdir())) == 2  # one writer at each of two starts

    plain = write_run(tmp_path, name="plain.py")
    finished = Trainer(resolve(read_config(str(plain))), folder, devices=jax.devices()[:4])
    finished.train()
    alone.require_equal(folder, finished)


def test_four_two_in_stages_and_one_go_on_with_the_same_run(tmp_path: pathlib.Path, alone: Alone):
    """A step by four processes with one device each, the next by two with one pipeline stage each, the last by one:
    every checkpoint is read by another number of processes, on another mesh, than has written it. Then all are asked to
    answer with it.

    Caught: seeds of samples that depend on the number of processes; one process that scores for all."""
    file = write_run(tmp_path, REWARD.replace('process == "1"', "False"))  # nothing happens to anyone
    folder = tmp_path / "several"

    def launched(processes: int, command: str, *changes: str) -> subprocess.CompletedProcess[str]:
        options = ["--processes", str(processes), "--grace-s", "1", "--", command]
        run = ["--config", str(file), "--workdir", str(folder), *changes]
        done = subprocess.run(
            [sys.executable, "-m", "jaxrl_llm.launch", *options, *run],
            env={**os.environ, "PYTHONPATH": PATHS},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    launched(4, "train", "--config.num_steps=1")
    scored = [(tmp_path / f"scored_{process}").read_text().splitlines() for process in range(4)]
    assert [len(samples) for samples in scored] == [6] * 4  # of 6 prompts with 4 samples each
    assert set(collections.Counter(itertools.chain(*scored)).values()) == {4}
    assert len(list((folder / "tensorboard").iterdir())) == 1  # one writer
    launched(2, "train", "--config.num_steps=2", "--config.mesh.pipeline=2", "--config.mesh.fsdp=1")
    config = resolve(read_config(str(file)))
    finished = Trainer(config, folder, devices=jax.devices()[:1])
    finished.train()
    alone.require_equal(folder, finished)

    told = json.loads(launched(2, "generate", "--prompt", "3+4=").stdout.splitlines()[-1])
    reader = Trainer(config, folder, read_only=True, devices=jax.devices()[:1])
    assert reader.restore() and reader.step_index == 3
    assert told == {"prompt": "3+4=", "completions": reader.generate(["3+4="])[0]}
    reader.close()


def test_blocks_of_which_each_process_has_a_part(tmp_path: pathlib.Path, alone: Alone):
    """`placed.py` on two processes with two devices each: one of the block that learns, one of that which generates.
    Three steps are as with one block of one process: samples, rewards, parameters. In three more generation is a step
    ahead, as one thread of one process does it by hand.

    Caught: pieces of arrays that cross to another device; weights that stay with the generation block; threads that
    take no turns; an exchange between processes in the group of devices that an update uses meanwhile; an update that
    fails and keeps its turn."""
    file = write_run(tmp_path, REWARD.replace('process == "1"', "False"))
    file.write_text(file.read_text().replace("    return config", BLOCKS))
    folder = tmp_path / "several"
    environment = {"PYTHONPATH": PATHS, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "GLIBC_TUNABLES": ""}
    script = [sys.executable, str(ROOT / "tests" / "launch" / "placed.py"), str(file), str(folder)]
    code = Supervisor(script, [environment] * 2, tmp_path, grace_s=1.0, tries=1).run()
    assert code == 0, (tmp_path / "process_0.log").read_text() + (tmp_path / "process_1.log").read_text()

    reader = Trainer(resolve(read_config(str(file))), folder, read_only=True, devices=jax.devices()[:4])
    reader.restore(3)
    alone.require_equal(folder, reader)

    trainer, history, written = alone.trainer, [], told(folder)
    state, params = trainer.roles["policy"], reader.roles["policy"].params  # from here on: rounding would add up
    same = jax.tree.map(lambda own, leaf: jax.device_put(np.asarray(leaf), own.sharding), state.params, params)
    trainer.roles["policy"] = dataclasses.replace(state, params=same)
    metrics = {row["step"]: row for row in read_metrics(folder)}
    for step in (4, 5, 6):
        history.append(jax.tree.map(jnp.copy, trainer.roles["policy"].params))
        context = StepContext(trainer, PhaseTimer())
        rollouts = trainer.rollout.rollouts(history[max(step - 5, 0)], next(trainer.data), step=step - 1)
        trainer._learn({"policy": trainer.algorithm.prepare(context, rollouts)}, context.timer)
        trainer.step_index += 1
        uids = [rollouts.examples[owner].uid for owner in rollouts.group]
        samples = {(step, *sample) for sample in zip(uids, rollouts.texts, rollouts.rewards, strict=True)}
        assert 4 < len(written & samples) == len({row for row in written if row[0] == step})
        assert metrics[step]["rollout/staleness"] == float(step > 4)
        for name in ("reward/mean", "response/length_mean"):
            assert metrics[step][name] == rollouts.metrics[name], (step, name)
    trainer.close()
    reader.restore(6)
    assert np.abs(flat(trainer) - alone.end).max() > 1e-3
    assert np.abs(flat(trainer) - flat(reader)).max() < 1e-5


def told(folder: pathlib.Path) -> set[tuple[int, str, str, float]]:
    """Of each sample of a run: step, prompt, completion, reward."""
    return {(row["step"], row["uid"], row["completion"], row["reward"]) for row in read_lines(folder / "samples.jsonl")}


def flat(trainer: Trainer) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(trainer.roles["policy"].params)])


def test_processes_agree(tmp_path: pathlib.Path):
    """`agreeing.py` on two processes with three devices each. One that fails alone ends with its own code, soon, and
    not by an abort."""
    environment = {
        "PYTHONPATH": PATHS,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
        "GLIBC_TUNABLES": "",
    }
    start = time.monotonic()
    supervisor = Supervisor(
        [sys.executable, str(ROOT / "tests" / "launch" / "agreeing.py")], [environment] * 2, tmp_path, grace_s=1.0
    )
    assert supervisor.run() == 3, (tmp_path / "process_0.log").read_text() + (tmp_path / "process_1.log").read_text()
    assert time.monotonic() - start < 60
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("asked", [0, 1])
def test_where_nothing_is_to_be_saved_one_that_is_asked_ends_all(tmp_path: pathlib.Path, asked: int):
    """`ended.py` on two processes, which SIGTERM finds where Python runs no handler; process 0 has the coordinator.

    Caught: a handler of Python's; a process that ends without telling the others, which jax aborts later; one that
    does not wait until they have heard it; a command line that does none of it."""
    environment = {"PYTHONPATH": PATHS, "ASKED": str(asked), "BUSY_S": "60"}
    run = ["--config", str(ROOT / "configs" / "tiny_grpo.py"), "--config.processes.heartbeat_s=10"]
    script = [sys.executable, str(ROOT / "tests" / "launch" / "ended.py"), "generate", "--prompt", "1+2=", *run]
    start = time.monotonic()
    code = Supervisor(script, [environment] * 2, tmp_path, grace_s=1.0, tries=1).run()
    assert time.monotonic() - start < 60
    logs = [(tmp_path / f"process_{process}.log").read_text() for process in range(2)]
    assert code == 75, logs
    assert logs[asked].count("ended by SIGTERM: there was nothing to save") == 1
    assert logs[1 - asked].count("another process was ended by SIGTERM") == 1
