"""The devices of a run, divided into disjoint blocks: the policy's, and those of roles with devices of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import processes
from jaxrl_llm.config import PlacementConfig, RunConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import make_mesh


@dataclasses.dataclass(frozen=True)
class DeviceGroups:
    """Which mesh each role is on.

    Attributes:
      policy: the mesh of the policy's training, the first devices.
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
          UserError: there are blocks, and several processes.
        """
        devices = jax.devices() if devices is None else list(devices)
        if config.placement.blocks() and processes.count() > 1:
            raise UserError(
                f"placement.{next(iter(config.placement.blocks()))} is set in a run of {processes.count()} processes: "
                "arrays go between blocks of devices within one process only. Leave placement out, or run one process "
                "that has all devices."
            )
        blocks = {"policy": config.mesh, **config.placement.blocks()}
        meshes, start = {}, 0
        for role, sizes in blocks.items():
            end = start + math.prod(dataclasses.astuple(sizes))
            meshes[role] = make_mesh(sizes, devices[start:end])
            start = end
        return cls(config.placement, meshes.pop("policy"), meshes)

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
