"""A run on a mesh, with shapes in place of arrays: its roles, its programs, and what it keeps on each device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import config as configs
from jaxrl_llm import packing
from jaxrl_llm.algorithms import find_algorithm
from jaxrl_llm.algorithms.interface import Algorithm
from jaxrl_llm.config import RunConfig
from jaxrl_llm.device_groups import DeviceGroups
from jaxrl_llm.hybrid_engine import received_bytes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.pipeline import Schedule
from jaxrl_llm.plan.abstract_roles import AbstractRoles, with_shardings
from jaxrl_llm.plan.device_kinds import PlannedDevices
from jaxrl_llm.plan.programs import Generation, Program, device_bytes, update_program
from jaxrl_llm.roles import Model, pack_lengths
from jaxrl_llm.sharding import TRAINING, batch_shards, generation_view
from jaxrl_llm.types import Params
from jaxrl_llm.update import RoleState


class NoTokenizer:
    """A plan reads no tokenizer; this one has nothing that the checks of a model could object to."""

    eos_token_id, pad_token_id = 0, None

    def __len__(self) -> int:
        return 0

    def get_vocab(self) -> dict[str, int]:
        return {}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What one run is on one mesh.

    Attributes:
      shape: of the policy.
      generation: None for an algorithm that generates nothing.
    """

    config: RunConfig
    algorithm: Algorithm
    mesh: Mesh
    dtype: Any
    shape: ModelConfig
    models: dict[str, Model]
    states: dict[str, RoleState]
    row_shape: packing.RowShape
    generation: Generation | None

    @classmethod
    def of(cls, config: RunConfig, shape: ModelConfig, planned: PlannedDevices) -> Setup:
        """
        Args:
          config: with its mesh.

        Raises:
          UserError: the model doesn't fit the configuration or the mesh.
        """
        configs.check_against_model(config, shape, NoTokenizer())
        groups = DeviceGroups.of(config, planned.devices)
        mesh = groups.policy
        algorithm = find_algorithm(config.algorithm.name)
        dtype = jnp.dtype(compute_dtype(config, planned))
        if planned.kind.chip is not None and config.model.layers == "auto":  # also where CPUs stand in
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers="loop"))
        models, states = AbstractRoles(config, algorithm, groups, dtype, total_steps=1).build()
        main = algorithm.main_role(config.algorithm.options).name
        row_shape = packing.RowShape.of(
            config.training.row_tokens,
            config.training.micro_batch_tokens,
            batch_shards(mesh),
            models[main].forward.schedule,
        )
        generation = None
        if algorithm.generates:
            rollout = config.rollout
            if planned.simulated and rollout.attention == "auto":  # dense copies are for real CPUs
                rollout = dataclasses.replace(rollout, attention="xla")
            decoder = models[main].decoder
            context = min(configs.longest_sequence(config), decoder.config.max_position)
            generation = Generation(decoder, generation_view(mesh, rollout.tensor).mesh, rollout, context, dtype)
        return cls(config, algorithm, mesh, dtype, shape, models, states, row_shape, generation)

    @property
    def main(self) -> str:
        """The role that generates."""
        return self.algorithm.main_role(self.config.algorithm.options).name

    @property
    def trained(self) -> list[str]:
        return [name for name, model in self.models.items() if model.update is not None]

    @property
    def schedule(self) -> Schedule | None:
        """Of the pipeline's stages; None without."""
        return self.models[self.main].forward.schedule

    @property
    def micro_batches(self) -> int:
        """The most that an update can need: the first dimension of its rows."""
        return packing.micro_batches_for(*pack_lengths(self.config, self.algorithm), self.row_shape)

    def update(self, role: str) -> Program:
        model, options = self.models[role], self.config.algorithm.options
        divergence = self.algorithm.divergence(options)
        teacher = None if divergence is None else self.states[divergence.role].whole
        assert model.update is not None
        return update_program(
            model.update,
            self.states[role],
            self.row_shape,
            self.micro_batches,
            self.mesh,
            teacher=teacher,
            extras=self.algorithm.extras(options),
        )

    def programs(self) -> dict[str, Program]:
        """Those whose memory and traffic decide: every role's update, the largest decode dispatch and prefill."""
        found = {f"update of {role}": self.update(role) for role in self.trained}
        if self.generation is not None:
            found |= {"decode": self.generation.decode(), "prefill": self.generation.prefill()}
        return found

    # --- what lies on a device --------------------------------------------------------------------------------

    def parameter_bytes(self) -> int:
        """Of what is trained."""
        return device_bytes([self.states[role].params for role in self.trained])

    def optimizer_bytes(self) -> int:
        return device_bytes([self.states[role].opt_state for role in self.trained])

    def frozen_bytes(self) -> int:
        """Of roles that are not trained and of the base under adapters, which roles share."""
        frozen = [state.params for role, state in self.states.items() if role not in self.trained]
        return device_bytes([frozen, [state.base for state in self.states.values()]])

    def gradient_bytes(self, role: str) -> int:
        """In float32, while an update of the role runs."""
        return device_bytes(self.states[role].params)

    @functools.cached_property
    def layout(self) -> LayoutBytes:
        """What the change to the generation layout writes and receives."""
        if self.generation is None:
            return LayoutBytes(0, 0, 0)
        decoder, state = self.models[self.main].decoder, self.states[self.main]
        targets, sources = self.generation.params, self._arranged(decoder)
        new = moved = 0
        known: dict[Any, int] = {}  # layers are alike, and there are many
        stages = self.mesh.shape["pipeline"]
        moving = jax.tree.leaves(_groups(sources, stages, "pipeline"))
        for source, target in zip(moving, jax.tree.leaves(_groups(targets, stages, None)), strict=True):
            key = source.shape, source.dtype, source.sharding.spec, target.sharding.spec
            if key not in known:
                known[key] = received_bytes(source.shape, source.dtype.itemsize, source.sharding, target.sharding)
            moved += known[key]
        same_dtype = jax.tree.leaves(state.whole)[0].dtype == self.dtype
        for name, target in targets.items():
            for one_source, one_target in zip(jax.tree.leaves(sources[name]), jax.tree.leaves(target), strict=True):
                shared = name != "layers" and same_dtype and one_source.sharding == one_target.sharding
                new += 0 if shared else device_bytes(one_target)
        bucket = min(self.config.hybrid_engine.bucket_bytes // self.mesh.size, device_bytes(sources))
        passing = bucket + device_bytes(sources["layers"][0])
        if stages > 1:  # a matrix of a layer of each stage is there as a whole before it is cut
            passing += stages * max(device_bytes(leaf) for leaf in jax.tree.leaves(targets["layers"][0]))
        return LayoutBytes(new, passing, moved // self.mesh.size)

    def _arranged(self, decoder: Decoder) -> Params:
        """The generation arrangement and dtype, still sharded as in training."""
        assert self.generation is not None
        weight_dtype = self.config.rollout.weight_dtype
        shardings = TRAINING.shardings(self.mesh, decoder.generation_axes(weight_dtype))
        return with_shardings(self.generation.params, shardings)


def _groups(generation: Params, stages: int, axis: str | None) -> Params:
    """The arrays as they are moved: in a pipeline one layer of each stage together, stacked and split over ``axis``."""
    if stages == 1:
        return generation

    def group(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(axis, *leaf.sharding.spec))
        return jax.ShapeDtypeStruct((stages, *leaf.shape), leaf.dtype, sharding=sharding)

    layers = generation["layers"][: len(generation["layers"]) // stages]
    return {**generation, "layers": jax.tree.map(group, layers)}


@dataclasses.dataclass(frozen=True)
class LayoutBytes:
    """Of one device.

    Attributes:
      new: of the generation layout, what it does not share with the training layout.
      passing: at most in a bucket and a layer on its way.
      received: from other devices, on average.
    """

    new: int
    passing: int
    received: int


def compute_dtype(config: RunConfig, planned: PlannedDevices) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if planned.kind.chip is None else "bfloat16"
