"""Moves a model's parameters from the training layout to the generation layout, on the same devices or to others.

Three things differ between the layouts: the dtype (generation runs in the compute dtype), the arrangement
(training scans stacked blocks; decoding walks separate layers with q/k/v and gate/up fused, which reads each
weight once and copies none in the decode loop), and the sharding (`sharding.TRAINING` / `GENERATION`). They are
changed in that order, because a cast first halves what has to move and an arrangement needs no communication. Weights
in 8 bits (``rollout.weight_dtype``) are made where a layer is arranged, so that a quarter moves; over devices that
share an output channel, only its largest weight is exchanged first.

Generation may split matrices over more or fewer devices than training (``rollout.tensor``): its mesh is then another
view of the same devices, and the rest of them are replicas. Where a pipeline splits the layers, each stage takes out
one of its own at a time, and the group is gathered.

Where generation has devices of its own (``placement.generation``), the bucket goes there after the same cast and
arrangement, and both layouts share nothing: a generation tree is then good as long as it is held.

A change walks the model layer by layer in buckets of `bucket_bytes`, so that the extra memory on top of both layouts is
bounded by a bucket and one layer (in a pipeline, one of each stage). Parameters that need none of the three are not
copied: both layouts on the same devices then hold the same buffers. So such a generation tree is only good until the
update that donates the training parameters.

With LoRA only the adapters change between two changes of layout: the base is moved once, and afterwards the adapters
alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import HybridEngineConfig
from jaxrl_llm.models import low_precision
from jaxrl_llm.models.arrangement import merge_trees, split_adapters
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.resharding import BucketMover, arrays_of, received_bytes
from jaxrl_llm.residence import streamed_layers, to_device
from jaxrl_llm.sharding import GENERATION, TRAINING, Layout, generation_view
from jaxrl_llm.types import Params

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LayoutChange:
    """What one change cost.

    Attributes:
      moved_bytes: received by all devices from other devices: for each, what its new shard holds
        beyond its old one.
      copied_bytes: newly written anywhere, the moved ones included; 0 if every buffer was reused.
      seconds: until the last array was there.
      gathered_bytes: received by all devices in each dispatch of generation, because weights stay split as in training
        (``enable_3d_resharding=False``).
    """

    moved_bytes: int
    copied_bytes: int
    seconds: float
    gathered_bytes: int = 0


class HybridEngine:
    """Makes generation parameters from training parameters; holds neither, but for the base of a LoRA model.

    Where `decoder.lora` is set, the base in the generation layout stays held between calls, until the engine is
    dropped, `forget_base` is called, or parameters with another base come: it never changes and an update donates the
    adapters alone, so what is held stays right and, where both layouts share buffers, alive. Of the training base only
    weak references are kept.

    Args:
      mesh: of training.
      dtype: of generation.
      weight_dtype: of the matrices of layers, as in ``rollout.weight_dtype``.
      tensor: devices of a tensor group of generation; 0 is as many as on the mesh that generates.
      block: the mesh that generates, on devices that `mesh` has not; None: `mesh`.

    Attributes:
      generation_mesh: what the parameters that it returns are on, and what the decoder's engine is to run on.

    Raises:
      UserError: the devices don't have that format, or the mesh can't be divided into such tensor groups.
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
        tensor: int = 0,
        block: Mesh | None = None,
    ):
        low_precision.check_device(mesh, weight_dtype)
        self.decoder, self.mesh, self.config = decoder, mesh, config
        self.dtype = jnp.dtype(dtype)
        self.weight_dtype = weight_dtype
        self.training, self.generation = training, generation if config.enable_3d_resharding else training
        self.place = generation_view(mesh if block is None else block, tensor)
        self.generation_mesh = self.place.mesh
        self.stages = training.shards(mesh, "layers")
        plain = decoder.with_lora(None)
        self._axes = plain.generation_axes(weight_dtype)

        def layer_of(run: Params, index: int) -> Params:
            return plain.generation_layer(run, index, weight_dtype)

        self._arrange = self._make_arrange(layer_of, self._axes["layers"][0])
        if decoder.lora is not None:
            self._adapter_axes = split_adapters(decoder.generation_axes()["layers"][0])[1]
            self._arrange_adapters = self._make_arrange(decoder.generation_adapters, self._adapter_axes)
        self._base: HeldParams | None = None
        self._cast = jax.jit(lambda array: array.astype(self.dtype))
        self.last: LayoutChange | None = None

    def _make_arrange(self, layer_of: Callable[[Params, int], Params], layer_axes: Any) -> Any:
        """One layer out of a stacked run, fused and cast or quantized, still in the training layout: no weight is
        communicated. In a pipeline that layer of each stage, stacked and split over the stages."""
        if self.stages > 1:
            layer_axes = jax.tree.map(
                lambda axes: ("layers", *axes), layer_axes, is_leaf=lambda leaf: isinstance(leaf, tuple)
            )

        def one_layer(run: Params, index: jax.Array) -> Params:
            one = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index, 1), run)
            return low_precision.cast_rest(layer_of(one, 0), self.dtype)  # rounded once, from the parameters

        @functools.partial(jax.jit, out_shardings=self.training.shardings(self.mesh, layer_axes))
        def arrange(run: Params, index: jax.Array) -> Params:
            if self.stages == 1:
                return one_layer(run, index)
            by_stage = jax.tree.map(lambda leaf: leaf.reshape(self.stages, -1, *leaf.shape[1:]), run)
            return jax.vmap(one_layer, in_axes=(0, None))(by_stage, index)

        return arrange

    def _add_layers(self, mover: BucketMover, arrange: Any, run: Params, axes: Any) -> list[Any]:
        """The layers of a stacked run in their order, each a tree of slots."""
        streamed, run = streamed_layers(run)
        layers = [mover.add(arrange(to_device(one), jnp.int32(0)), axes, fresh=True) for one in streamed]
        count = jax.tree.leaves(run)[0].shape[0] // self.stages
        if self.stages == 1:
            rest = [mover.add(arrange(run, jnp.int32(index)), axes, fresh=True) for index in range(count)]
            return layers + rest
        groups = [mover.add_group(arrange(run, jnp.int32(index)), axes) for index in range(count)]
        return [groups[index][stage] for stage in range(self.stages) for index in range(count)]

    def to_generation(self, params: Params) -> Params:
        """The same parameters for decoding.

        Args:
          params: in the training layout, any float dtype, or a policy's that rest (`Residence.rest`); kept.

        Returns:
          `Decoder.generation_params`' tree in the generation layout and dtypes. On the same devices it may share
          buffers with `params`; drop it before they are donated. With LoRA the base's arrays are those of the last call
          where `params` holds the very same base arrays as then, and `last` counts the adapters alone.
        """
        start = time.perf_counter()
        mover = BucketMover(self.place, self.generation, self.config.bucket_bytes)
        base, adapters = split_adapters({name: value for name, value in params.items() if name != "value_head"})
        if bool(adapters) != (self.decoder.lora is not None):
            raise ValueError(
                f"decoder.lora is {self.decoder.lora}, but params have {'' if adapters else 'no '}adapters"
            )
        if self._base is not None and not self._base.is_of(base):
            self._base = None
        moving = self._move_base(mover, base) if self._base is None else None
        layers = [
            layer
            for run in adapters.get("blocks", {}).values()
            for layer in self._add_layers(mover, self._arrange_adapters, run, self._adapter_axes)
        ]
        moved = mover.finish()
        result = arrays_of(moving) if self._base is None else self._base.generation
        if self.decoder.lora is not None:
            self._base = self._base or HeldParams.of(base, result)
            merged = [merge_trees(*both) for both in zip(result["layers"], arrays_of(layers), strict=True)]
            result = {**result, "layers": merged}
        seconds = time.perf_counter() - start
        self.last = LayoutChange(moved, mover.copied_bytes, seconds, self._gathered_bytes(result))
        return result

    def _gathered_bytes(self, generation_params: Params) -> int:
        """See `LayoutChange.gathered_bytes`; said once."""
        if self.config.enable_3d_resharding:
            return 0
        axes = self.decoder.generation_axes(self.weight_dtype)
        gathered = sum(
            jax.tree.leaves(
                jax.tree.map(
                    lambda leaf, whole: received_bytes(leaf.shape, leaf.dtype.itemsize, leaf.sharding, whole),
                    generation_params,
                    GENERATION.shardings(self.generation_mesh, axes),
                )
            )
        )
        if self.last is None:
            logger.info(
                "hybrid_engine.enable_3d_resharding is off: each dispatch of generation gathers %.3g MB over all "
                "devices, %.3g MB into each",
                gathered / 1e6,
                gathered / 1e6 / self.mesh.size,
            )
        return gathered

    def forget_base(self) -> None:
        """Lets go of the base that a LoRA model's generation shares between calls; the next call moves it again."""
        self._base = None

    def _move_base(self, mover: BucketMover, params: Params) -> Params:
        """`Decoder.generation_params`' tree of slots, without adapters."""
        out: Params = {"layers": []}
        for name, axes in self._axes.items():
            if name != "layers":
                same = all(leaf.dtype == self.dtype for leaf in jax.tree.leaves(params[name]))
                cast = params[name] if same else jax.tree.map(self._cast, params[name])
                out[name] = mover.add(cast, axes, fresh=not same)
        for run in params["blocks"].values():
            axes = self._axes["layers"][len(out["layers"])]
            out["layers"] += self._add_layers(mover, self._arrange, run, axes)
        return out


@dataclasses.dataclass(frozen=True)
class HeldParams:
    """Parameters in the generation layout, and weak references to the training arrays that they were made of."""

    sources: list[weakref.ref[jax.Array]]
    generation: Params

    @classmethod
    def of(cls, params: Params, generation: Params) -> HeldParams:
        return cls([weakref.ref(leaf) for leaf in jax.tree.leaves(params)], generation)

    def is_of(self, params: Params) -> bool:
        """Whether they were made of these very arrays."""
        leaves = jax.tree.leaves(params)
        return len(leaves) == len(self.sources) and all(
            source() is leaf for source, leaf in zip(self.sources, leaves, strict=True)
        )
