"""The jitted programs of training: one optimizer update, and log-probs of given tokens.

Both walk over the micro-batches of a `MiniBatch` in a loop with a trip count given at run time, so that every step,
however full, runs the same compiled program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_kernels.token_divergence.api import token_divergence, top_k_divergence
from jaxrl_llm import optimizer as optimizers
from jaxrl_llm import processes
from jaxrl_llm.algorithms.interface import Algorithm, Divergence, Objective
from jaxrl_llm.config import TrainingConfig
from jaxrl_llm.host_memory import host_sharding
from jaxrl_llm.models import pipeline
from jaxrl_llm.models.arrangement import merge_trees
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.placement import DATA_AXIS, splitting_axes
from jaxrl_llm.models.value_head import token_values
from jaxrl_llm.sharding import batch_sharding, replicated
from jaxrl_llm.types import MiniBatch, Params, Rows, TokenOutputs, ValueOutputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoleState:
    """One role in the training layout.

    Attributes:
      params: what is trained, or all of a role that is not.
      opt_state: None for a role that is not trained.
      base: what a role with adapters shares with others and never changes; None otherwise.
    """

    params: Params
    opt_state: Any = None
    base: Any = None

    @property
    def whole(self) -> Params:
        """All parameters, for a forward pass; no copy."""
        return self.params if self.base is None else merge_trees(self.base, self.params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TeacherReading:
    """What a divergence takes of a teacher: of one micro-batch or, with a dimension before the others, of all.

    Attributes:
      hidden: ``[R, T, D]``, the states by the column that they predict; None with candidates.
      weight: ``[V, D]``, the teacher's output weight, of all micro-batches; None with candidates.
      candidates: ids and log-probs ``[R, T, k]`` of its likeliest tokens.
    """

    hidden: Any = None
    weight: Any = None
    candidates: Any = None

    def at(self, index: Int[Array, ""]) -> TeacherReading:
        """One micro-batch."""
        return dataclasses.replace(self, **_micro_batch({"hidden": self.hidden, "candidates": self.candidates}, index))


def logits_at_once(config: TrainingConfig, mesh: Mesh) -> int:
    """Tokens whose logits exist at one time on a device (`training.logprob_chunk_tokens`, whose 0 asks the mesh)."""
    if config.logprob_chunk_tokens:
        return config.logprob_chunk_tokens
    return 256 if mesh.devices.flat[0].platform == "cpu" else 1024


@dataclasses.dataclass(frozen=True)
class Forward:
    """How a policy reads packed rows: the model and what its outputs depend on besides parameters.

    Attributes:
      temperature: logits are divided by it, the sampler's rule.
      dtype: of the forward pass; parameters are cast once, before the loop over micro-batches, so that
        gathered weights and their gradients move in this dtype.
      remat, unroll, schedule, sequence_parallel: see `Decoder.hidden`.
      chunk_tokens: tokens whose logits exist at once, over all devices.
      vocab_chunk: entries of the vocabulary whose logits exist at once, on a device; 0 for all.
      head: as in `algorithms.interface.Role`.
      divergence, teacher: what `TokenOutputs.divergence` is to hold, and how the teacher reads the rows.
    """

    decoder: Decoder
    temperature: float
    dtype: Any
    remat: str
    chunk_tokens: int
    unroll: bool | None = None
    head: str = "tokens"
    divergence: Divergence | None = None
    teacher: Forward | None = None
    schedule: pipeline.Schedule | None = None
    sequence_parallel: bool = False
    vocab_chunk: int = 0

    def cast(self, params: Params) -> Params:
        """In the dtype of the forward pass and, for the stages of a pipeline, in the order of its schedule."""
        return pipeline.arrange(self.schedule, jax.tree.map(lambda leaf: leaf.astype(self.dtype), params))

    def hidden(self, params: Params, rows: Rows) -> Float[Array, "R T D"]:
        """Final hidden states of one micro-batch, from parameters that `cast` returned."""
        return self.decoder.hidden(
            params,
            rows.tokens,
            rows.positions,
            rows.segment_ids,
            rows.prefix_ids,
            remat=self.remat,
            unroll=self.unroll,
            schedule=self.schedule,
            sequence_parallel=self.sequence_parallel,
        )

    def outputs(self, params: Params, rows: Rows, teacher: Params | TeacherReading | None = None) -> Any:
        """`TokenOutputs` or, of a value head alone, `ValueOutputs` of one micro-batch; both from cast parameters.

        Args:
          teacher: its cast parameters, or what it said of these rows.
        """
        hidden = self.hidden(params, rows)
        if self.head == "values":
            return ValueOutputs(
                self.before(params, hidden, rows), jnp.where(rows.loss_mask, token_values(params, hidden), 0.0)
            )
        outputs = self.tokens(params, hidden, rows)
        if self.head == "both":
            outputs = outputs._replace(values=self.before(params, hidden, rows))
        if self.divergence is not None and teacher is not None:
            if not isinstance(teacher, TeacherReading):
                assert self.teacher is not None
                teacher = self.teacher.read(teacher, rows, self.divergence)
            outputs = outputs._replace(divergence=self._divergence(params, hidden, rows, teacher))
        return outputs

    def tokens(self, params: Params, hidden: Float[Array, "R T D"], rows: Rows) -> TokenOutputs:
        """What the final hidden states say of the trained tokens."""
        return self.decoder.token_logprobs(
            params,
            predicting(hidden, rows),
            rows.tokens,
            rows.loss_mask,
            jnp.float32(self.temperature),
            chunk_tokens=self.chunk_tokens,
            vocab_chunk=self.vocab_chunk,
        )

    def read(self, params: Params, rows: Rows, divergence: Divergence) -> TeacherReading:
        """What a teacher of these cast parameters says of one micro-batch."""
        hidden = jax.lax.stop_gradient(predicting(self.hidden(params, rows), rows))
        if not divergence.top_k:
            return TeacherReading(hidden, self.decoder.output_weight(params))
        temperature = jnp.float32(self.temperature)
        candidates = self.decoder.top_k_logprobs(
            params, hidden, rows.loss_mask, temperature, k=divergence.top_k, chunk_tokens=self.chunk_tokens
        )
        return TeacherReading(candidates=candidates)

    def _divergence(
        self, params: Params, hidden: Float[Array, "R T D"], rows: Rows, teacher: TeacherReading
    ) -> Float[Array, "R T"]:
        """From the teacher's distribution at each trained token; no gradient goes to the teacher."""
        assert self.divergence is not None
        settings: dict[str, Any] = {
            "beta": self.divergence.beta,
            "vocab_size": self.decoder.config.vocab_size,
            "chunk_tokens": self.chunk_tokens,
            "weight_gradient": self.decoder.lora is None,  # adapters leave their base alone
            "mesh_axes": splitting_axes(rows=rows.tokens.shape[0], vocab=self.decoder.config.padded_vocab_size),
        }
        student = predicting(hidden, rows), self.decoder.output_weight(params)
        temperature = jnp.float32(self.temperature)
        if teacher.candidates is not None:
            ids, logprobs = teacher.candidates
            return top_k_divergence(*student, ids, logprobs, rows.loss_mask, temperature, **settings)
        return token_divergence(*student, teacher.hidden, teacher.weight, rows.loss_mask, temperature, **settings)

    def before(self, params: Params, hidden: Float[Array, "R T D"], rows: Rows) -> Float[Array, "R T"]:
        """The value of the state before each trained token."""
        values = token_values(params, hidden)
        return jnp.where(rows.loss_mask, jnp.take_along_axis(values, rows.predictors, axis=1), 0.0)


def predicting(hidden: Float[Array, "R T D"], rows: Rows) -> Float[Array, "R T D"]:
    """The states by the column that `token_logprobs` reads: it predicts column t from column t - 1."""
    before = jnp.roll(rows.predictors, -1, axis=1)
    return jnp.take_along_axis(hidden, before[:, :, None], axis=1)


def put_rows(batch: MiniBatch, mesh: Mesh) -> Rows:
    """The rows on the devices, split over the batch axes: one transfer a field."""
    sharding = batch_sharding(mesh, ndim=3, row_dimension=1)
    if processes.count() > 1:
        return jax.tree.map(lambda field: processes.put(field, sharding), batch.rows)
    return jax.device_put(batch.rows, sharding)


def _micro_batch(rows: Any, index: Int[Array, ""]) -> Any:
    return jax.tree.map(lambda field: jax.lax.dynamic_index_in_dim(field, index, 0, keepdims=False), rows)


def make_update(
    forward: Forward,
    algorithm: Algorithm,
    options: Any,
    optimizer: optax.GradientTransformation,
    clip_norm: float,
    role_shardings: RoleState,
    mesh: Mesh,
    *,
    name: str = "policy",
    like: Callable[..., Any] | None = None,
) -> Callable[..., tuple[RoleState, dict[str, Float[Array, ""]]]]:
    """Builds ``update(role, rows, num_micro_batches, denominator, old_is_actor, teacher) -> (role, metrics)`` of one
    role.

    `role` is donated, without its base, and comes back in the same shardings. `teacher` is its parameters or, of one on
    other devices, its `TeacherReading` of all micro-batches. The gradient is that of
    ``total / denominator`` over all micro-batches, accumulated in float32, then clipped and applied once. With
    `old_is_actor` the old log-probs are the current ones.

    Args:
      name: of the role: its loss is taken, and its metrics are named by it.
      like: what this returned for another role with all the same arguments and the same loss: its program is taken, so
        that it is compiled once.
    """
    losses = algorithm.loss_of(name)
    data = mesh.shape[DATA_AXIS]
    # Within a shard of `data`, whose logits are a part of those of all devices.
    chunk_tokens = max(1, forward.chunk_tokens // data)
    teacher_forward = forward.teacher and dataclasses.replace(forward.teacher, chunk_tokens=chunk_tokens)
    forward = dataclasses.replace(forward, chunk_tokens=chunk_tokens, teacher=teacher_forward)

    def objective(
        params: Params,
        rows: Rows,
        teacher: Params | TeacherReading | None,
        base: Params | None,
        old_is_actor: bool,
    ) -> tuple[Float[Array, ""], Objective]:
        outputs = forward.outputs(params if base is None else merge_trees(base, params), rows, teacher)
        if old_is_actor and forward.head != "values":
            rows = dataclasses.replace(
                rows, old_logprobs=jax.lax.stop_gradient(jnp.where(rows.loss_mask, outputs.logprobs, 0.0))
            )
        result = losses(options, outputs, rows)
        return result.total, result

    def at_rest(grads: Params) -> Params:
        specs = jax.tree.map(lambda sharding: sharding.spec, role_shardings.params)
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, specs)

    def accumulate(
        params: Params,
        frozen: tuple[Params | None, Params | TeacherReading | None],
        rows: Rows,
        num_micro_batches: Int[Array, ""],
        old_is_actor: bool,
    ) -> tuple[Params, Objective]:
        """Gradients in float32 and sums of all micro-batches, in the order of the schedule's layers.

        Each index of ``data`` adds up those of its rows, scattered over ``fsdp`` as the parameters are; what it has
        crosses ``data`` once, at the end. Were that axis XLA's too, whole gradients would be added up over both in
        every micro-batch.
        """

        def of_shard(
            params: Params,
            frozen: tuple[Params | None, Params | TeacherReading | None],
            fields: list[Array],
            num_micro_batches: Int[Array, ""],
        ) -> tuple[Params, Objective]:
            rows = jax.tree.unflatten(of_rows, fields)
            base, teacher = frozen
            one = functools.partial(objective, base=base, old_is_actor=old_is_actor)

            def gradient(params: Params, index: Int[Array, ""]) -> Any:
                said = teacher.at(index) if isinstance(teacher, TeacherReading) else teacher
                return jax.value_and_grad(one, has_aux=True)(params, _micro_batch(rows, index), said)

            def body(index: Int[Array, ""], carry: tuple[Any, Objective]) -> tuple[Any, Objective]:
                total, sums = carry
                (_, result), grads = gradient(params, index)
                total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
                return at_rest(total), _accumulate(sums, result)

            if jax.tree.leaves(fields)[0].shape[0] == 1:  # nothing to add up, and no second copy of the gradients
                (_, result), grads = gradient(params, jnp.int32(0))
                grads = at_rest(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads))
                return (grads, result) if data == 1 else _over_data(grads, result)
            shapes = jax.eval_shape(lambda p: gradient(p, jnp.int32(0))[0][1], params)
            empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            zeros = at_rest(jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params))
            grads, sums = jax.lax.fori_loop(0, num_micro_batches, body, (zeros, empty))
            return (grads, sums) if data == 1 else _over_data(grads, sums)

        fields, of_rows = jax.tree.flatten(rows)  # a jitted function may not build `Rows` of what are no arrays
        if data == 1:
            return of_shard(params, frozen, fields, num_micro_batches)
        whole, split = PartitionSpec(), PartitionSpec(None, DATA_AXIS)
        said = TeacherReading(hidden=split, weight=whole, candidates=split)
        of_frozen = (whole, said if isinstance(frozen[1], TeacherReading) else whole)
        # Nothing is differentiated through it, so nothing has to say over which axes a value varies.
        shards = jax.shard_map(
            of_shard,
            in_specs=(whole, of_frozen, split, whole),
            out_specs=whole,
            axis_names={DATA_AXIS},
            check_vma=False,
        )
        return shards(params, frozen, fields, num_micro_batches)

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        static_argnames="old_is_actor",
        out_shardings=(role_shardings, replicated(mesh)),
    )
    def update(
        role: RoleState,
        frozen: tuple[Params | None, Params | TeacherReading | None],
        rows: Rows,
        num_micro_batches: Int[Array, ""],
        denominator: Float[Array, ""],
        old_is_actor: bool,
    ) -> tuple[RoleState, tuple[dict[str, Float[Array, ""]], dict[str, Float[Array, ""]]]]:
        params = forward.cast(role.params)
        base, teacher = frozen
        base = None if base is None else forward.cast(base)
        if teacher is not None and not isinstance(teacher, TeacherReading):
            teacher = forward.cast(teacher)
        grads, sums = accumulate(params, (base, teacher), rows, num_micro_batches, old_is_actor)
        grads = pipeline.restore(forward.schedule, grads)
        new_params, opt_state, norm, finite = optimizers.apply(
            optimizer, grads, role.opt_state, role.params, clip_norm, denominator
        )
        metrics = {name: value / denominator for name, value in sums.weighted.items()}
        metrics |= {name: value / jnp.maximum(count, 1.0) for name, (value, count) in sums.counted.items()}
        metrics |= sums.maxima
        of_role = {"grad_norm": norm, "update_skipped": 1.0 - finite.astype(jnp.float32)}
        return RoleState(new_params, opt_state), (metrics, of_role)

    program = update if like is None else like.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(program)
    def apply(
        role: RoleState, rows: Rows, *counts: Any, old_is_actor: bool, teacher: Params | TeacherReading | None = None
    ) -> tuple[RoleState, dict[str, Float[Array, ""]]]:
        trained, frozen = RoleState(role.params, role.opt_state), (role.base, teacher)
        with jax.set_mesh(mesh):
            new, (metrics, of_role) = program(trained, frozen, rows, *counts, old_is_actor)
        told = {algorithm.metric_name(name, metric): value for metric, value in metrics.items()}
        told |= {f"{name}/{metric}": value for metric, value in of_role.items()}
        return dataclasses.replace(new, base=role.base), told

    return apply


def _on_mesh(program: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Traces and runs `program` with `mesh` set, so that the model keeps rows split over the batch axes and gathers
    weights layer by layer (`models.placement`); without it XLA may gather the activations instead."""

    @functools.wraps(program)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.set_mesh(mesh):
            return program(*args, **kwargs)

    return call


def _accumulate(sums: Objective, new: Objective) -> Objective:
    add = functools.partial(jax.tree.map, jnp.add)
    return Objective(
        sums.total + new.total,
        add(sums.weighted, new.weighted),
        add(sums.counted, new.counted),
        jax.tree.map(jnp.maximum, sums.maxima, new.maxima),
    )


def _over_data(grads: Params, sums: Objective) -> tuple[Params, Objective]:
    add = functools.partial(jax.lax.psum, axis_name=DATA_AXIS)
    most = {name: jax.lax.pmax(value, DATA_AXIS) for name, value in sums.maxima.items()}
    total, weighted, counted = add((sums.total, sums.weighted, sums.counted))
    return add(grads), Objective(total, weighted, counted, most)


def make_logprobs(forward: Forward, mesh: Mesh) -> Callable[..., Float[Array, "M R T"]]:
    """Builds ``logprobs(params, rows, num_micro_batches) -> [M, R, T]``: log-probs of the rows' trained tokens."""

    def one(params: Params, rows: Rows) -> Float[Array, "R T"]:
        return forward.outputs(params, rows).logprobs

    return _on_mesh(_over_micro_batches(forward, one, mesh), mesh)


def make_values(forward: Forward, mesh: Mesh) -> Callable[..., Float[Array, "M R T"]]:
    """Builds ``values(params, rows, num_micro_batches) -> [M, R, T]``: the value of the state after every token."""

    def one(params: Params, rows: Rows) -> Float[Array, "R T"]:
        return token_values(params, forward.hidden(params, rows))

    return _on_mesh(_over_micro_batches(forward, one, mesh), mesh)


def make_both(forward: Forward, mesh: Mesh) -> Callable[..., Float[Array, "M R T 2"]]:
    """Builds what gives the results of `make_logprobs` and of `make_values`, from one pass through the trunk that a
    head of both has."""

    def one(params: Params, rows: Rows) -> Float[Array, "R T 2"]:
        hidden = forward.hidden(params, rows)
        return jnp.stack([forward.tokens(params, hidden, rows).logprobs, token_values(params, hidden)], axis=-1)

    return _on_mesh(_over_micro_batches(forward, one, mesh), mesh)


def make_reading(forward: Forward, divergence: Divergence, mesh: Mesh) -> Callable[..., TeacherReading]:
    """Builds ``read(params, rows, num_micro_batches)``: what a teacher says of all micro-batches, rows split as a batch
    is, without its output weight."""

    @jax.jit
    def program(params: Params, rows: Rows, num_micro_batches: Int[Array, ""]) -> TeacherReading:
        params = forward.cast(params)

        def one(index: Int[Array, ""]) -> TeacherReading:
            return dataclasses.replace(forward.read(params, _micro_batch(rows, index), divergence), weight=None)

        def body(index: Int[Array, ""], out: TeacherReading) -> TeacherReading:
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
            return jax.tree.map(put, out, one(index))

        count = rows.tokens.shape[0]
        shapes = jax.eval_shape(one, jnp.int32(0))
        empty = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)
        said = jax.lax.fori_loop(0, num_micro_batches, body, empty)
        split = batch_sharding(mesh, ndim=4, row_dimension=1)
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, split), said)

    return _on_mesh(program, mesh)


def _over_micro_batches(
    forward: Forward, one: Callable[[Params, Rows], Float[Array, "R T ..."]], mesh: Mesh
) -> Callable[..., Float[Array, "M R T ..."]]:
    @functools.partial(jax.jit, out_shardings=replicated(mesh))
    def program(params: Params, rows: Rows, num_micro_batches: Int[Array, ""]) -> Float[Array, "M R T ..."]:
        params = forward.cast(params)

        def of(index: Int[Array, ""]) -> Float[Array, "R T ..."]:
            return one(params, _micro_batch(rows, index))

        def body(index: Int[Array, ""], out: Float[Array, "M R T ..."]) -> Float[Array, "M R T ..."]:
            return jax.lax.dynamic_update_index_in_dim(out, of(index), index, 0)

        shape = jax.eval_shape(of, jnp.int32(0)).shape
        return jax.lax.fori_loop(0, num_micro_batches, body, jnp.zeros((rows.tokens.shape[0], *shape), jnp.float32))

    return program


def init_role(
    params: Params,
    optimizer: optax.GradientTransformation,
    shardings: Any,
    mesh: Mesh,
    *,
    moments_on_host: bool = False,
) -> tuple[RoleState, RoleState]:
    """A trained role with a fresh optimizer state sharded like its parameters, and the tree of all its shardings.

    Args:
      params: in the training layout; taken over, not copied.
      shardings: of `params`.
      moments_on_host: where the optimizer's state is made, and where updates take and leave it.
    """
    role_shardings = role_shardings_of(params, optimizer, shardings, mesh, moments_on_host=moments_on_host)
    opt_state = jax.jit(optimizer.init, out_shardings=role_shardings.opt_state)(params)
    return RoleState(params, opt_state), role_shardings


def role_shardings_of(
    params: Params,
    optimizer: optax.GradientTransformation,
    shardings: Any,
    mesh: Mesh,
    *,
    moments_on_host: bool = False,
) -> RoleState:
    """The tree of all shardings of a trained role; ``params`` may be abstract, and ``shardings`` are theirs."""
    opt_shardings = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda leaf: replicated(mesh),
    )
    return RoleState(shardings, jax.tree.map(host_sharding, opt_shardings) if moments_on_host else opt_shardings)
