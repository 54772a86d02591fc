"""Moves a model's parameters from the training layout to the generation layout, inside one mesh.

Three things differ between the layouts: the dtype (generation runs in the compute dtype), the arrangement
(training scans stacked blocks; decoding walks separate layers with q/k/v and gate/up fused, which reads each
weight once and copies none in the decode loop), and the sharding (`sharding.TRAINING` / `GENERATION`). They are
changed in that order, because a cast first halves what has to move and an arrangement needs no communication. Weights
in 8 bits (``rollout.weight_dtype``) are made where a layer is arranged, so that a quarter moves; over devices that
share an output channel, only its largest weight is exchanged first.

A change walks the model layer by layer in buckets of `bucket_bytes`, so that the extra memory on top of both
layouts is bounded by a bucket and one layer. Parameters that need none of the three are not copied: both layouts
then hold the same buffers. So a generation tree is only good until the update that donates the training parameters.

With LoRA only the adapters change between two changes of layout: the base is moved once, and afterwards the adapters
alone.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.config import HybridEngineConfig
from jaxrl_llm.models import low_precision
from jaxrl_llm.models.arrangement import merge_trees, split_adapters
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import GENERATION, TRAINING, Layout
from jaxrl_llm.types import Params


@dataclasses.dataclass(frozen=True)
class LayoutChange:
    """What one change cost.

    Attributes:
      moved_bytes: received by all devices from other devices: for each, what its new shard holds
        beyond its old one.
      copied_bytes: newly written anywhere, the moved ones included; 0 if every buffer was reused.
      seconds: until the last array was there.
    """

    moved_bytes: int
    copied_bytes: int
    seconds: float


class HybridEngine:
    """Makes generation parameters from training parameters; holds neither, but for the base of a LoRA model.

    Where `decoder.lora` is set, the base in the generation layout stays held between calls, until the engine is
    dropped, `forget_base` is called, or parameters with another base come: it never changes and an update donates the
    adapters alone, so what is held stays right and, where both layouts share buffers, alive. Of the training base only
    weak references are kept.

    Args:
      dtype: of generation.
      weight_dtype: of the matrices of layers, as in ``rollout.weight_dtype``.

    Raises:
      UserError: the devices don't have that format.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        config: HybridEngineConfig,
        dtype: Any,
        training: Layout = TRAINING,
        generation: Layout = GENERATION,
        weight_dtype: str = low_precision.COMPUTE,
    ):
        low_precision.check_device(mesh, weight_dtype)
        self.decoder, self.mesh, self.config = decoder, mesh, config
        self.dtype = jnp.dtype(dtype)
        self.weight_dtype = weight_dtype
        self.training, self.generation = training, generation
        plain = decoder.with_lora(None)
        self._axes = plain.generation_axes(weight_dtype)

        def layer_of(run: Params, index: int) -> Params:
            return plain.generation_layer(run, index, weight_dtype)

        self._arrange = self._make_arrange(layer_of, self._axes["layers"][0])
        if decoder.lora is not None:
            self._adapter_axes = split_adapters(decoder.generation_axes()["layers"][0])[1]
            self._arrange_adapters = self._make_arrange(decoder.generation_adapters, self._adapter_axes)
        self._base: _HeldBase | None = None
        self._cast = jax.jit(lambda array: array.astype(self.dtype))
        self.last: LayoutChange | None = None

    def _make_arrange(self, layer_of: Callable[[Params, int], Params], layer_axes: Any) -> Any:
        """One layer out of a stacked run, fused and cast or quantized, still in the training layout: no weight is
        communicated."""
        out = self.training.shardings(self.mesh, layer_axes)

        @functools.partial(jax.jit, out_shardings=out)
        def arrange(run: Params, index: jax.Array) -> Params:
            one = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index, 1), run)
            return low_precision.cast_rest(layer_of(one, 0), self.dtype)  # rounded once, from the parameters

        return arrange

    def to_generation(self, params: Params) -> Params:
        """The same parameters for decoding.

        Args:
          params: in the training layout, any float dtype; kept.

        Returns:
          `Decoder.generation_params`' tree in the generation layout and dtypes. It may share buffers with
          `params`; drop it before they are donated. With LoRA the base's arrays are those of the last call where
          `params` holds the very same base arrays as then, and `last` counts the adapters alone.
        """
        start = time.perf_counter()
        mover = _BucketMover(self.mesh, self.generation, self.config.bucket_bytes)
        base, adapters = split_adapters({name: value for name, value in params.items() if name != "value_head"})
        if bool(adapters) != (self.decoder.lora is not None):
            raise ValueError(
                f"decoder.lora is {self.decoder.lora}, but params have {'' if adapters else 'no '}adapters"
            )
        if self._base is not None and not self._base.is_of(base):
            self._base = None
        moving = self._move_base(mover, base) if self._base is None else None
        layers = [
            mover.add(self._arrange_adapters(run, jnp.int32(index)), self._adapter_axes, fresh=True)
            for run in adapters.get("blocks", {}).values()
            for index in range(jax.tree.leaves(run)[0].shape[0])
        ]
        moved = mover.finish()
        result = _arrays(moving) if self._base is None else self._base.generation
        if self.decoder.lora is not None:
            self._base = self._base or _HeldBase([weakref.ref(leaf) for leaf in jax.tree.leaves(base)], result)
            merged = [merge_trees(*both) for both in zip(result["layers"], _arrays(layers), strict=True)]
            result = {**result, "layers": merged}
        self.last = LayoutChange(moved, mover.copied_bytes, time.perf_counter() - start)
        return result

    def forget_base(self) -> None:
        """Lets go of the base that a LoRA model's generation shares between calls; the next call moves it again."""
        self._base = None

    def _move_base(self, mover: _BucketMover, params: Params) -> Params:
        """`Decoder.generation_params`' tree of slots, without adapters."""
        out: Params = {"layers": []}
        for name, axes in self._axes.items():
            if name != "layers":
                same = all(leaf.dtype == self.dtype for leaf in jax.tree.leaves(params[name]))
                cast = params[name] if same else jax.tree.map(self._cast, params[name])
                out[name] = mover.add(cast, axes, fresh=not same)
        for run in params["blocks"].values():
            for index in range(jax.tree.leaves(run)[0].shape[0]):
                axes = self._axes["layers"][len(out["layers"])]
                out["layers"].append(mover.add(self._arrange(run, jnp.int32(index)), axes, fresh=True))
        return out


@dataclasses.dataclass
class _HeldBase:
    """A base in the generation layout, and the training arrays that it was made of."""

    sources: list[weakref.ref[jax.Array]]
    generation: Params

    def is_of(self, base: Params) -> bool:
        leaves = jax.tree.leaves(base)
        return len(leaves) == len(self.sources) and all(
            source() is leaf for source, leaf in zip(self.sources, leaves, strict=True)
        )


@dataclasses.dataclass
class _Slot:
    """An array on its way; `fresh` says that it does not share the training parameters' buffers."""

    array: jax.Array
    target: NamedSharding
    fresh: bool


def _arrays(slots: Any) -> Any:
    """The tree of arrays, once the mover has finished."""
    return jax.tree.map(lambda slot: slot.array, slots, is_leaf=lambda leaf: isinstance(leaf, _Slot))


class _BucketMover:
    """Collects arrays and `device_put`s them to their target in buckets of bounded size."""

    def __init__(self, mesh: Mesh, layout: Layout, bucket_bytes: int):
        self.mesh, self.layout, self.bucket_bytes = mesh, layout, bucket_bytes
        self.pending: list[_Slot] = []
        self.pending_bytes = self.moved_bytes = self.copied_bytes = 0

    def add(self, tree: Params, axes: Any, *, fresh: bool = False) -> Any:
        def one(array: jax.Array, axis: tuple[str | None, ...]) -> _Slot:
            slot = _Slot(array, self.layout.sharding(self.mesh, axis), fresh)
            self.pending.append(slot)
            self.pending_bytes += array.nbytes
            if self.pending_bytes >= self.bucket_bytes:
                self.flush()
            return slot

        return jax.tree.map(one, tree, axes)

    def flush(self) -> None:
        # Equal shardings need nothing: the same array is handed on, and no buffer is copied.
        moving = [slot for slot in self.pending if not _same_sharding(slot.array, slot.target)]
        results = jax.device_put([slot.array for slot in moving], [slot.target for slot in moving])
        for slot, result in zip(moving, results, strict=True):
            source = slot.array
            self.moved_bytes += received_bytes(source.shape, source.dtype.itemsize, source.sharding, slot.target)
            slot.array, slot.fresh = result, True
        jax.block_until_ready([slot.array for slot in self.pending])
        self.copied_bytes += sum(
            shard.data.nbytes for slot in self.pending if slot.fresh for shard in slot.array.addressable_shards
        )
        self.pending, self.pending_bytes = [], 0

    def finish(self) -> int:
        if self.pending:
            self.flush()
        return self.moved_bytes


def _same_sharding(array: jax.Array, target: NamedSharding) -> bool:
    return array.sharding.is_equivalent_to(target, array.ndim)


def received_bytes(
    shape: tuple[int, ...], itemsize: int, source: jax.sharding.Sharding, target: jax.sharding.Sharding
) -> int:
    """Bytes that all devices together receive when an array changes its sharding: the theoretical minimum.

    For each device: the size of its new shard minus the part of it that the device already held.
    """
    if source == target:
        return 0
    before, after = source.devices_indices_map(shape), target.devices_indices_map(shape)
    total = 0
    for device, wanted in after.items():
        size = overlap = 1
        for extent, want, have in zip(shape, wanted, before.get(device, (slice(0, 0),) * len(shape)), strict=True):
            (low, high, _), (old_low, old_high, _) = want.indices(extent), have.indices(extent)
            size *= high - low
            overlap *= max(0, min(high, old_high) - max(low, old_low))
        total += (size - overlap) * itemsize
    return total
