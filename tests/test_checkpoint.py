"""Checkpoints: as saved, the last ones and the best, and never named before they are complete."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import CheckpointConfig
from jaxrl_llm.errors import UserError
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
