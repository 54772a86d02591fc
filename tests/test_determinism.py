"""The same bits on a GPU: XLA's flag is there before the devices are, or the run is refused."""

import os

import jax
import pytest
from jax._src import xla_bridge

from jaxrl_llm import main, trainer
from jaxrl_llm.determinism import require_deterministic
from jaxrl_llm.errors import UserError
from jaxrl_llm.launch import joining
from tests.test_trainer import make_config

FLAG = "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(
    ("before", "after"),
    [("", FLAG), ("--a=1 --b=2", f"--a=1 --b=2 {FLAG}"), ("--xla_gpu_deterministic_ops=false --a=1", f"--a=1 {FLAG}")],
)
def test_the_flag_is_set_beside_others(monkeypatch, before, after):
    """Caught: other flags lost; a flag that says false left in place."""
    monkeypatch.setenv("XLA_FLAGS", before)
    require_deterministic()  # devices have been started, but CPUs
    assert os.environ["XLA_FLAGS"] == after
    require_deterministic()
    assert os.environ["XLA_FLAGS"] == after


def test_gpus_that_run_without_it_are_refused(monkeypatch):
    """Caught: the flag set where XLA no longer reads it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(UserError, match=r"deterministic = True: the GPUs .* started without"):
        require_deterministic()
    assert os.environ["XLA_FLAGS"] == ""
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    require_deterministic()
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    require_deterministic()
    assert os.environ["XLA_FLAGS"] == FLAG


def test_a_run_asks_for_it_before_its_devices(monkeypatch):
    """On the command line before processes join, which starts the devices; in a notebook before the mesh. Caught: the
    call left out, in either; a call without the option."""
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    seen = []

    def join(*arguments, **options):
        seen.append(os.environ["XLA_FLAGS"])
        raise UserError("enough")

    monkeypatch.setattr(joining, "join", join)
    for options in ([], ["--config.deterministic=True"]):
        assert main.main(["--config", "configs/tiny_grpo.py", *options]) == 2
    assert seen == ["--a=1", f"--a=1 {FLAG}"]

    def refuse():
        raise UserError("asked for")

    def start():
        raise UserError("devices")

    monkeypatch.setattr(trainer, "require_deterministic", refuse)
    monkeypatch.setattr(jax, "devices", start)
    for deterministic, what in ((True, "asked for"), (False, "devices")):
        with pytest.raises(UserError, match=what):
            trainer.Trainer(make_config("builtin:addition/train", deterministic=deterministic))
