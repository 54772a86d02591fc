"""Where the arrays of a role stay between their uses: on the devices, or in the memory of the host.

What `HybridEngineConfig` offloads rests in pinned host memory with the same sharding, and is copied to the devices for
the program that reads it, array by array and bit by bit, so that no result changes. With
`offload_optimizer` an update takes that state where it rests, and fetches a piece at a time (`optimizer_pieces`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxrl_llm.algorithms.interface import Role
from jaxrl_llm.config import HybridEngineConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.host_memory import HOST, host_sharding
from jaxrl_llm.types import Params
from jaxrl_llm.update import RoleState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitStack:
    """A stacked array ``[L, …]`` whose first layers are in the host's memory.

    Attributes:
      host: those, ``[1, …]`` each.
      device: the others, ``[L - n, …]``.
    """

    host: tuple[jax.Array, ...]
    device: jax.Array


class Residence:
    """Brings the roles of a run to the devices for a use, and back to where they rest.

    Args:
      roles: by name.

    Raises:
      UserError: something is to be offloaded, and the devices have no such memory.
    """

    def __init__(self, config: HybridEngineConfig, roles: Mapping[str, Role], mesh: Mesh):
        self.config, self.roles = config, roles
        asked = [
            f"hybrid_engine.{name}"
            for name in ("offload_optimizer", "offload_reference", "offload_critic", "offload_actor_layers")
            if getattr(config, name)
        ]
        if asked:
            check_host_memory(mesh, asked[0])

    def rest(self, name: str, state: RoleState) -> RoleState:
        """The role between its uses: what is offloaded is copied to the host, and its device memory is free once the
        caller drops `state`. Of one that a checkpoint gave (`template`) nothing passes through the devices."""
        section, settings = self.roles[name].section, self.config
        if (section == "reference" and settings.offload_reference) or (section == "critic" and settings.offload_critic):
            return dataclasses.replace(state, params=to_host(state.params), opt_state=to_host(state.opt_state))
        if settings.offload_optimizer:
            state = dataclasses.replace(state, opt_state=to_host(state.opt_state))
        if self.splits(name):
            params = state.params
            runs = jax.tree.map(lambda leaf: split_stack(leaf, settings.offload_actor_layers), params["blocks"])
            state = dataclasses.replace(state, params={**params, "blocks": runs})
        return state

    def splits(self, name: str) -> bool:
        """Whether a part of the role's layers rests in the host's memory, and a part on the devices."""
        return self.roles[name].section == "policy" and self.config.offload_actor_layers > 0

    def params(self, state: RoleState) -> Params:
        """All parameters of a resting role, on the devices; no copy of those that are there."""
        return dataclasses.replace(state, params=to_device(state.params), opt_state=None).whole

    def saved(self, state: RoleState) -> RoleState:
        """What a checkpoint holds of a resting role, each array in the memory where it rests; no base. A stack that is
        split is whole in the host's memory, so that a checkpoint does not tell how its run was offloaded."""
        return dataclasses.replace(state, params=_on_stacks(_join_on_host, state.params), base=None)

    def template(self, state: RoleState) -> RoleState:
        """The shapes of `saved`, with the shardings and memories to read a checkpoint into; nothing is copied."""
        shapes = _on_stacks(_joined_shape, dataclasses.replace(state, base=None))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), shapes)

    def use(self, state: RoleState) -> RoleState:
        """The resting role on the devices, for an update; with `offload_optimizer` but for the optimizer's state."""
        moments = state.opt_state if self.config.offload_optimizer else to_device(state.opt_state)
        return dataclasses.replace(state, params=to_device(state.params), opt_state=moments)


def check_host_memory(mesh: Mesh, option: str) -> None:
    """Raises a UserError that names `option` where the devices have no pinned memory of their host."""
    device = mesh.local_devices[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise UserError(
            f"{option} keeps arrays in memory of the kind {HOST!r}, which {device.device_kind} devices (backend "
            f"{device.platform!r}) don't have; theirs: {', '.join(kinds) or 'none'}. Switch it off."
        )


def to_host(tree: Any) -> Any:
    """The same arrays, with their shardings, in the host's memory."""
    return jax.device_put(tree, jax.tree.map(lambda leaf: host_sharding(leaf.sharding), tree))


def to_device(tree: Any) -> Any:
    """The same arrays, with their shardings, on the devices; those that are there are handed on."""
    return jax.tree.map(_fetch, _on_stacks(_join, tree))


def split_stack(leaf: jax.Array, count: int) -> SplitStack:
    """The first `count` layers of a stacked array to the host, and the others to the devices if they aren't there."""
    if leaf.sharding.memory_kind == HOST:
        device = _without_kind(leaf.sharding)
        host = [_on_each_device(lambda part, at=at: part[at : at + 1], [leaf], leaf.sharding) for at in range(count)]
        return SplitStack(tuple(host), _on_each_device(lambda part: part[count:], [leaf], device))
    *first, rest = _split_program(count, leaf.sharding)(leaf)
    return SplitStack(tuple(to_host(first)), rest)


def streamed_layers(run: Params) -> tuple[list[Params], Params]:
    """Of a stacked run: the layers that are on the host, each a run of one, and the run of the others."""
    leaves, structure = jax.tree.flatten(run, is_leaf=_is_split)
    if not leaves or not _is_split(leaves[0]):
        return [], run
    hosts = [jax.tree.unflatten(structure, layer) for layer in zip(*(leaf.host for leaf in leaves), strict=True)]
    return hosts, jax.tree.unflatten(structure, [leaf.device for leaf in leaves])


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, SplitStack)


def _on_stacks(work: Callable[[SplitStack], Any], tree: Any) -> Any:
    return jax.tree.map(lambda leaf: work(leaf) if _is_split(leaf) else leaf, tree, is_leaf=_is_split)


def _fetch(leaf: jax.Array) -> jax.Array:
    return leaf if leaf.sharding.memory_kind != HOST else jax.device_put(leaf, _without_kind(leaf.sharding))


def _without_kind(sharding: jax.sharding.Sharding) -> NamedSharding:
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, sharding.spec)


def _joined_shape(stack: SplitStack) -> jax.ShapeDtypeStruct:
    layers, *rest = stack.device.shape
    shape = (len(stack.host) + layers, *rest)
    return jax.ShapeDtypeStruct(shape, stack.device.dtype, sharding=stack.device.sharding.with_memory_kind(HOST))


def _join_on_host(stack: SplitStack) -> jax.Array:
    sharding = stack.device.sharding.with_memory_kind(HOST)
    return _on_each_device(lambda *parts: np.concatenate(parts), [*stack.host, stack.device], sharding)


def _on_each_device(
    work: Callable[..., np.ndarray], arrays: Sequence[jax.Array], sharding: jax.sharding.Sharding
) -> jax.Array:
    """An array of what `work` makes, in the host, of each device's parts of arrays whose layers are on all devices."""
    parts: dict[Any, list[np.ndarray]] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            parts.setdefault(shard.device, []).append(np.asarray(shard.data))
    shards = [
        jax.device_put(work(*found), SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device, found in parts.items()
    ]
    layers = shards[0].shape[0]
    return jax.make_array_from_single_device_arrays((layers, *arrays[0].shape[1:]), sharding, shards)


def _join(stack: SplitStack) -> jax.Array:
    return _join_program(stack.device.sharding)([_fetch(leaf) for leaf in stack.host], stack.device)


@functools.cache
def _split_program(count: int, sharding: jax.sharding.Sharding) -> Any:
    def split(leaf: jax.Array) -> list[jax.Array]:
        return [*(leaf[index : index + 1] for index in range(count)), leaf[count:]]

    return jax.jit(split, out_shardings=[sharding] * (count + 1))


@functools.cache
def _join_program(sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(lambda host, device: jnp.concatenate([*host, device]), out_shardings=sharding)
