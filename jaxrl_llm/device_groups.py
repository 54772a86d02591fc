"""The devices of a run, divided into disjoint blocks: the policy's, and those of roles with devices of their own.

Of several processes each gives an equal part of its devices to every block. So every process has a shard of every
array, reads every result and saves its part, and all run the same programs in the same order as they do with one block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import PlacementConfig, RunConfig
from jaxrl_llm.placement_rules import require_even_parts
from jaxrl_llm.sharding import make_mesh


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """Which mesh each role is on.

    Attributes:
      policy: the mesh of the policy's training, the first devices of each process.
      apart: the others, by the role that has given their sizes.
    """

    placement: PlacementConfig
    policy: Mesh
    apart: Mapping[str, Mesh] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, devices: Sequence[Any] | None = None) -> DeviceGroups:
        """
        Args:
          config: what `config.with_mesh` returned for that many devices.
          devices: all by default.

        Raises:
          UserError: there are blocks, and the processes of the run can't have an equal part of each.
        """
        devices = jax.devices() if devices is None else list(devices)
        placement = config.placement
        sizes = {"policy": config.mesh, **placement.blocks()}
        if not placement.blocks():
            return cls(placement, make_mesh(config.mesh, devices))
        owned: dict[int, list[Any]] = {}
        for device in devices:
            owned.setdefault(device.process_index, []).append(device)
        require_even_parts(config, [len(own) for own in owned.values()])
        meshes, start = {}, 0
        for role, mesh in sizes.items():
            end = start + math.prod(dataclasses.astuple(mesh)) // len(owned)
            meshes[role] = make_mesh(mesh, [device for own in owned.values() for device in own[start:end]])
            start = end
        return cls(placement, meshes.pop("policy"), meshes)

    def mesh(self, role: str) -> Mesh:
        """Where a role is: ``generation``, or a section of the configuration (`Role.section`, ``reward_model``)."""
        owner = self.placement.owner(role)
        return self.policy if owner == "policy" else self.apart[owner]

    @property
    def generation(self) -> Mesh | None:
        """Devices that only generate, or do so beside another role than the policy; None where the policy's do."""
        mesh = self.mesh("generation")
        return None if mesh is self.policy else mesh

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Every block once."""
        return (self.policy, *self.apart.values())
