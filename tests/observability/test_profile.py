"""A profile of a step is one option away."""

import jax
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.trainer import Trainer
from tests.test_trainer import exact, make_config


def names_in(file):
    data = jax.profiler.ProfileData.from_file(str(file))
    return {event.name.partition("#")[0] for plane in data.planes for line in plane.lines for event in line.events}


def test_the_profile_of_a_step_is_in_the_work_folder(tmp_path):
    """Of the steps asked for and no other, with the step and its phases by name; and the fraction of generation in
    which the device waited for the host is among the metrics.

    Caught: the step counted from 0; phases without a name.
    """
    changes = {"num_steps": 2, "profile_steps": (2,), "checkpoint.every_steps": 0, "checkpoint.save_final": False}
    config = make_config("builtin:addition/train", **changes)
    metrics = Trainer(config, tmp_path, rewards={"exact": exact}, devices=jax.devices()[:1]).train()
    assert [folder.name for folder in (tmp_path / "profile").iterdir()] == ["step_2"]
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert {"train", "layout", "generation", "reward", "pack", "update"} <= names_in(trace)
    assert 0 < metrics["perf/host_fraction"] < 1


def test_a_profile_needs_a_folder():
    """Before weights are loaded. Caught: the check left out."""
    config = make_config("builtin:addition/train", profile_steps=(1, 2))
    with pytest.raises(UserError, match=r"profile_steps = \(1, 2\).* --workdir"):
        Trainer(config, None, rewards={"exact": exact}, devices=jax.devices()[:1])
