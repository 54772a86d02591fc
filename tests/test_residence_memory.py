"""Bytes on the devices with offloading: while a checkpoint is written and read, in generation, and in updates."""

import contextlib
import dataclasses
import gc

import jax
import numpy as np
import pytest

from jaxrl_llm import residence
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import CheckpointConfig, HybridEngineConfig, MeshConfig
from jaxrl_llm.residence import Residence
from jaxrl_llm.sharding import TRAINING, make_mesh
from jaxrl_llm.trainer import Trainer
from jaxrl_llm.update import RoleState
from tests.test_residence import OPTIONS, ROLES, config_of, nbytes_by_kind, states
from tests.test_trainer import exact, rows_file

__all__ = ["rows_file", "states"]


def device_bytes():
    """Of all arrays that are alive, in the devices' own memory; a buffer that two of a device share counts once. Of
    CPU devices, which have one memory, several may share one too."""
    gc.collect()
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    on_devices = [data for data in shards if data.sharding.memory_kind == "device" and data.nbytes]
    return sum({(data.device, data.unsafe_buffer_pointer()): data.nbytes for data in on_devices}.values())


def written_in_shares(saved):
    """Bytes of arrays on the devices that several of these hold alike: each device writes its share, which is a slice
    of its own until it is written. In a CPU's memory that slice counts as the device's."""
    leaves = [leaf for leaf in jax.tree.leaves(saved) if leaf.sharding.memory_kind == "device"]
    return sum(leaf.nbytes for leaf in leaves if nbytes_by_kind(leaf)["device"] > leaf.nbytes)


def watched(monkeypatch, owner, name, told):
    """Notes the devices' bytes before and after each call."""
    call = getattr(owner, name)

    def watching(*args, **kwargs):
        told.append(device_bytes())
        result = call(*args, **kwargs)
        told.append(device_bytes())
        return result

    monkeypatch.setattr(owner, name, watching)


@pytest.mark.parametrize("options", [OPTIONS, {"offload_actor_layers": 2}, {}], ids=["same", "two layers", "none"])
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 8, "tensor": 1}], ids=["same mesh", "fsdp 8"])
def test_a_checkpoint_goes_from_and_to_where_arrays_rest(states, tmp_path, monkeypatch, options, axes):
    """Saved with everything offloaded, read with other options on another mesh: the same bits, and on the devices at
    any time only what rests there.

    Caught: roles brought to the devices to be saved; a template without memory kinds; layers split on the devices.
    """
    mesh, decoder, roles = states
    stay = Residence(HybridEngineConfig(**OPTIONS), ROLES, mesh)
    resting = {name: stay.rest(name, state) for name, state in roles.items()}
    there = make_mesh(MeshConfig(data=1, **axes), jax.devices()[: axes["fsdp"] * axes["tensor"]])
    target = Residence(HybridEngineConfig(**options), ROLES, there)
    shardings = TRAINING.shardings(there, decoder.logical_axes())
    templates = {}
    for name, state in roles.items():
        moments = None if state.opt_state is None else jax.device_put(state.opt_state, shardings)
        moved = RoleState(jax.device_put(state.params, shardings), moments)
        templates[name] = target.template(target.rest(name, moved))
        del moved, moments
    told = []
    with contextlib.closing(Checkpoints(tmp_path, CheckpointConfig())) as checkpoints:
        for call in ("save", "restore"):
            watched(monkeypatch, checkpoints._manager, call, told)
        monkeypatch.setattr(residence, "_split_program", None)
        monkeypatch.setattr(residence, "_join_program", None)
        before = device_bytes()
        saved = {name: stay.saved(state) for name, state in resting.items()}
        checkpoints.save(1, saved, {}, {})
        checkpoints.wait()
        assert told == [before, before + written_in_shares(saved)]
        assert device_bytes() == before
        restored = checkpoints.restore(templates).state
        if not options.get("offload_actor_layers") or options == OPTIONS:
            read = {name: target.rest(name, restored.pop(name)) for name in list(restored)}
            assert told[3] <= before + nbytes_by_kind(read)["device"] == device_bytes()
        else:
            monkeypatch.undo()
            read = {name: target.rest(name, restored.pop(name)) for name in list(restored)}
    monkeypatch.undo()
    for name, state in roles.items():
        back = target.use(read[name])
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))
        assert jax.tree.leaves(back)[0].sharding.mesh == there


def bytes_by_phase(monkeypatch, config):
    """A step's bytes on one device when generation ends and when each role's update begins; what the run's parts take
    wherever they are; and the trainer."""
    before = device_bytes()
    trainer = Trainer(config, None, rewards={"exact": exact}, devices=jax.devices()[:1])
    found, engine = {}, trainer.rollout.engine
    generate = engine.generate

    def generating(*args, **kwargs):
        completions = generate(*args, **kwargs)
        found["generation"] = device_bytes() - before
        found["pools"] = sum(pool.nbytes for pool in jax.tree.leaves(engine._pools))
        return completions

    monkeypatch.setattr(engine, "generate", generating)
    for name in ("policy", "critic"):
        update = trainer.models[name].update

        def updating(*args, name=name, update=update, **kwargs):
            found[name] = device_bytes() - before
            return update(*args, **kwargs)

        trainer.models[name] = dataclasses.replace(trainer.models[name], update=updating)
    trainer.train()
    return found, trainer


def test_generation_and_each_update_have_the_devices_for_themselves(rows_file, monkeypatch):
    """A PPO step with everything offloaded and pages that are freed, beside one with neither: what is missing on the
    device is, to the byte, what the options name.

    Caught: a role that stays on the devices after its update; moments of the policy that stay with the critic's update;
    pages kept with `kv_cache_policy` ``dynamic``.
    """
    whole, trainer = bytes_by_phase(monkeypatch, config_of(rows_file, 1))
    size = {name: sum(nbytes_by_kind(state).values()) for name, state in trainer.roles.items()}
    moments, of_critic = (sum(nbytes_by_kind(trainer.roles[name].opt_state).values()) for name in ("policy", "critic"))
    blocks = trainer.roles["policy"].params["blocks"]
    layer = sum(nbytes_by_kind(blocks).values()) // trainer.decoder.config.num_layers
    del trainer, blocks
    parts, _ = bytes_by_phase(monkeypatch, config_of(rows_file, 1, **OPTIONS, kv_cache_policy="dynamic"))
    saved = {phase: whole[phase] - parts[phase] for phase in ("generation", "critic", "policy")}
    assert whole["pools"] == parts["pools"] > 0
    assert saved == {
        "generation": moments + layer + size["reference"] + size["critic"],
        "critic": moments + of_critic + layer + size["reference"] + whole["pools"],
        "policy": moments + size["reference"] + size["critic"] + whole["pools"],
    }
