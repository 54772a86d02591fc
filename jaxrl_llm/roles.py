"""The models of a run, one for each role of its algorithm: where they come from, and the programs that use them.

Only what the algorithm asks for is built. A frozen role costs its parameters in the compute dtype; the reference of a
policy with adapters is the base under them and costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import parameter_overview
from jax.sharding import Mesh

from jaxrl_llm import optimizer as optimizers
from jaxrl_llm import processes, update
from jaxrl_llm.algorithms.interface import Algorithm, Role
from jaxrl_llm.checkpoint import Checkpoints, holds_checkpoints
from jaxrl_llm.config import RunConfig, longest_sequence
from jaxrl_llm.device_groups import DeviceGroups
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora as adapters
from jaxrl_llm.models.classifier import load_classifier
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.loading import init_model, load_model
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.pipeline import Schedule
from jaxrl_llm.models.value_head import add_value_head
from jaxrl_llm.sharding import TRAINING, batch_shards
from jaxrl_llm.types import Params
from jaxrl_llm.update import Forward, RoleState, logits_at_once
from jaxrl_llm.validation import uneven_layers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Model:
    """What a role's parameters are used with.

    Attributes:
      forward: of packed rows.
      update: the jitted optimizer update; None for a role that is not trained.
      saved: whether checkpoints hold the role. One that is read from its source again, or is another's base, is not.
      mesh: where its parameters are, and the rows that it reads.
      programs: those of all roles of the run, so that two that read alike compile one.
    """

    role: Role
    forward: Forward
    update: Callable[..., Any] | None
    saved: bool
    mesh: Mesh = dataclasses.field(kw_only=True, repr=False)
    programs: dict[Any, Callable[..., Any]] = dataclasses.field(
        kw_only=True, repr=False, compare=False, default_factory=dict
    )

    @property
    def decoder(self) -> Decoder:
        return self.forward.decoder

    @property
    def logprobs(self) -> Callable[..., Any]:
        return self._program(update.make_logprobs)

    @property
    def values(self) -> Callable[..., Any]:
        return self._program(update.make_values)

    @property
    def both(self) -> Callable[..., Any]:
        return self._program(update.make_both)

    def _program(self, make: Callable[[Forward, Mesh], Callable[..., Any]]) -> Callable[..., Any]:
        key = make, self.forward, self.mesh
        if key not in self.programs:
            self.programs[key] = make(self.forward, self.mesh)
        return self.programs[key]


class RoleBuilder:
    """Makes the models and states of the roles, in order: later ones may start from the policy's first parameters.

    Args:
      dtype: of compute.
      total_steps: of the run, for the schedules.
      read_only: only what writes answers is made, without an optimizer.
      rest: brings a role that was made to where it stays, before the next is made: `Residence.rest`.
      sources: by role, the step of the checkpoint of another run that it was read from before; a role that is not in
        it takes the newest one.

    Attributes:
      sources: the same after `build`, of every role that was read from another run.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        groups: DeviceGroups,
        dtype: Any,
        total_steps: int,
        *,
        read_only: bool = False,
        rest: Callable[[str, RoleState], RoleState] = lambda name, state: state,
        sources: Mapping[str, int] | None = None,
    ):
        self._rest = rest
        self.sources = dict(sources or {})
        self.config, self.algorithm, self.groups, self.dtype = config, algorithm, groups, dtype
        self.mesh = groups.policy
        self.options = config.algorithm.options
        self.total_steps, self.read_only = total_steps, read_only
        model = config.model
        self.schedule = self._schedule(self.mesh)
        self._programs: dict[Any, Callable[..., Any]] = {}
        self.lora = Lora(model.lora_rank, model.lora_alpha, tuple(model.lora_targets)) if model.lora_rank else None

    def build(self) -> tuple[dict[str, Model], dict[str, RoleState]]:
        """Every role's model and resting state.

        Raises:
          UserError: a path is not a model, or models don't fit together.
        """
        self.decoder, self.start = self._load_start(self.mesh, jnp.float32 if self.lora is None else self.dtype)
        self._bases = {self.mesh: self.start}
        logger.info(
            "%s: %d parameters",
            self.config.model.path or "from scratch",
            parameter_overview.count_parameters(self.start),
        )
        logger.debug(parameter_overview.get_parameter_overview(self.start, include_stats=False))
        if self.schedule is not None:
            logger.info(
                "%d stages and %d micro-batches at once: stages are idle %.1f %% of the time in the layers",
                self.schedule.stages,
                self.schedule.micro_batches,
                100 * self.schedule.bubble,
            )
        roles = self.algorithm.roles(self.options)
        main = self.algorithm.main_role(self.options)
        if self.read_only:
            # Where several roles write an answer together, all of them are used.
            writers = [role for role in roles if role.trained and role.head != "values"]
            roles = tuple(writers) if self.algorithm.answer is not None else (main,)
        models: dict[str, Model] = {}
        states: dict[str, RoleState] = {}
        # The main role takes the first parameters over, so the others copy them before.
        for role in sorted(roles, key=lambda role: role == main):
            models[role.name], state = self._make(role, models, last=role == main)
            states[role.name] = self._rest(role.name, state)
            del state  # what rests in the host's memory is free on the devices from here
        del self.start, self._bases
        return models, states

    # --- one role ---------------------------------------------------------------------------------------------

    def _make(self, role: Role, models: dict[str, Model], last: bool) -> tuple[Model, RoleState]:
        mesh = self.groups.mesh(role.section)
        decoder, params, own = self._parameters(role, last)
        if role.head != "tokens" and "value_head" not in params:
            headed = self._headed(decoder, params)
            params = headed if role.head == "values" else {**params, **headed}
        trained = role.trained and not self.read_only
        base = None
        if role.trained and self.lora is not None:
            decoder = decoder.with_lora(self.lora)
            base, params = self._split(decoder, params, role)
        forward = self._forward(decoder, role)
        divergence = self.algorithm.divergence(self.options)
        if divergence is not None and role.trained and divergence.role in models:
            if divergence.top_k > decoder.config.vocab_size:
                raise UserError(
                    f"algorithm.top_k = {divergence.top_k}: the vocabulary has {decoder.config.vocab_size} tokens. "
                    "Give at most as many, or 0 for all."
                )
            forward = dataclasses.replace(forward, divergence=divergence, teacher=models[divergence.role].forward)
        if not trained:
            model = Model(role, forward, None, saved=own or role.trained, mesh=mesh, programs=self._programs)
            return model, RoleState(params, base=base)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        settings = self.config.critic.optimizer if role.section == "critic" else self.config.optimizer
        steps = max(self.total_steps - self.algorithm.rests(self.options, self.config, role), 0)
        transformation = optimizers.make_optimizer(settings, steps * updates_per_step(self.config))
        on_host = self.config.hybrid_engine.offload_optimizer
        state, state_shardings = self._first_state(params, transformation, shardings, mesh, on_host)
        leaves, tree = jax.tree.flatten(state_shardings)
        key = forward, self.algorithm.loss_of(role.name), settings, steps, mesh, tree, tuple(leaves)
        self._programs[key] = program = update.make_update(
            forward,
            self.algorithm,
            self.options,
            transformation,
            settings.clip_norm,
            state_shardings,
            mesh,
            name=role.name,
            like=self._programs.get(key),
        )
        model = Model(role, forward, program, saved=True, mesh=mesh, programs=self._programs)
        return model, dataclasses.replace(state, base=base)

    def _parameters(self, role: Role, last: bool) -> tuple[Decoder, Params, bool]:
        """A role's decoder and first parameters, in float32 where all of them are trained, and whether they are its
        own."""
        path = self._path(role)
        if path:
            whole = role.trained and self.lora is None
            decoder, params = self._load(path, jnp.float32 if whole else self.dtype, role)
            return decoder, params, False
        mesh, dtype = self.groups.mesh(role.section), jnp.float32 if role.trained else self.dtype
        if last or (self.lora is not None):
            # Adapters leave their base alone, so that all roles of a block can have the same one.
            if mesh not in self._bases:
                self._bases[mesh] = self._load_start(mesh, self.dtype)[1]
            return self.decoder, self._bases[mesh], last
        if mesh is not self.mesh:
            return self.decoder, self._load_start(mesh, dtype)[1], True
        # A copy of its own: the policy's buffers are donated by the first update.
        return self.decoder, self._copy_of_start(dtype), True

    # What makes arrays, apart from loading: a plan of a run has shapes in their place.

    def _copy_of_start(self, dtype: Any) -> Params:
        return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), self.start)

    def _headed(self, decoder: Decoder, params: Params) -> Params:
        return add_value_head(decoder, params)

    def _first_state(
        self, params: Params, transformation: Any, shardings: Any, mesh: Mesh, moments_on_host: bool
    ) -> tuple[RoleState, RoleState]:
        return update.init_role(params, transformation, shardings, mesh, moments_on_host=moments_on_host)

    def _split(self, decoder: Decoder, params: Params, role: Role) -> tuple[Params, Params]:
        """The base, which stays as it is, and what is trained, in float32: adapters, and a value head."""
        assert self.lora is not None
        key = jax.random.fold_in(jax.random.key(self.config.seed), zlib.crc32(role.name.encode()))
        shardings = TRAINING.shardings(self.groups.mesh(role.section), adapters.logical_axes(decoder, self.lora))
        make = jax.jit(functools.partial(adapters.init, decoder, self.lora), out_shardings=shardings)
        base = {name: value for name, value in params.items() if name != "value_head"}
        head = {name: value for name, value in params.items() if name == "value_head"}
        return base, {**make(key), **jax.tree.map(lambda leaf: leaf.astype(jnp.float32), head)}

    def _forward(self, decoder: Decoder, role: Role) -> Forward:
        config, mesh = self.config, self.groups.mesh(role.section)
        return Forward(
            decoder,
            temperature=(config.rollout.temperature or 1.0) if self.algorithm.generates else 1.0,
            dtype=self.dtype,
            remat=config.model.remat,
            unroll={"auto": None, "loop": False, "unrolled": True}[config.model.layers],
            chunk_tokens=logits_at_once(config.training, mesh) * batch_shards(mesh),
            vocab_chunk=config.training.logprob_vocab_chunk,
            head=role.head,
            schedule=self._schedule(mesh),
            sequence_parallel=config.training.sequence_parallel and mesh.shape["tensor"] > 1,
        )

    def _schedule(self, mesh: Mesh) -> Schedule | None:
        training = self.config.training
        return Schedule.of(mesh.shape["pipeline"], training.pipeline_micro_batches, training.pipeline_repeats)

    # --- where parameters come from ---------------------------------------------------------------------------

    def _path(self, role: Role) -> str:
        section = role.section
        if section == "policy":
            return ""
        if section == "teacher" and not self.config.teacher.path:
            raise UserError(
                f"teacher.path is empty, and {self.algorithm.name} learns from a teacher: give a model with the "
                "policy's tokenizer."
            )
        return getattr(self.config, section).path

    def _load_start(self, mesh: Mesh, dtype: Any) -> tuple[Decoder, Params]:
        """The policy's decoder and first parameters in the training layout of a block. For another block than the
        policy's they are read or drawn once more: the same ones, and nothing has to cross."""
        model = self.config.model
        if model.architecture:
            key = jax.random.key(self.config.seed)
            decoder, params = init_model(model.architecture, key, mesh=mesh, layout=TRAINING, vocab_multiple=0)
            return decoder, jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        with processes.agreement():  # each process reads the files itself
            return load_model(model.path, mesh=mesh, layout=TRAINING, dtype=dtype, vocab_multiple=0)

    def _load(self, path: str, dtype: Any, role: Role) -> tuple[Decoder, Params]:
        mesh = self.groups.mesh(role.section)
        if role.head == "tokens" and holds_checkpoints(path):
            template = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
                self.start,
                TRAINING.shardings(mesh, self.decoder.logical_axes()),
            )
            with contextlib.closing(
                Checkpoints(pathlib.Path(path), self.config.checkpoint, read_only=True)
            ) as checkpoints:
                pinned = self.sources.get(role.name)
                try:
                    step, params = checkpoints.restore_params("policy", template, pinned)
                except UserError as error:
                    which = "its newest checkpoint"
                    if pinned is not None:
                        which = f"its checkpoint after step {pinned}, which this run has read from the beginning,"
                    raise UserError(
                        f"{role.section}.path = {path!r}: {which} is not a whole policy of the shape of "
                        f"model.path = {self.config.model.path!r}. Of another model, of a run with adapters or of one "
                        f"without a policy, export it and give that folder. {error}"
                    ) from error
            self.sources[role.name] = step
            logger.info("%s: the checkpoint after step %d of %s", role.name, step, path)
            return self.decoder, params
        where: Any = {"mesh": mesh, "layout": TRAINING, "dtype": dtype, "vocab_multiple": 0}
        load = functools.partial(load_classifier, new_head=True) if role.head == "values" else load_model
        with processes.agreement():
            decoder, params = load(path, **where)
        if uneven := uneven_layers(self.config, decoder.config.num_layers, path, role.section):
            raise UserError(f"{role.section}.path: {uneven}")
        if decoder.config.vocab_size != self.decoder.config.vocab_size:
            raise UserError(
                f"{role.section}.path = {path!r} has {decoder.config.vocab_size} vocabulary rows and the policy "
                f"{self.decoder.config.vocab_size}: it must read the policy's tokens. Give a model of its family."
            )
        return decoder, params


def updates_per_step(config: RunConfig) -> int:
    """Updates of a trained role in a step, of a full batch."""
    return -(-config.train_batch_size // config.training.mini_batch_size) * config.training.epochs


def pack_lengths(config: RunConfig, algorithm: Algorithm) -> tuple[int, int]:
    """How many sequences an optimizer update usually has, and the longest one's tokens."""
    per_prompt = config.rollout.samples_per_prompt if algorithm.generates else 1
    if algorithm.data == "preference":
        per_prompt = 2
    return config.training.mini_batch_size * per_prompt, longest_sequence(config)


def mean_or_max(found: list[dict[str, float]]) -> dict[str, float]:
    """One figure of several updates: the mean, of ``…_max`` the largest."""
    names = dict.fromkeys(name for one in found for name in one)
    return {
        name: float((max if name.endswith("_max") else np.mean)([one[name] for one in found if name in one]))
        for name in names
    }
