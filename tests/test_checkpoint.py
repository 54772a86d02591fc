"""Checkpoints: as saved, the last ones and the best, and never named before they are complete."""

import functools
import os
import pathlib
import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import CheckpointConfig
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.update import RoleState


def make_state(value: float):
    return {
        "policy": RoleState({"w": jnp.full((4, 2), value)}, {"m": jnp.full(3, value / 3), "count": jnp.int32(7)}),
        "reference": RoleState({"w": jnp.full((4, 2), value, jnp.bfloat16)}),
    }


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    yield made
    made.close()


def test_values_and_dtypes_come_back_as_saved(checkpoints):
    """C03. Caught: moments stored in bfloat16; a role without optimizer that gains one."""
    state = make_state(0.1)
    checkpoints.save(3, state, {"data": {"epoch": 1}}, {})
    checkpoints.wait()
    restored = checkpoints.restore(make_state(0.0))
    assert restored.step == 3 and restored.host == {"data": {"epoch": 1}}
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)
    assert jax.tree.map(lambda leaf: leaf.dtype, restored.state) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_parameters_alone_can_be_read(checkpoints):
    """Caught: a model that can only be used together with its optimizer state; a step that is saved twice."""
    state = make_state(0.1)
    checkpoints.save(3, state, {}, {})
    checkpoints.save(3, make_state(0.5), {}, {})  # the same step again is the same state: nothing to do
    checkpoints.wait()
    step, params = checkpoints.restore_params("policy", {"w": jnp.zeros((4, 2))})
    assert step == 3
    np.testing.assert_array_equal(params["w"], state["policy"].params["w"])


def test_donated_buffers_do_not_reach_a_save_in_progress(checkpoints):
    """C09. Caught: a save that reads the buffers after it has returned."""
    state = {"policy": RoleState({"w": jnp.zeros(2_000_000)})}
    step = jax.jit(functools.partial(jax.tree.map, lambda leaf: leaf + 1), donate_argnums=0)
    for done in range(1, 7):
        state = step(state)
        if done == 3:
            checkpoints.save(done, state, {}, {})
    checkpoints.wait()
    restored = checkpoints.restore({"policy": RoleState({"w": jnp.zeros(2_000_000)})}, 3)
    np.testing.assert_array_equal(restored.state["policy"].params["w"], 3.0)


def test_a_save_that_fails_in_the_background_is_told(checkpoints):
    """C09, with files that may not grow as on a full disk. Caught: a failure that nobody waits for; a traceback from
    inside the writer; a checkpoint counted that was not written."""
    state = {"policy": RoleState({"w": jax.random.normal(jax.random.key(0), (500_000,))})}
    checkpoints.save(1, state, {}, {})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        checkpoints.save(2, state, {}, {})
        with pytest.raises(RunStopped, match=r"can't be written to .* newest complete one is of step 1"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.latest_step() == 1
    checkpoints.save(3, state, {}, {})
    checkpoints.wait()
    assert checkpoints.latest_step() == 3


def test_the_best_is_kept_beside_the_last_ones(checkpoints):
    """Caught: best_fn with max_to_keep, which deletes the latest checkpoints; only the last ones."""
    for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.2, 0.2], start=1):
        checkpoints.save(step, make_state(step), {}, {"eval/accuracy": accuracy} if step != 4 else {})
    checkpoints.wait()
    assert sorted(checkpoints._manager.all_steps()) == [2, 4, 5]
    assert checkpoints.latest_step() == 5


def test_a_checkpoint_that_does_not_fit_is_refused(checkpoints):
    """One paragraph that names the folder, not a traceback from inside. Caught: either error passed on as it came."""
    checkpoints.save(1, make_state(1.0), {}, {})
    checkpoints.wait()
    with pytest.raises(UserError, match="does not fit"):
        checkpoints.restore({"policy": RoleState({"other": jnp.zeros(3)})})
    with pytest.raises(UserError, match="step 9"):
        checkpoints.restore(make_state(0.0), 9)


# Orbax leaves the other reads of a failed restore to themselves; they may end when its event loop is closed.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [pathlib.Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_damaged_checkpoint_is_refused_with_the_way_on(checkpoints, damage):
    """Caught: tensorstore's own error, pages of its specification, for a file of numbers that is cut or gone."""
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {}, {})
    checkpoints.wait()
    numbers = [file for file in (checkpoints.directory / "2" / "state").rglob("d/*") if file.is_file()]
    for file in numbers:
        damage(file)
    with pytest.raises(
        UserError, match=r"2: this checkpoint .* damaged, delete its folder to go on from another \(1\)"
    ):
        checkpoints.restore(make_state(0.0))
    assert checkpoints.restore(make_state(0.0), 1).step == 1


def test_a_flipped_byte_among_the_numbers_is_found(checkpoints):
    """Read whole and for the parameters alone. Caught: no sums (numbers that nobody has saved,
    without a word)."""
    state = {"policy": RoleState({"w": jax.random.normal(jax.random.key(0), (50_000,))}, {"m": jnp.zeros(3)})}
    checkpoints.save(1, state, {}, {})
    checkpoints.wait()
    file = max((checkpoints.directory / "1" / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged file\): the bits of \['policy'\]\.params\['w'\]"):
        checkpoints.restore(jax.tree.map(jnp.zeros_like, state))
    with pytest.raises(UserError, match=r"damaged file\): the bits of \['w'\]"):
        checkpoints.restore_params("policy", {"w": jnp.zeros(50_000)})


@pytest.mark.parametrize("call", ["save", "wait_until_finished"])
def test_a_save_that_fails_stops_the_run_with_what_is_kept(checkpoints, monkeypatch, call):
    """A full disk, as orbax tells it: at once or when it is asked the next time. Caught: pages of its own error."""
    checkpoints.save(1, make_state(1.0), {}, {})
    checkpoints.wait()

    def fail(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nSource locations: …")

    monkeypatch.setattr(checkpoints._manager, call, fail)
    with pytest.raises(RunStopped, match=r"No space left on device Nothing .* newest complete one is of step 1.*room"):
        checkpoints.save(2, make_state(2.0), {}, {})
        checkpoints.wait()
    monkeypatch.undo()


def test_a_folder_that_cannot_be_made_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    """A file or a link to nowhere in its place, no rights to it. Caught: orbax's traceback, or a step whose save then
    fails; threads of its that are left behind and may hold the program's end."""
    before = set(threading.enumerate())
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoints").touch()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "checkpoints").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(UserError, match=rf"{name}/checkpoints: .* can't be made \(File exists\)\. Move away"):
            Checkpoints(tmp_path / name, CheckpointConfig())
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match="for want of rights"):
        Checkpoints(tmp_path / "closed", CheckpointConfig())
    assert set(threading.enumerate()) == before


def test_an_unfinished_save_is_not_a_checkpoint(tmp_path):
    """Caught: a folder that counts as complete because it exists."""
    made = Checkpoints(tmp_path, CheckpointConfig())
    made.save(1, make_state(1.0), {}, {})
    made.wait()
    made.close()
    unfinished = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "state").mkdir()
    for read_only in (True, False):  # the second may delete it
        again = Checkpoints(tmp_path, CheckpointConfig(), read_only=read_only)
        assert again.latest_step() == 1
        again.close()
