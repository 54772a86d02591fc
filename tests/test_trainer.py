"""The whole path on the shipped tiny model: resume equals no interruption, same seed same run, bad input."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm import processes
from jaxrl_llm.errors import Preempted, RunStopped, UserError
from jaxrl_llm.launch.ending import left_to_training
from jaxrl_llm.trainer import Trainer, _compute_dtype
from jaxrl_llm.workdir import Workdir

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 10) for b in range(5, 6)]  # 7 rows


def exact(prompt, completion, answer):
    return float(completion == answer)


def written(folder):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture
def rows_file(tmp_path):
    return written(tmp_path)


def make_config(rows_file, **changes):
    """Three steps of two prompts an epoch, so that six steps cross its border."""
    config = configs.default_config("grpo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["data"].update(train=str(rows_file), max_prompt_tokens=8)
    config["rewards"] = {"exact": {}}
    config.update(num_steps=6, train_batch_size=2)
    config["rollout"].update(samples_per_prompt=4, max_new_tokens=4, num_slots=8)
    config["training"].update(mini_batch_size=1, row_tokens=16, micro_batch_tokens=64)
    config["optimizer"].update(learning_rate=1e-3, warmup_steps=4)
    config["checkpoint"].update(every_steps=3)
    config["mesh"].update(fsdp=1)
    for name, value in changes.items():
        *parents, last = name.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        section[last] = value
    return configs.resolve(config)


def run(config, workdir, *, devices=1, steps=None):
    """Trains (only up to `steps`) and returns the trainer, closed, and its metrics by step."""
    trainer = Trainer(config, workdir, rewards={"exact": exact}, devices=jax.devices()[:devices])
    if steps is not None:
        trainer.total_steps = steps
    trainer.train()
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return trainer, {line["step"]: line for line in lines}


DETERMINISTIC = ("loss/total", "reward/mean", "policy/grad_norm", "response/length_mean", "kl/mean")


def assert_equal_runs(first, second, first_metrics, second_metrics, steps):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first.roles), jax.device_get(second.roles))
    for step in steps:
        for name in DETERMINISTIC:
            assert first_metrics[step].get(name) == second_metrics[step].get(name), (step, name)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """One that nothing happens to, which the others end as."""
    folder = tmp_path_factory.mktemp("whole")
    return run(make_config(written(folder)), folder / "run")


@pytest.fixture(scope="module")
def whole_run_with_kl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole_with_kl")
    return run(make_config(written(folder), **{"algorithm.kl_coef": 0.05}), folder / "run")


@pytest.mark.parametrize("stop_after", [2, 3], ids=["middle of an epoch", "border of an epoch"])
def test_resume_equals_no_interruption(rows_file, tmp_path, stop_after, whole_run_with_kl):
    """Bit for bit, with a reference model, warm-up and Adam (C01, C05, C07, C11, D05).

    Caught: a data position that is not restored; an optimizer count or moments that start again; a reference
    copied from the resumed policy (KL of 0); sampling keys counted from the start of the process.
    """
    config = make_config(rows_file, **{"algorithm.kl_coef": 0.05, "checkpoint.every_steps": stop_after})
    whole, expected = whole_run_with_kl
    _, before = run(config, tmp_path / "parts", steps=stop_after)
    assert max(before) == stop_after
    resumed, after = run(config, tmp_path / "parts")
    assert sorted(step for step in after if step) == [1, 2, 3, 4, 5, 6]
    assert_equal_runs(whole, resumed, expected, after, range(1, 7))
    assert expected[6]["kl/mean"] > 0


def test_same_seed_same_run_and_another_seed_another(rows_file, tmp_path):
    """Caught: seeds from the clock; a seed that the sampler ignores (the rows come in the file's order here)."""
    in_order = {"data.shuffle": False}
    first, first_metrics = run(make_config(rows_file, **in_order), tmp_path / "a")
    second, second_metrics = run(make_config(rows_file, **in_order), tmp_path / "b")
    assert_equal_runs(first, second, first_metrics, second_metrics, range(1, 7))
    # After the first steps nothing is compiled. Caught: a denominator that is static in the update.
    assert [first_metrics[step]["compile/count"] for step in range(3, 7)] == [0.0] * 4
    other, _ = run(make_config(rows_file, seed=1, **in_order), tmp_path / "c")
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), first.roles["policy"].params, other.roles["policy"].params)
    assert not jax.tree.all(same)


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("cpu", None, "float32"),
        ("gpu", "6.1", "float32"),  # Pascal
        ("gpu", "7.5", "float32"),  # Turing
        ("gpu", "8.0", "bfloat16"),  # Ampere, the first whose matrix instructions take it
        ("gpu", "9.0", "bfloat16"),
        ("gpu", "12.0", "bfloat16"),
        ("gpu", "gfx942", "bfloat16"),  # AMD
        ("tpu", None, "bfloat16"),
    ],
)
def test_auto_computes_in_bfloat16_where_the_device_can(platform, capability, expected):
    """A named dtype is taken as it is. Caught: bfloat16 before Ampere; an option that `auto`'s rule overrides."""

    @dataclasses.dataclass(frozen=True)
    class Device:
        platform: str
        id: int = 0
        process_index: int = 0

    device = Device(platform)
    if capability is not None:  # not every device tells one
        object.__setattr__(device, "compute_capability", capability)
    mesh = jax.sharding.Mesh(np.array([device], object), ("data",))
    assert _compute_dtype("auto", mesh) == np.dtype(expected)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[expected]
    assert _compute_dtype(other, mesh) == np.dtype(other)


def test_a_checkpoint_continues_on_another_mesh(rows_file, tmp_path, whole_run):
    """Caught: restoring without the shardings of the new run."""
    whole, expected = whole_run
    run(make_config(rows_file), tmp_path / "parts", steps=3)
    axes = {"mesh.fsdp": 2, "mesh.pipeline": 2}
    meshed = make_config(rows_file, **axes, **{"training.pipeline_micro_batches": 2})
    resumed, after = run(meshed, tmp_path / "parts", devices=4)
    difference = jax.tree.map(
        lambda a, b: np.abs(a - b).max(),
        jax.device_get(whole.roles["policy"].params),
        jax.device_get(resumed.roles["policy"].params),
    )
    # Three Adam steps at 1e-3 move a parameter by up to 3e-3; another mesh changes sums by float rounding, which
    # Adam magnifies where a gradient is near zero.
    assert max(jax.tree.leaves(difference)) < 5e-4
    assert after[4]["reward/mean"] == expected[4]["reward/mean"]


def test_sigterm_saves_and_resumes(rows_file, tmp_path, whole_run):
    """Caught: a signal that ends the run without a checkpoint; a handler that is left behind."""
    config = make_config(rows_file, **{"checkpoint.every_steps": 0})
    calls = []

    trainer = Trainer(config, tmp_path / "run", rewards={"exact": exact}, devices=jax.devices()[:1])
    original = trainer.step

    def step_then_terminate(examples):
        calls.append(len(calls))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(examples)

    trainer.step = step_then_terminate
    with pytest.raises(Preempted):
        trainer.train()
    assert len(calls) == 2
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed, metrics = run(config, tmp_path / "run")
    whole, expected = whole_run
    assert_equal_runs(whole, resumed, expected, metrics, range(1, 7))


def test_sigterm_before_the_first_step_ends_the_run_without_one(rows_file, tmp_path):
    """In the first evaluation. Caught: a first step that is begun."""
    config = make_config(rows_file, **{"data.eval": str(rows_file)})
    trainer = Trainer(config, tmp_path / "run", rewards={"exact": exact}, devices=jax.devices()[:1])
    trainer.evaluate = lambda: os.kill(os.getpid(), signal.SIGTERM) or {}
    trainer.step = None
    with pytest.raises(Preempted, match="Before step 1"):
        trainer.train()
    assert not left_to_training.is_set()


def test_sigterm_during_the_last_save_does_not_lose_it(rows_file, tmp_path):
    """Caught: the handler taken back before the last checkpoint is complete, so that the signal ends the process."""
    config = make_config(rows_file, num_steps=1)
    trainer = Trainer(config, tmp_path / "run", rewards={"exact": exact}, devices=jax.devices()[:1])
    original = trainer.close

    def close_while_terminated():
        os.kill(os.getpid(), signal.SIGTERM)
        original()

    trainer.close = close_while_terminated
    leaked = []
    previous = signal.signal(signal.SIGTERM, lambda *_: leaked.append("SIGTERM"))
    try:
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not leaked
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


def test_a_process_of_several_does_not_end_by_sigterm_before_the_others(monkeypatch):
    """After the last step each waits for all. Caught: the handler of before put back, by which this process would have
    ended."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(processes, "count", lambda: 2)
    trainer = Trainer.__new__(Trainer)
    trainer._preempted = threading.Event()
    try:
        with trainer._sigterm(then_ends=False):
            pass
        assert signal.getsignal(signal.SIGTERM) is before  # a program that goes on must still be able to end
        with trainer._sigterm(then_ends=True):
            os.kill(os.getpid(), signal.SIGTERM)
        assert trainer._preempted.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_finished_run_says_so(rows_file, tmp_path):
    """Caught: exit 0 with nothing done."""
    run(make_config(rows_file), tmp_path / "run")
    with pytest.raises(UserError, match="num_steps"):
        run(make_config(rows_file), tmp_path / "run")


def test_a_run_of_epochs_can_be_made_longer(rows_file, tmp_path):
    """Caught: another number of epochs taken for another run; advice to raise num_steps, which must then be 0."""
    epochs = {"num_steps": 0, "data.num_epochs": 1}
    _, metrics = run(make_config(rows_file, **epochs), tmp_path / "run")
    assert max(metrics) == 3
    with pytest.raises(UserError, match=r"data\.num_epochs=1: .* Raise data\.num_epochs"):
        run(make_config(rows_file, **epochs), tmp_path / "run")
    _, metrics = run(make_config(rows_file, **{**epochs, "data.num_epochs": 2}), tmp_path / "run")
    assert sorted(step for step in metrics if step) == [1, 2, 3, 4, 5, 6]


def test_another_configuration_does_not_continue_a_run(rows_file, tmp_path):
    """Caught: continuing with a changed learning rate as if nothing had happened."""
    run(make_config(rows_file), tmp_path / "run", steps=1)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate"):
        run(make_config(rows_file, **{"optimizer.learning_rate": 1e-4}), tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_the_run(rows_file, tmp_path):
    """Caught: a step that is saved before it is checked; a check of the reward alone."""
    config = make_config(rows_file, **{"algorithm.entropy_coef": 1e38, "checkpoint.every_steps": 1})
    trainer = Trainer(config, tmp_path / "run", rewards={"exact": exact}, devices=jax.devices()[:1])
    with pytest.raises(RunStopped, match="last checkpoint is good"):
        trainer.train()
    assert trainer.checkpoints.latest_step() is None
    trainer.close()


def test_metrics_leave_out_an_update_without_a_trained_token(rows_file):
    """Of two updates the second has only samples that no reward applies to. Caught: its zeros in the means (a ratio of
    0.5 and half the entropy)."""

    def first_only(prompt, completion, answer):
        return float(len(completion)) if prompt == "1+2=" else None

    trainer = Trainer(make_config(rows_file), None, rewards={"exact": first_only}, devices=jax.devices()[:1])
    metrics, rollouts = trainer.step(trainer.examples(["1+2=", "3+4="], ["3", "7"]))
    trainer.close()
    assert np.isnan(rollouts.rewards).tolist() == [False] * 4 + [True] * 4
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)  # the first update is on policy


def test_a_decoder_that_disagrees_stops_the_run(rows_file, tmp_path, monkeypatch):
    """Caught: a difference that is reported but bounds nothing; a trainer at a fixed temperature."""
    trainer = Trainer(make_config(rows_file), None, rewards={"exact": exact}, devices=jax.devices()[:1])
    complete = trainer.rollout.complete

    def at_another_temperature(*args, **kwargs):
        return complete(*args, **{**kwargs, "temperature": 0.8})

    monkeypatch.setattr(trainer.rollout, "complete", at_another_temperature)
    with pytest.raises(RunStopped, match="logprob_diff"):
        trainer.step(next(trainer.data))
    trainer.close()


def test_grpo_learns_from_completions_of_8_bit_weights(tmp_path):
    """14 steps on additions, no bound in the way: the reward rises (0.40 to 0.62 when this was written; so few steps
    without learning vary by less than 0.1), the difference of the two policies is reported and is no float rounding
    (3e-7 with the exact weights), and the layers of the sampler take about a quarter.

    Caught: the option not passed on to the hybrid engine; the bounds of exact weights (1e-4, 1e-2) kept; no metrics of
    the rollout correction.
    """
    config = configs.default_config("grpo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["data"].update(train="builtin:addition/train", max_prompt_tokens=8)
    config["rewards"] = {"exact": {"function": "exact_match"}}
    config.update(num_steps=14, train_batch_size=32)
    config["rollout"].update(max_new_tokens=4, num_slots=256, tokens_per_dispatch=4, weight_dtype="int8")
    config["training"].update(mini_batch_size=16, micro_batch_tokens=512)  # small programs run faster on a CPU
    config["optimizer"].update(learning_rate=3e-4, weight_decay=0.0)
    config["checkpoint"].update(every_steps=0, save_final=False)
    config["mesh"].update(fsdp=1)
    trainer, metrics = run(configs.resolve(config), tmp_path)
    rewards = [metrics[step]["reward/mean"] for step in range(1, 15)]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1, rewards
    for step in range(1, 15):
        assert 1e-4 < metrics[step]["rollout/logprob_diff_mean"] < 0.1
        assert metrics[step]["rollout/logprob_diff_mean"] < metrics[step]["rollout/logprob_diff_max"]
        assert abs(metrics[step]["rollout_corr/kl"]) <= metrics[step]["rollout/logprob_diff_mean"]
    blocks = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.roles["policy"].params["blocks"]))
    assert blocks / 4 < metrics[1]["layout/copied_bytes"] < blocks / 3.5  # scales and norms are float32


def test_a_run_that_failed_before_its_first_step_may_be_changed(rows_file, tmp_path):
    """Caught: a folder that is refused because a mistyped option was once tried in it."""
    wrong = make_config(rows_file, **{"data.max_prompt_tokens": 31, "training.row_tokens": 0})
    with pytest.raises(UserError, match="max_prompt_tokens"):
        Trainer(wrong, tmp_path / "run", rewards={"exact": exact}, devices=jax.devices()[:1])
    assert not (tmp_path / "run").exists()
    wrong = make_config(rows_file, **{"optimizer.learning_rate": 0.1})
    lock = threading.Lock()
    with pytest.raises(
        UserError, match="exact"
    ):  # a reward that no worker can be sent, when the folder is taken already
        Trainer(wrong, tmp_path / "run", rewards={"exact": lambda **columns: lock}, devices=jax.devices()[:1])
    assert (tmp_path / "run" / "config.json").exists()
    _, metrics = run(make_config(rows_file), tmp_path / "run", steps=1)
    assert 1 in metrics


@pytest.mark.parametrize("content", ['{"architectures": ["LlamaForCausalLM"]}', "{", "[]"])
@pytest.mark.parametrize("results", [False, True])
def test_a_config_of_something_else_is_not_overwritten(rows_file, tmp_path, content, results):
    """Caught: the config.json of a model's folder given as --workdir replaced by the run's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(content)
    if results:
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"holds a config\.json that no run of this version has written"):
        Workdir(folder, make_config(rows_file))
    assert (folder / "config.json").read_text() == content


def test_a_folder_that_cannot_be_written_to_is_named(rows_file):
    """Caught: the lock's OSError. No user, root included, may make a file in /proc/self."""
    with pytest.raises(UserError, match=r"--workdir=/proc/self can't be written to"):
        Workdir("/proc/self", make_config(rows_file))


KILLED = """
import os, pathlib, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/kernels"]
import tests.conftest
import jax
from tests.test_trainer import Trainer, exact, make_config

config = make_config(pathlib.Path({rows!r}), **{{"checkpoint.every_steps": 1}})
trainer = Trainer(config, {workdir!r}, rewards={{"exact": exact}}, devices=jax.devices()[:1])
learn = trainer._learn

def killed_in_the_fourth_update(*arguments):
    if trainer.step_index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return learn(*arguments)

trainer._learn = killed_in_the_fourth_update
trainer.train()
"""


def test_a_killed_run_resumes_to_the_same_end(rows_file, tmp_path, whole_run):
    """SIGKILL in the middle of a step. Caught: reward workers left behind, which hold its output open; a run that saves
    only at its end."""
    root = str(pathlib.Path(__file__).parent.parent)
    script = KILLED.format(root=root, rows=str(rows_file), workdir=str(tmp_path / "killed"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert (tmp_path / "killed" / "checkpoints" / "2").is_dir()  # the third was perhaps not complete
    config = make_config(rows_file, **{"checkpoint.every_steps": 1})
    resumed, metrics = run(config, tmp_path / "killed")
    whole, expected = whole_run
    assert_equal_runs(whole, resumed, expected, metrics, range(1, 7))
