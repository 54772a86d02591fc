"""A run on its blocks of devices, with shapes in place of arrays: its roles, its programs, and its layout change."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm import packing, update
from jaxrl_llm.algorithms import find_algorithm
from jaxrl_llm.algorithms.interface import Algorithm
from jaxrl_llm.config import RunConfig
from jaxrl_llm.device_groups import DeviceGroups
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.pipeline import Schedule
from jaxrl_llm.plan.abstract_roles import AbstractRoles
from jaxrl_llm.plan.device_kinds import PlannedDevices
from jaxrl_llm.plan.layout import LayoutBytes, layout_change
from jaxrl_llm.plan.passes import Pass, passes
from jaxrl_llm.plan.programs import Generation, Program, device_bytes, reading_program, update_program
from jaxrl_llm.plan.reward_model import PlannedScorer
from jaxrl_llm.roles import Model, pack_lengths
from jaxrl_llm.sharding import GENERATION, TRAINING, batch_sharding, batch_shards, generation_view
from jaxrl_llm.types import Params
from jaxrl_llm.update import RoleState, TeacherReading


class NoTokenizer:
    """A plan reads no tokenizer; this one has nothing that the checks of a model could object to."""

    eos_token_id, pad_token_id = 0, None

    def __len__(self) -> int:
        return 0

    def get_vocab(self) -> dict[str, int]:
        return {}


COMPARISON = "log-probs of the sampler"
"""The program that compares the decoder with the trainer, of the parameters that `placement.staleness` keeps."""

READING = "reading of the teacher"
SCORES = "scores of the reward model"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What one run is on its devices.

    Attributes:
      mesh: of the policy.
      shape: of the policy.
      row_shapes: of the blocks that read training rows.
      generation: None for an algorithm that generates nothing.
      passes: log-probs and values that a step computes apart from its updates.
      reward_model: None without.
    """

    config: RunConfig
    algorithm: Algorithm
    groups: DeviceGroups
    dtype: Any
    shape: ModelConfig
    models: dict[str, Model]
    states: dict[str, RoleState]
    row_shapes: dict[Mesh, packing.RowShape]
    generation: Generation | None
    passes: tuple[Pass, ...]
    reward_model: PlannedScorer | None

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
        algorithm = find_algorithm(config.algorithm.name)
        dtype = jnp.dtype(compute_dtype(config, planned))
        if planned.kind.chip is not None and config.model.layers == "auto":  # also where CPUs stand in
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers="loop"))
        models, states = AbstractRoles(config, algorithm, groups, dtype, total_steps=1).build()
        main = algorithm.main_role(config.algorithm.options).name
        training = config.training
        row_shapes = {
            model.mesh: packing.RowShape.of(
                training.row_tokens, training.micro_batch_tokens, batch_shards(model.mesh), model.forward.schedule
            )
            for model in models.values()
        }
        generation = scorer = None
        if algorithm.generates:
            rollout = config.rollout
            if planned.simulated and rollout.attention == "auto":  # dense copies are for real CPUs
                rollout = dataclasses.replace(rollout, attention="xla")
            decoder = models[main].decoder
            context = min(configs.longest_sequence(config), decoder.config.max_position)
            view = generation_view(groups.mesh("generation"), rollout.tensor)
            layout = GENERATION if config.hybrid_engine.enable_3d_resharding else TRAINING
            generation = Generation(decoder, view.mesh, rollout, context, dtype, layout)
        if config.reward_model.path:
            scorer = PlannedScorer.of(config.reward_model, groups.mesh("reward_model"), dtype)
        found = passes(config, algorithm)
        return cls(config, algorithm, groups, dtype, shape, models, states, row_shapes, generation, found, scorer)

    @property
    def mesh(self) -> Mesh:
        return self.groups.policy

    @property
    def row_shape(self) -> packing.RowShape:
        """Of the policy's update."""
        return self.row_shapes[self.mesh]

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
    def teacher(self) -> str | None:
        """The role that an update reads whole distributions of."""
        divergence = self.algorithm.divergence(self.config.algorithm.options)
        return None if divergence is None or divergence.role not in self.models else divergence.role

    @property
    def apart_teacher(self) -> str | None:
        """The same where it is on devices of its own, and what it says is brought to the policy."""
        teacher = self.teacher
        return None if teacher is None or self.models[teacher].mesh is self.mesh else teacher

    def micro_batches(self, shape: packing.RowShape) -> int:
        """The most that an update can need: the first dimension of its rows."""
        return packing.micro_batches_for(*pack_lengths(self.config, self.algorithm), shape)

    # --- its programs -----------------------------------------------------------------------------------------

    @functools.cached_property
    def programs(self) -> dict[str, Program]:
        """Those whose memory and traffic decide: every role's update, what is computed of its rows before, the
        largest decode dispatch and prefill, and the largest batch of a reward model."""
        found = {f"update of {role}": self.update(role) for role in self.trained}
        found |= {one.name: self._pass(one.role, one.kind) for one in self.passes}
        if self.config.placement.staleness:
            found[COMPARISON] = self._pass(self.main, "logprobs", self.sampler)
        if self.apart_teacher is not None:
            found[READING] = self._reading(self.apart_teacher)
        if self.generation is not None:
            found |= {"decode": self.generation.decode(), "prefill": self.generation.prefill()}
        if self.reward_model is not None:
            found[SCORES] = self.reward_model.program
        return found

    def update(self, role: str) -> Program:
        model = self.models[role]
        shape = self.row_shapes[model.mesh]
        teacher: Any = None
        if self.apart_teacher is not None:
            teacher = self._said(self.apart_teacher)
        elif self.teacher is not None:
            teacher = self.states[self.teacher].whole
        assert model.update is not None
        return update_program(
            model.update,
            self.states[role],
            shape,
            self.micro_batches(shape),
            model.mesh,
            teacher=teacher,
            extras=self.algorithm.extras(self.config.algorithm.options),
        )

    def _pass(self, role: str, kind: str, params: Params | None = None) -> Program:
        model = self.models[role]
        shape = self.row_shapes[model.mesh]
        params = self.states[role].whole if params is None else params
        return reading_program(getattr(model, kind), params, shape, self.micro_batches(shape), model.mesh)

    def _reading(self, teacher: str) -> Program:
        """What a teacher on devices of its own computes of the rows of the policy's update."""
        model, divergence = self.models[teacher], self.algorithm.divergence(self.config.algorithm.options)
        assert divergence is not None
        program = update.make_reading(model.forward, divergence, model.mesh)
        count = self.micro_batches(self.row_shape)
        return reading_program(program, self.states[teacher].whole, self.row_shape, count, model.mesh)

    def _said(self, teacher: str) -> TeacherReading:
        """The same on the policy's devices, with the output weight where it is needed."""
        reading, forward = self._reading(teacher), self.models[teacher].forward
        with jax.set_mesh(reading.mesh):
            said = jax.eval_shape(reading.function, *reading.arguments)
        split = batch_sharding(self.mesh, ndim=4, row_dimension=1)
        said = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split), said)
        if said.hidden is None:
            return said
        shape = jax.eval_shape(forward.decoder.output_weight, self.states[teacher].whole).shape
        sharding = TRAINING.sharding(self.mesh, ("vocab", "embed"))
        return dataclasses.replace(said, weight=jax.ShapeDtypeStruct(shape, forward.dtype, sharding=sharding))

    # --- what lies on a device --------------------------------------------------------------------------------

    @functools.cached_property
    def sampler(self) -> Params:
        """The parameters that sample while a step learns (`placement.staleness`), kept in the compute dtype."""
        state = self.states[self.main]
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.dtype, sharding=leaf.sharding), state.params
        )
        return dataclasses.replace(state, params=params, opt_state=None).whole

    def sampler_bytes(self) -> int:
        """Of those, what is a copy: the base under adapters is shared."""
        if not self.config.placement.staleness:
            return 0
        base = jax.tree.leaves(self.states[self.main].base)
        known = {id(leaf) for leaf in base}
        return device_bytes([leaf for leaf in jax.tree.leaves(self.sampler) if id(leaf) not in known])

    def parameter_bytes(self, mesh: Mesh | None = None) -> int:
        """Of what is trained on a block, the policy's by default."""
        return device_bytes([self.states[role].params for role in self._trained_on(mesh)])

    def optimizer_bytes(self, mesh: Mesh | None = None) -> int:
        return device_bytes([self.states[role].opt_state for role in self._trained_on(mesh)])

    def frozen_bytes(self, mesh: Mesh | None = None) -> int:
        """Of roles of a block that are not trained and of the base under adapters, which roles share."""
        here = {role: self.states[role] for role in self.on(mesh)}
        frozen = [state.params for role, state in here.items() if role not in self.trained]
        return device_bytes([frozen, [state.base for state in here.values()]])

    def gradient_bytes(self, role: str) -> int:
        """In float32, while an update of the role runs."""
        return device_bytes(self.states[role].params)

    def on(self, mesh: Mesh | None = None) -> list[str]:
        """The roles of a block, the policy's by default."""
        return [role for role, model in self.models.items() if model.mesh is (mesh or self.mesh)]

    def _trained_on(self, mesh: Mesh | None) -> list[str]:
        return [role for role in self.on(mesh) if role in self.trained]

    @functools.cached_property
    def layout(self) -> LayoutBytes:
        """What the change to the generation layout writes and receives."""
        if self.generation is None:
            return LayoutBytes(0, 0, 0)
        params = self.states[self.main].whole
        bucket_bytes = self.config.hybrid_engine.bucket_bytes
        return layout_change(self.generation, params, self.mesh, bucket_bytes, apart=self.groups.generation is not None)


def compute_dtype(config: RunConfig, planned: PlannedDevices) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if planned.kind.chip is None else "bfloat16"
