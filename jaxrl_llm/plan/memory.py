"""What lies on a device of each block in each phase of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.plan.device_kinds import MEMORY_MARGIN
from jaxrl_llm.plan.programs import device_bytes, shard_bytes
from jaxrl_llm.plan.setup import COMPARISON, READING, SCORES, Setup

POLICY = "policy"
"""The block of the policy's training; the others are named by the role that has given their sizes."""


@dataclasses.dataclass(frozen=True)
class BlockMemory:
    """Bytes of one device of a block.

    Attributes:
      parts: not all are there at the same time.
      phases: everything that lies on the device in a phase of a step.
      on_host: of its roles, what rests in the host's memory between uses.
      memory_bytes: of the device.
    """

    mesh: Mesh
    parts: dict[str, int]
    phases: dict[str, int]
    on_host: int
    memory_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= (1 - MEMORY_MARGIN) * self.memory_bytes


def memory_by_block(setup: Setup, temporaries: Mapping[str, int], memory_bytes: int) -> dict[str, BlockMemory]:
    """
    Args:
      temporaries: of the programs of `Setup.programs`, by name.
      memory_bytes: of a device.
    """
    blocks = {POLICY: setup.groups.policy, **setup.groups.apart}
    return {name: _block(setup, mesh, temporaries, memory_bytes) for name, mesh in blocks.items()}


def _block(setup: Setup, mesh: Mesh, temporaries: Mapping[str, int], memory_bytes: int) -> BlockMemory:
    roles, programs, static = setup.on(mesh), setup.programs, setup.config.hybrid_engine.kv_cache_policy == "static"
    trained = [role for role in roles if role in setup.trained]
    generation = setup.generation if setup.groups.mesh("generation") is mesh else None
    scorer = setup.reward_model if setup.groups.mesh("reward_model") is mesh else None
    layout, policy = setup.layout, mesh is setup.mesh
    pools = 0 if generation is None else device_bytes(generation.pools)
    scoring = 0 if scorer is None else device_bytes(scorer.params)
    copy = setup.sampler_bytes() if policy else 0
    # The base under adapters stays in the generation layout between steps.
    base = layout.new if generation is not None and setup.models[setup.main].decoder.lora is not None else 0
    always = scoring + base + (pools if static else 0)

    def there(used: str = "", whole: bool = False) -> int:
        """The roles, one of them in use: with its optimizer's state, if an update has that on the devices."""
        states = {role: _resting(setup, role) for role in roles}
        if used:
            state = setup.states[used]
            states[used] = [state.params, state.base, state.opt_state if whole else states[used][-1]]
        return device_bytes(states)

    parts = {
        "parameters": setup.parameter_bytes(mesh),
        "frozen models": setup.frozen_bytes(mesh),
        "optimizer": setup.optimizer_bytes(mesh),
    }
    phases: dict[str, int] = {}
    training = there() + always + copy
    if trained:
        gradients = {role: setup.gradient_bytes(role) for role in trained}
        kept = {role: temporaries[f"update of {role}"] for role in trained}
        rows = {role: _rows(setup, f"update of {role}", role) for role in trained}
        parts["gradients"] = max(gradients.values())
        parts["activations"] = max(kept[role] - gradients[role] for role in trained)
        parts["batch"] = max(rows.values())
        phases["update"] = max(there(role, whole=True) + always + copy + rows[role] + kept[role] for role in trained)
    readings = {one.name: one.role for one in setup.passes if one.role in roles}
    if policy and COMPARISON in programs:
        readings[COMPARISON] = ""  # of the copy, which is there
    if setup.apart_teacher in roles:
        readings[READING] = str(setup.apart_teacher)
    if readings:
        parts["log-probs"] = max(temporaries[name] for name in readings)
        phases["log-probs"] = max(
            there(role) + always + copy + device_bytes(programs[name].arguments[1]) + temporaries[name]
            for name, role in readings.items()
        )
    parts["copy of the policy that samples"] = copy
    if policy and setup.generation is not None:
        parts["layout change"] = layout.passing
        phases["layout change"] = training - copy + layout.passing + (0 if generation is None else layout.new - base)
    if generation is not None:
        decoding = max(temporaries.get(name, 0) for name in ("decode", "prefill"))
        decoding += device_bytes(programs["decode"].arguments[2])
        parts |= {"generation weights": layout.new, "KV pages": pools, "decoding": decoding}
        weights = there() + always - base + layout.new
        if not policy:
            parts["layout change"] = layout.arriving
            phases["layout change"] = weights + layout.arriving
        phases["generation"] = weights + (0 if static else pools) + decoding
    if scorer is not None:
        parts |= {"reward model": scoring, "scoring": temporaries[SCORES]}
        # While a step is sampled beside another, the sampler's parameters stay until the scores are there.
        weights = layout.new - base if generation is not None and setup.config.placement.staleness else 0
        phases["reward model"] = there() + always + weights + temporaries[SCORES]
    if not phases:  # a block that only holds
        phases["between steps"] = training
    on_host = shard_bytes([setup.states[role] for role in roles]) - there()
    return BlockMemory(mesh, parts, phases, on_host, memory_bytes)


def _rows(setup: Setup, name: str, role: str) -> int:
    """An optimizer batch on the devices, and what a teacher on others has said of it."""
    _, (_, teacher), rows, *_ = setup.programs[name].arguments
    return device_bytes(rows) + (device_bytes(teacher) if setup.apart_teacher is not None else 0)


def _resting(setup: Setup, role: str) -> list[Any]:
    """What is on the devices of a role between its uses, as `residence.Residence.rest` leaves it: parameters, base,
    optimizer state."""
    state, settings = setup.states[role], setup.config.hybrid_engine
    section = setup.models[role].role.section
    if (section == "reference" and settings.offload_reference) or (section == "critic" and settings.offload_critic):
        return [None, state.base, None]
    params: Any = state.params
    if section == "policy" and settings.offload_actor_layers:
        params = {**params, "blocks": jax.tree.map(_without(settings.offload_actor_layers), params["blocks"])}
    return [params, state.base, state.opt_state]


def _without(count: int) -> Any:
    """Of a stacked array, the layers behind the first ones."""

    def rest(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (leaf.shape[0] - count, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

    return rest
