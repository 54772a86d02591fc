"""Layers split over the mesh axis ``pipeline``: each stage holds some, and micro-batches travel through the stages.

Every tick each stage runs one of its r pieces of the stack on one micro-batch and hands the result on to the next
stage, the last one to the first. With S stages and M micro-batches, stage s at tick t is at step u = t - s::

    group = u // (S r)    turn = (u // S) % r    micro-batch = group S + u % S        idle where u < 0 or u >= M r

- r = 1 is GPipe (arXiv:1811.06965): a stage holds one piece of the stack. M + S - 1 ticks, of which S - 1 are idle.
- r > 1 is the interleaved, or circular, schedule (arXiv:2104.04473, section 2.2): the stack is cut into S r pieces and
  stage s holds pieces s, s + S, ... A tick is r times shorter, so that S - 1 idle ticks cost r times less.

The backward pass is the same schedule turned round, by hand: the forward pass keeps what entered each stage, and a
stage's layers are computed again when their gradient is due. Gradients of weights are added up in float32 over all
micro-batches. Only ``pipeline`` is manual; XLA partitions what a stage does over the other axes.

At rest every run of layers lies in the order of the model, cut into S equal parts. An interleaved schedule needs
another order: :func:`arrange` moves each device's share of the weights once, before all micro-batches of an update, and
:func:`restore` its gradients back. That is at most a share; gathering over ``fsdp`` moves more for every micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.placement import PIPELINE_AXIS, place, place_weights
from jaxrl_llm.models.platform import compiles_for_cpu
from jaxrl_llm.types import Params

Stage = Callable[[Params, Params, Any, Any, Array], Array]
"""``stage(trained, frozen, layer_data, rows, x) -> x``: consecutive layers, every leaf of the first three stacked."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How micro-batches go through the stages.

    Attributes:
      stages: S, the size of the mesh axis.
      micro_batches: M that go through together, a multiple of S.
      repeats: r, pieces of the stack that each stage holds.
    """

    stages: int
    micro_batches: int
    repeats: int = 1

    @classmethod
    def of(cls, stages: int, micro_batches: int = 0, repeats: int = 1) -> Schedule | None:
        """None without stages; 0 micro-batches: four for each stage."""
        return None if stages == 1 else cls(stages, micro_batches or 4 * stages, repeats)

    def __post_init__(self) -> None:
        if self.stages < 1 or self.repeats < 1 or self.micro_batches < 1 or self.micro_batches % self.stages:
            raise ValueError(f"{self}: all must be positive, and micro_batches a multiple of stages")

    @property
    def ticks(self) -> int:
        """Of a forward pass; in each a stage runs ``L / (S r)`` layers. A backward pass has as many."""
        return self.micro_batches * self.repeats + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of its time that a stage is idle: ``(S - 1) / (M r + S - 1)``."""
        return (self.stages - 1) / self.ticks

    def check(self, num_layers: int) -> None:
        """Raises ValueError where the layers can't be cut into equal pieces."""
        if num_layers % (self.stages * self.repeats):
            raise ValueError(
                f"{num_layers} layers can't be cut into {self.stages} stages of {self.repeats} equal pieces each"
            )

    def layer_order(self, num_layers: int) -> np.ndarray:
        """The layers, by their index in the model, in the order that :func:`arrange` gives."""
        self.check(num_layers)
        pieces = np.arange(num_layers).reshape(self.repeats, self.stages, -1)
        return pieces.transpose(1, 0, 2).reshape(-1)

    def at(self, tick: Array, stage: Array) -> tuple[Array, Array, Array]:
        """Micro-batch, turn, and whether the stage has work at this tick (where not, some valid pair)."""
        step = tick - stage
        busy = (step >= 0) & (step < self.micro_batches * self.repeats)
        step = jnp.clip(step, 0, self.micro_batches * self.repeats - 1)
        group, rest = step // (self.stages * self.repeats), step % (self.stages * self.repeats)
        return group * self.stages + rest % self.stages, rest // self.stages, busy


def run(
    schedule: Schedule,
    stage: Stage,
    trained: Params,
    frozen: Params,
    layer_data: Any,
    rows: Any,
    x: Float[Array, "M N D"],
) -> Float[Array, "M N D"]:
    """All layers on every micro-batch. Differentiable in ``trained`` and ``x``; trace it under ``jax.set_mesh``.

    Args:
      trained, frozen: weights of a run, every leaf ``[L, ...]`` in the order that :func:`arrange` gives.
      layer_data: other arrays ``[L, ...]`` in the same order.
      rows: arrays ``[M, ...]`` of integers that the stages read beside x.
      x: what enters the first layer. Split over ``pipeline`` by micro-batch, as is what is returned.
    """

    @jax.custom_vjp
    def through(trained: Params, frozen: Params, layer_data: Any, rows: Any, x: Array) -> Array:
        return _forward(schedule, stage, False, trained, frozen, layer_data, rows, x)[0]

    def forward(trained: Params, frozen: Params, layer_data: Any, rows: Any, x: Array) -> tuple[Array, Any]:
        out, entered = _forward(schedule, stage, True, trained, frozen, layer_data, rows, x)
        return out, (trained, frozen, layer_data, rows, entered)

    def backward(saved: Any, d_out: Array) -> Any:
        trained, frozen, layer_data, rows, entered = saved
        d_trained, d_x = _backward(schedule, stage, trained, frozen, layer_data, rows, entered, d_out)
        return d_trained, None, None, None, d_x

    through.defvjp(forward, backward)
    return through(trained, frozen, layer_data, rows, x)


def _forward(schedule, stage, keep, trained, frozen, layer_data, rows, x):
    """What leaves the last layer and, with `keep`, what entered each stage at each tick: ``[S ticks, N, D]``."""

    def local(trained, frozen, layer_data, rows, x, number):
        number = number[0]
        pieces = _pieces(schedule, (trained, frozen, layer_data))

        def tick(carry, index):
            buffer, out = carry
            micro_batch, turn, busy = schedule.at(index, number)
            entering = jnp.where((number == 0) & (turn == 0), _take(x, micro_batch), buffer)
            left = stage(*_take(pieces, turn), _take(rows, micro_batch), entering)
            last = busy & (number == schedule.stages - 1) & (turn == schedule.repeats - 1)
            out = _put(out, jnp.where(last, left, _take(out, micro_batch)), micro_batch)
            return (_hand_on(schedule, left, 1), out), entering if keep else None

        start = place(jnp.zeros_like(x[0]), "rows", None), place(jnp.zeros_like(x), None, "rows", None)
        (_, out), entered = jax.lax.scan(tick, start, jnp.arange(schedule.ticks, dtype=jnp.int32))
        return _spread(out), entered

    specs = (*[_SPLIT] * 3, _WHOLE, _WHOLE, _SPLIT)
    return _on_stages(local, specs, (_SPLIT, _SPLIT))(trained, frozen, layer_data, rows, x, _numbers(schedule))


def _backward(schedule, stage, trained, frozen, layer_data, rows, entered, d_out):
    """Gradients of `trained` and of what entered the first layer. Tick by tick from the last one."""

    def local(trained, frozen, layer_data, rows, entered, d_out, number):
        number = number[0]
        pieces = _pieces(schedule, (trained, frozen, layer_data))

        def tick(carry, inputs):
            index, entering = inputs
            d_buffer, d_x, d_pieces = carry
            micro_batch, turn, busy = schedule.at(index, number)
            last = (number == schedule.stages - 1) & (turn == schedule.repeats - 1)
            d_left = jnp.where(last, _take(d_out, micro_batch), d_buffer)
            d_left = jnp.where(busy, d_left, jnp.zeros_like(d_left))
            weights, *others = _take(pieces, turn)
            of_rows = _take(rows, micro_batch)
            _, pull = jax.vjp(lambda weights, x: stage(weights, *others, of_rows, x), weights, entering)
            added, d_entering = pull(d_left)
            d_pieces = place_weights(
                jax.tree.map(
                    lambda total, new: _put(total, _take(total, turn) + new.astype(jnp.float32), turn), d_pieces, added
                )
            )
            first = busy & (number == 0) & (turn == 0)
            d_x = _put(d_x, jnp.where(first, d_entering, _take(d_x, micro_batch)), micro_batch)
            return (_hand_on(schedule, d_entering, -1), d_x, d_pieces), None

        start = (
            place(jnp.zeros_like(entered[0]), "rows", None),
            place(jnp.zeros_like(d_out), None, "rows", None),
            place_weights(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), pieces[0])),
        )
        inputs = jnp.arange(schedule.ticks, dtype=jnp.int32), entered
        (_, d_x, d_pieces), _ = jax.lax.scan(tick, start, inputs, reverse=True)
        d_trained = jax.tree.map(lambda total, leaf: total.reshape(leaf.shape).astype(leaf.dtype), d_pieces, trained)
        return d_trained, _spread(d_x)

    specs = (*[_SPLIT] * 3, _WHOLE, _SPLIT, _WHOLE, _SPLIT)
    return _on_stages(local, specs, (_SPLIT, _SPLIT))(
        trained, frozen, layer_data, rows, entered, d_out, _numbers(schedule)
    )


# --- the order of the layers ------------------------------------------------------------------------------------------


def arrange(schedule: Schedule | None, params: Params) -> Params:
    """The same parameters, or a part of them, with their runs in the order of the schedule: those of a stage together,
    its pieces one after the other. Trace it under ``jax.set_mesh``; no change where a stage has one piece."""
    return _reorder(schedule, params, back=False)


def restore(schedule: Schedule | None, params: Params) -> Params:
    """From the order of the schedule back to that of the model."""
    return _reorder(schedule, params, back=True)


def _reorder(schedule: Schedule | None, params: Params, back: bool) -> Params:
    if schedule is None or schedule.repeats == 1 or schedule.stages == 1 or "blocks" not in params:
        return params
    for leaf in jax.tree.leaves(params["blocks"]):
        schedule.check(leaf.shape[0])
    move = functools.partial(_move, schedule, back)
    return {**params, "blocks": _on_stages(move, (_SPLIT, _SPLIT), _SPLIT)(params["blocks"], _numbers(schedule))}


def _move(schedule: Schedule, back: bool, blocks: Params, number: Int[Array, " 1"]) -> Params:
    """Piece p lies on stage ``p // r`` in the order of the model and on ``p % S`` in that of the schedule. A device
    sends r pieces and receives r; in each of r exchanges every device sends one and receives one."""
    stages, repeats = schedule.stages, schedule.repeats
    common = math.gcd(stages, repeats)
    routes = []  # per exchange: (sender, its place there, receiver, its place there)
    for exchange in range(repeats):
        pieces = [s * repeats + (exchange + s * common // stages) % repeats for s in range(stages)]
        routes.append([(p // repeats, p % repeats, p % stages, p // stages) for p in pieces])

    def one(leaf: Array) -> Array:
        parts = leaf.reshape(repeats, -1, *leaf.shape[1:])
        out = jnp.zeros_like(parts)
        for route in routes:
            there = [(c, d, a, b) if back else (a, b, c, d) for a, b, c, d in route]
            source = jnp.asarray([place for _, place, _, _ in sorted(there)], jnp.int32)[number[0]]
            target = jnp.asarray([place for *_, place in sorted(there, key=lambda way: way[2])], jnp.int32)[number[0]]
            ways = [(sender, receiver) for sender, _, receiver, _ in there]
            out = _put(out, jax.lax.ppermute(_take(parts, source), PIPELINE_AXIS, ways), target)
        return out.reshape(leaf.shape)

    return jax.tree.map(one, blocks)


# --- pieces -----------------------------------------------------------------------------------------------------------

_SPLIT, _WHOLE = PartitionSpec(PIPELINE_AXIS), PartitionSpec()


def _on_stages(function, in_specs, out_specs):
    # Nothing is differentiated through it, so nothing has to say over which axes a value varies.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={PIPELINE_AXIS}, check_vma=False)


def _numbers(schedule: Schedule) -> Int[Array, " S"]:
    return jnp.arange(schedule.stages, dtype=jnp.int32)


def _pieces(schedule: Schedule, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(schedule.repeats, -1, *leaf.shape[1:]), tree)


def _take(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)


def _put(array: Array, value: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(array, value, index, 0)


def _hand_on(schedule: Schedule, value: Array, step: int) -> Array:
    ring = [(s, (s + step) % schedule.stages) for s in range(schedule.stages)]
    return place(jax.lax.ppermute(value, PIPELINE_AXIS, ring), "rows", None)


def _spread(value: Float[Array, "M N D"]) -> Float[Array, "m N D"]:
    """One stage has values and the others zeros: each gets its part of the micro-batches."""
    # XLA:CPU ends the process at a bfloat16 sum over a manual axis (seen on jax 0.10.2 and 0.12).
    dtype = jnp.float32 if compiles_for_cpu() else value.dtype
    parts = jax.lax.psum_scatter(value.astype(dtype), PIPELINE_AXIS, scatter_dimension=0, tiled=True)
    return place(parts.astype(value.dtype), None, "rows", None)
