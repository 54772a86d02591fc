"""The programs of a run with the abstract arguments they are compiled for: updates, log-probs, decode and prefill.

They are the run's own: those of `update` and of `decoding.engine.Engine`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_kernels import gpu_compile
from jaxrl_llm import packing
from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.decoding import rows as engine_rows
from jaxrl_llm.decoding.cache import GATHERED
from jaxrl_llm.decoding.engine import Engine
from jaxrl_llm.host_memory import on_host
from jaxrl_llm.models import low_precision
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.plan.abstract_roles import with_shardings
from jaxrl_llm.sharding import GENERATION, Layout, batch_sharding, replicated
from jaxrl_llm.types import Params, Rows
from jaxrl_llm.update import RoleState, TeacherReading


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the abstract arguments it is to be compiled for."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mesh

    def compile(self) -> gpu_compile.Report:
        return gpu_compile.compile(self.function, *self.arguments, mesh=self.mesh)

    @property
    def argument_bytes(self) -> int:
        """What the arguments take on one device by their shapes and shardings, nothing compiled."""
        return device_bytes(self.arguments)


def device_bytes(tree: Any) -> int:
    """Bytes in the memory of one device, by shapes and shardings. An array that stands in the tree twice counts
    once."""
    return shard_bytes([leaf for leaf in jax.tree.leaves(tree) if not on_host(leaf.sharding)])


def shard_bytes(tree: Any) -> int:
    """The same with what is a device's in the host's memory."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def update_program(
    program: Callable[..., Any],
    role: RoleState,
    shape: packing.RowShape,
    micro_batches: int,
    mesh: Mesh,
    *,
    teacher: Params | TeacherReading | None = None,
    extras: Sequence[str] = (),
    old_is_actor: bool = True,
) -> Program:
    """One optimizer update.

    Args:
      program: what `update.make_update` returned.
      role: abstract, with shardings.
      extras: as in `Rows`.
    """
    arguments = (
        RoleState(role.params, role.opt_state),
        (role.base, teacher),
        abstract_rows(shape, micro_batches, mesh, extras),
        _number(jnp.int32, mesh),
        _number(jnp.float32, mesh),
    )
    # jitted; `gpu_compile.compile` sets the mesh
    return Program(_Static(program.__wrapped__, old_is_actor=old_is_actor), arguments, mesh)


def reading_program(
    program: Callable[..., Any], params: Params, shape: packing.RowShape, micro_batches: int, mesh: Mesh
) -> Program:
    """One pass over an optimizer batch that trains nothing.

    Args:
      program: what `update.make_logprobs`, `make_values` or `make_reading` returned.
    """
    rows = abstract_rows(shape, micro_batches, mesh)
    return Program(program.__wrapped__, (params, rows, _number(jnp.int32, mesh)), mesh)


def abstract_rows(shape: packing.RowShape, micro_batches: int, mesh: Mesh, extras: Sequence[str] = ()) -> Rows:
    """An optimizer batch as `update.put_rows` puts it."""
    sizes = micro_batches, shape.rows_per_micro, shape.row_tokens
    rows = jax.eval_shape(lambda: Rows.zeros(sizes, extras, module=jnp))
    split = batch_sharding(mesh, ndim=3, row_dimension=1)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split), rows)


def _number(dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))


class Generation:
    """The engine of a run and the shapes that its programs take.

    Attributes:
      params: in the generation layout.
      pools: of keys and values, of all replicas.

    Args:
      mesh: of generation.
      context: most tokens of a sequence.
      dtype: of compute.
      layout: of the parameters.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        rollout: RolloutConfig,
        context: int,
        dtype: Any,
        layout: Layout = GENERATION,
    ):
        self.decoder, self.mesh, self.rollout, self.dtype = decoder, mesh, rollout, jnp.dtype(dtype)
        engine = self.engine = Engine(decoder, mesh, rollout, context=context, dtype=dtype)
        weight_dtype = rollout.weight_dtype

        def arrange(params: Params) -> Params:
            arranged = decoder.generation_params(params, weight_dtype)
            layers = [low_precision.cast_rest(layer, jnp.dtype(dtype)) for layer in arranged.pop("layers")]
            return {**jax.tree.map(lambda leaf: leaf.astype(dtype), arranged), "layers": layers}

        shapes = jax.eval_shape(arrange, decoder.abstract_params())
        self.params = with_shardings(shapes, layout.shardings(mesh, decoder.generation_axes(weight_dtype)))
        pools = jax.eval_shape(lambda: engine._zero_pools(jnp.dtype(dtype)))
        self.pools = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=engine._pool_sharding), pools
        )

    def decode(self) -> Program:
        """The largest decode dispatch."""
        width = engine_rows.decode_width(self.engine._buckets.columns[-1])
        packed = self._rows(self.engine._buckets.rows[-1], width)
        progress = self._rows(self.rollout.num_slots, engine_rows.PROGRESS_WIDTH)
        kept = []
        if self.engine.attention == GATHERED:
            shapes = jax.eval_shape(self.engine._gather_program, self.pools, packed, progress)
            kept = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), shapes
            )
        arguments = (self.params, self.pools, kept, packed, progress)
        return Program(self.engine._decode_program, arguments, self.mesh)

    def prefill(self) -> Program:
        """The largest prefill, of prompts that go on from cached pages."""
        buckets = self.engine._buckets
        packed = self._per_replica(5, buckets.prefill_tokens[-1])
        context = self._per_replica(4, buckets.context_pages)
        return Program(self.engine._prefill_on_context_program, (self.params, self.pools, packed, context), self.mesh)

    def _rows(self, rows: int, width: int) -> jax.ShapeDtypeStruct:
        return self._per_replica(width, first=rows * self.engine.num_replicas)

    def _per_replica(self, *shape: int, first: int = 0) -> jax.ShapeDtypeStruct:
        shape = (first or self.engine.num_replicas, *shape)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.engine._rows_sharding)


class _Static:
    """A jitted function whose static arguments are given: what ``functools.partial`` would be, with ``lower``."""

    def __init__(self, function: Any, **static: Any):
        self.function, self.static = function, static

    def lower(self, *arguments: Any) -> Any:
        return self.function.lower(*arguments, **self.static)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments, **self.static)
