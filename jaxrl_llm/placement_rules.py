"""What `placement` must agree on with the mesh, the algorithm and the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxrl_llm.config import MeshConfig, RunConfig, _algorithm, default_row_tokens
from jaxrl_llm.errors import UserError
from jaxrl_llm.options import nearest

Problem = tuple[str, str]
"""As in `validation`."""


def block_of(config: RunConfig, role: str) -> tuple[str, MeshConfig]:
    """The block that a role is on: the group of options that gives its sizes, and these.

    Args:
      role: a section of the configuration, ``policy`` or ``generation``.
    """
    owner = config.placement.owner(role)
    if owner == "policy":
        return "mesh", config.mesh
    return f"placement.{owner}", config.placement.blocks()[owner]


def fit_policy(config: RunConfig, device_count: int) -> MeshConfig:
    """The policy's mesh on what the blocks of `placement` leave of the devices.

    Raises:
      UserError: too many devices are asked for, or some are left unused.
    """
    from jaxrl_llm.validation import fit_mesh  # not at the top: it reads these rules

    sizes = {role: _size(mesh) for role, mesh in config.placement.blocks().items()}
    if not sizes:
        return fit_mesh(config.mesh, device_count)
    taken, text = sum(sizes.values()), " and ".join(f"placement.{role} takes {size}" for role, size in sizes.items())
    if taken >= device_count:
        raise UserError(
            f"{text}: of {device_count} devices that leaves {max(device_count - taken, 0)} for the policy, which needs "
            "one at least. Make the blocks smaller, share one (placement.….beside), or give the run more devices."
        )
    return fit_mesh(config.mesh, device_count - taken, f" left of {device_count} ({text})")


def policy_copies(config: RunConfig) -> list[str]:
    """The roles on other blocks than the policy's that start as it does: of each block one."""
    with_path = {"critic": config.critic.path, "reference": config.reference.path}
    owners = {config.placement.owner(role): role for role, path in with_path.items() if not path}
    return [role for owner, role in owners.items() if owner != "policy"]


def policy_shaped(config: RunConfig) -> list[tuple[str, MeshConfig]]:
    """The blocks that hold a model of the policy's shape in the training layout, as `block_of` gives them."""
    return [block_of(config, role) for role in ("policy", *policy_copies(config))]


def generation_tensor(config: RunConfig) -> tuple[str, int]:
    """The option that sets the tensor size of generation alone, and its value; 0: as in the policy's training."""
    group, block = block_of(config, "generation")
    if group == "mesh" or config.rollout.tensor:
        return "rollout.tensor", config.rollout.tensor
    return f"{group}.tensor", block.tensor


def check_blocks(config: RunConfig) -> None:
    """What blocks of known sizes must fit.

    Raises:
      UserError: ``rollout.tensor`` can't be made of the axes of the block that generates, or a teacher can't split the
        rows that the policy's update has.
    """
    from jaxrl_llm.validation import generation_factors

    group, block = block_of(config, "generation")
    generation_factors(block, config.rollout.tensor, group)
    group, block = block_of(config, "teacher")
    rows, wanted = _row_shards(config, config.mesh), _row_shards(config, block)
    if rows % wanted:
        raise UserError(
            f"{group}: the teacher reads the rows of the policy's update, whose number is a multiple of {rows}, and "
            f"its block splits them into {wanted}. Give it a data times fsdp times pipeline that divides {rows}; "
            "tensor can take the other devices."
        )


def require_even_parts(config: RunConfig, owned: Sequence[int]) -> None:
    """What blocks need where a run has several processes.

    Args:
      owned: how many devices each process has.

    Raises:
      UserError: no equal part of each process's devices makes up every block.
    """
    count = len(owned)
    sizes = {"mesh": config.mesh, **{f"placement.{role}": mesh for role, mesh in config.placement.blocks().items()}}
    uneven = [f"{group} has {_size(mesh)}" for group, mesh in sizes.items() if _size(mesh) % count]
    if not uneven and len(set(owned)) == 1:
        return
    problem = " and ".join(uneven) or f"the processes have {', '.join(map(str, owned))} devices"
    raise UserError(
        f"placement with {count} processes: each process gives an equal part of its devices to every block, so the "
        f"devices of a block are a multiple of {count} and all processes have as many; {problem}. Change the sizes "
        f"(mesh.…, placement.….…), or start another number of processes. A block on processes of its own is not "
        "supported: with 8 devices in each of 2 processes, mesh.fsdp = 8 and placement.generation.fsdp = 8 are four "
        "devices of each process."
    )


def _row_shards(config: RunConfig, mesh: MeshConfig) -> int:
    """Over how many devices a micro-batch is split, times those that go through the stages of a pipeline together."""
    together = config.training.pipeline_micro_batches or 4 * mesh.pipeline
    return mesh.data * mesh.fsdp * (mesh.pipeline if mesh.pipeline == 1 else together)


def placement_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Options of `placement` that name no role of the run, or that exclude others; judged without devices."""
    placement, entry = config.placement, _algorithm(config.algorithm.name)
    roles = placement.roles()
    placed = [role for role in roles if getattr(placement, role).mesh or getattr(placement, role).beside]
    if not placed:
        return
    present = {role.section for role in entry.roles(config.algorithm.options)}
    present |= {"generation"} if entry.generates or config.data.eval else set()
    present |= {"reward_model"} if config.reward_model.path else set()
    for role in placed:
        block = getattr(placement, role)
        if role not in present:
            yield (
                "error",
                f"placement.{role} is set, and {config.algorithm.name} with these options has no such role: its own "
                f"devices would do nothing. Roles that can be placed here: "
                f"{', '.join(name for name in roles if name in present) or 'none'}.",
            )
        if block.mesh and block.beside:
            yield ("error", f"placement.{role} has sizes and beside = {block.beside!r}. Give one of them.")
        elif block.beside and (block.beside not in roles or getattr(placement, block.beside).mesh is None):
            hint = nearest(block.beside, placement.blocks())
            yield ("error", f"placement.{role}.beside = {block.beside!r} is no role with a block of its own.{hint}")
            return
    if placement.owner("generation") != "policy" and not config.hybrid_engine.enable_3d_resharding:
        yield (
            "error",
            "hybrid_engine.enable_3d_resharding = False keeps the layout of training while completions are sampled, "
            "and placement.generation samples them on other devices. Set it to True, or leave placement.generation "
            "out.",
        )
    for role in training_blocks(config):
        yield from _training_conflicts(config, role)


def training_blocks(config: RunConfig) -> dict[str, MeshConfig]:
    """The blocks beside the policy's whose roles learn or read training rows, in `PlacementConfig.blocks`' form."""
    roles = _algorithm(config.algorithm.name).roles(config.algorithm.options)
    owners = {config.placement.owner(role.section) for role in roles}
    return {role: mesh for role, mesh in config.placement.blocks().items() if role in owners}


def _training_conflicts(config: RunConfig, role: str) -> Iterator[Problem]:
    """How `training` uses a block."""
    group, block = block_of(config, role)
    micro_batches = config.training.pipeline_micro_batches
    if block.pipeline > 1 and micro_batches % block.pipeline:
        yield (
            "error",
            f"training.pipeline_micro_batches = {micro_batches} is not a multiple of {group}.pipeline = "
            f"{block.pipeline}. Set it to a multiple, or to 0 for four for each stage.",
        )
    row_tokens = config.training.row_tokens or default_row_tokens(config)
    if config.training.sequence_parallel and row_tokens % block.tensor:
        yield (
            "error",
            f"training.row_tokens = {row_tokens} can't be split over {group}.tensor = {block.tensor}, as "
            f"training.sequence_parallel asks for. Set it to {row_tokens + -row_tokens % block.tensor}.",
        )


def _size(mesh: MeshConfig) -> int:
    return math.prod(dataclasses.astuple(mesh))
