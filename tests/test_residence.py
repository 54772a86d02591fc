"""What is offloaded rests in the host's memory, comes back bit for bit, and changes no result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm import residence
from jaxrl_llm.algorithms.interface import CRITIC, POLICY, REFERENCE
from jaxrl_llm.config import HybridEngineConfig, MeshConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hybrid_engine import HybridEngine
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.options import to_dict
from jaxrl_llm.residence import HOST, Residence
from jaxrl_llm.sharding import TRAINING, make_mesh
from jaxrl_llm.update import RoleState
from tests.test_trainer import make_config, rows_file, run
from tests.test_update import CONFIG

__all__ = ["rows_file"]

ROLES = {role.name: role for role in (POLICY, CRITIC, REFERENCE)}
OPTIONS = {"offload_optimizer": True, "offload_reference": True, "offload_critic": True, "offload_actor_layers": 1}
ALL_ON_HOST = {
    "offload_optimizer": {"policy/opt_state", "critic/opt_state"},
    "offload_reference": {"reference/params"},
    "offload_critic": {"critic/params", "critic/opt_state"},
    "offload_actor_layers": set(),
}


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def nbytes_by_kind(tree):
    """Bytes by memory kind, counted from the shards that are there."""
    found = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            kind = shard.data.sharding.memory_kind
            found[kind] = found.get(kind, 0) + shard.data.nbytes
    return found


@pytest.fixture(scope="module")
def states():
    """A mesh, a decoder, and the states of three roles with a stand-in for the optimizer's state."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    decoder = Decoder(CONFIG)
    params = jax.device_put(decoder.init(jax.random.key(0)), TRAINING.shardings(mesh, decoder.logical_axes()))
    moments = jax.tree.map(jnp.square, params)
    trained = {name: RoleState(params, moments) for name in ("policy", "critic")}
    return mesh, decoder, {**trained, "reference": RoleState(params)}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_moves_its_part_and_nothing_else(states, option):
    """On fsdp 2 x tensor 2. Caught: first layers joined behind the others."""
    mesh, _, roles = states
    stay = Residence(HybridEngineConfig(**{option: OPTIONS[option]}), ROLES, mesh)
    resting = {name: stay.rest(name, state) for name, state in roles.items()}
    parts = {
        f"{name}/{part}": getattr(state, part) for name, state in resting.items() for part in ("params", "opt_state")
    }
    assert {name for name, tree in parts.items() if kinds(tree) == {HOST}} == ALL_ON_HOST[option]
    moved = nbytes_by_kind(resting)[HOST]
    assert nbytes_by_kind(roles)["device"] - nbytes_by_kind(resting)["device"] == moved
    if option == "offload_actor_layers":
        blocks = nbytes_by_kind(roles["policy"].params["blocks"])["device"]
        assert moved == blocks // CONFIG.num_layers
    for name, state in roles.items():
        back = stay.use(resting[name])
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))
        used = dataclasses.replace(back, opt_state=None), dataclasses.replace(state, opt_state=None)
        same = jax.tree.map(lambda leaf, old: leaf.sharding.is_equivalent_to(old.sharding, leaf.ndim), *used)
        assert jax.tree.all(same) and kinds(used[0]) == {"device"}
        moments = "pinned_host" if option == "offload_optimizer" else "device"
        assert kinds(back.opt_state) <= {moments}


@pytest.mark.parametrize("layers", [1, 2])
def test_a_layout_change_reads_offloaded_layers_one_by_one(states, layers):
    """From resting parameters, two layers of two included, the same generation parameters."""
    mesh, decoder, roles = states
    settings = HybridEngineConfig(offload_actor_layers=layers)
    resting = Residence(settings, ROLES, mesh).rest("policy", roles["policy"])
    engine = HybridEngine(decoder, mesh, settings, jnp.float32)
    expected = engine.to_generation(roles["policy"].params)
    found = engine.to_generation(resting.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))
    assert HOST in kinds(resting.params) and kinds(found) == {"device"}


def config_of(rows, num_steps, **options):
    """PPO with a reference and a critic."""
    values = to_dict(make_config(rows))
    values["algorithm"] = {"name": "ppo", "kl_coef": 0.05}
    values["num_steps"] = num_steps
    values["training"]["mini_batch_size"] = 2
    values["optimizer"]["warmup_steps"] = 1
    values["reward_runner"]["num_workers"] = 1
    values["eval"]["before"] = values["eval"]["after"] = False
    values["hybrid_engine"].update(options)
    return configs.resolve(values)


def test_an_offloaded_run_is_saved_and_goes_on_without(rows_file, tmp_path):
    """One step with everything offloaded, saved, the next without: the figures of a step that never was, bit for bit,
    and the parameters and optimizer states of two within rounding.

    What rounds is the step in pieces: XLA:CPU computes the gradients of the embedding and of the value head in the
    kernel of the step where that is whole, and the last bit of 3 % of the former's entries is another (all layers and
    all moments are equal bit for bit; so is the step alone, `test_optimizer.py`). The second step's gradients then
    differ: by 4e-6 of the largest entry of an array in the end.
    """
    whole, told = run(config_of(rows_file, 2), tmp_path / "whole")
    first, told_first = run(config_of(rows_file, 1, **OPTIONS), tmp_path / "parts")
    assert HOST in kinds(first.roles["policy"].params) and kinds(first.roles["critic"]) == {HOST}
    figures = [name for name in told[1] if name.startswith(("loss/", "policy/", "critic/", "kl/"))]
    assert figures and {name: told_first[1][name] for name in figures} == {name: told[1][name] for name in figures}
    second, _ = run(config_of(rows_file, 2), tmp_path / "parts")
    for found, expected in zip(*map(jax.tree.leaves, jax.device_get((second.roles, whole.roles))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * np.abs(expected).max())


@pytest.mark.parametrize("option", OPTIONS)
def test_a_backend_without_such_memory_is_refused(states, monkeypatch, option):
    """With the option, the memory, the backend, what it has, and what to do."""
    monkeypatch.setattr(residence, "HOST", "moon")
    said = rf"hybrid_engine\.{option} keeps .* kind 'moon'.*backend 'cpu'.*theirs: .*pinned_host.* Switch it off"
    with pytest.raises(UserError, match=said):
        Residence(HybridEngineConfig(**{option: OPTIONS[option]}), ROLES, states[0])
