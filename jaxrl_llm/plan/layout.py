"""What the change to the generation layout costs, by shapes and shardings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.plan.abstract_roles import with_shardings
from jaxrl_llm.plan.programs import Generation, device_bytes
from jaxrl_llm.resharding import received_bytes
from jaxrl_llm.sharding import TRAINING
from jaxrl_llm.types import Params


@dataclasses.dataclass(frozen=True)
class LayoutBytes:
    """Of one device.

    Attributes:
      new: of the generation layout, what it does not share with the training layout.
      passing: at most in a bucket and a layer on its way, on the policy's devices.
      received: from other devices, on average.
      arriving: at most in a bucket and not yet in place, where generation has devices of its own.
    """

    new: int
    passing: int
    received: int
    arriving: int = 0


def layout_change(
    generation: Generation, params: Params, mesh: Mesh, bucket_bytes: int, *, apart: bool = False
) -> LayoutBytes:
    """
    Args:
      params: the policy's, in the training layout.
      mesh: the policy's.
      bucket_bytes: as in `HybridEngineConfig`.
      apart: whether generation has devices of its own.
    """
    # The generation arrangement and dtype, still sharded as in training.
    axes = generation.decoder.generation_axes(generation.rollout.weight_dtype)
    targets, sources = generation.params, with_shardings(generation.params, TRAINING.shardings(mesh, axes))
    new = moved = 0
    known: dict[Any, int] = {}  # layers are alike, and there are many
    stages = mesh.shape["pipeline"]
    moving = jax.tree.leaves(_groups(sources, stages, "pipeline"))
    for source, target in zip(moving, jax.tree.leaves(_groups(targets, stages, None)), strict=True):
        key = source.shape, source.dtype, source.sharding.spec, target.sharding.spec
        if key not in known:
            known[key] = received_bytes(source.shape, source.dtype.itemsize, source.sharding, target.sharding)
        moved += known[key]
    same_dtype = jax.tree.leaves(params)[0].dtype == generation.dtype
    for name, target in targets.items():
        for one_source, one_target in zip(jax.tree.leaves(sources[name]), jax.tree.leaves(target), strict=True):
            shared = name != "layers" and same_dtype and one_source.sharding == one_target.sharding
            new += 0 if shared else device_bytes(one_target)
    bucket = min(bucket_bytes // mesh.size, device_bytes(sources))
    passing = bucket + device_bytes(sources["layers"][0])
    whole = 0
    if stages > 1:  # a matrix of a layer of each stage is there as a whole before it is cut
        whole = stages * max(device_bytes(leaf) for leaf in jax.tree.leaves(targets["layers"][0]))
    if not apart:
        return LayoutBytes(new, passing + whole, moved // mesh.size)
    # Cut for the way, and put together where it arrives.
    arriving = min(bucket_bytes // generation.mesh.shape["tensor"], device_bytes(targets))
    return LayoutBytes(new, passing + bucket, moved // generation.mesh.size, arriving + whole)


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
