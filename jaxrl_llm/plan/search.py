"""Every mesh that a run could have on so many devices, and every tensor size of generation on each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jaxrl_llm.algorithms import find_algorithm
from jaxrl_llm.config import MeshConfig, RunConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan.device_kinds import PlannedDevices
from jaxrl_llm.plan.estimate import Estimate, estimate
from jaxrl_llm.plan.setup import Setup

GENERATION_TENSOR = (0, 1, 2, 4, 8)
"""Tensor sizes of generation that are tried; 0 is that of training. A machine has 8 devices, and a larger group would
decode over the network."""


def meshes(count: int) -> Iterator[MeshConfig]:
    """All factorisations of the number of devices over the mesh's axes."""
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    for data in divisors:
        for fsdp in divisors:
            for tensor in divisors:
                if count % (data * fsdp * tensor) == 0:
                    yield MeshConfig(data=data, fsdp=fsdp, tensor=tensor, pipeline=count // (data * fsdp * tensor))


def candidates(config: RunConfig, shape: ModelConfig, planned: PlannedDevices) -> Iterator[tuple[RunConfig, Setup]]:
    """The configuration on every mesh and with every size of ``rollout.tensor`` that the checks of a run allow. Blocks
    of `placement` stay as they are."""
    taken = sum(math.prod(dataclasses.astuple(mesh)) for mesh in config.placement.blocks().values())
    varies = find_algorithm(config.algorithm.name).generates and config.hybrid_engine.enable_3d_resharding
    varies = varies and config.placement.owner("generation") == "policy"
    for mesh in meshes(len(planned.devices) - taken):
        for tensor in GENERATION_TENSOR if varies else (config.rollout.tensor,):
            if varies and tensor == mesh.tensor:
                continue  # that is 0
            rollout = dataclasses.replace(config.rollout, tensor=tensor)
            one = dataclasses.replace(config, mesh=mesh, rollout=rollout)
            try:
                _check(one)
                yield one, Setup.of(one, shape, planned)
            except UserError:
                continue


def ranked(config: RunConfig, shape: ModelConfig, planned: PlannedDevices) -> list[tuple[RunConfig, Setup, Estimate]]:
    """Those that fit first, then by the seconds of a step; by formulas, nothing compiled.

    Raises:
      UserError: no mesh is allowed.
    """
    found = [(one, setup, estimate(setup, planned, None)) for one, setup in candidates(config, shape, planned)]
    if not found:
        raise UserError(
            f"--search: no mesh of {len(planned.devices)} devices can split this model. mesh.tensor must divide the "
            "numbers of heads and the intermediate size, mesh.fsdp the hidden size: try another --devices. The plan "
            "without --search says what is wrong with the configured mesh."
        )
    return sorted(found, key=rank)


def rank(row: tuple[RunConfig, Setup, Estimate]) -> tuple[bool, float, int]:
    """What fits first, then by seconds, then by memory."""
    plan = row[2]
    return not plan.fits, plan.step_s, plan.peak_bytes


def _check(config: RunConfig) -> None:
    from jaxrl_llm import placement_rules, validation

    placement_rules.check_blocks(config)
    problems = [text for level, text in validation.conflicts(config, True) if level == "error"]
    if problems:
        raise UserError(problems[0])
