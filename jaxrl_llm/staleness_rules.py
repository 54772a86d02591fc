"""What ``placement.staleness`` must agree on with the algorithm and with the devices of the roles."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl_llm.config import RunConfig, _algorithm

Problem = tuple[str, str]
"""As in `validation`."""


def staleness_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Why the next step can't be sampled beside an update, or should not be; judged without devices."""
    placement, name = config.placement, config.algorithm.name
    if not placement.staleness:
        if placement.uncorrected:
            yield (
                "error",
                "placement.uncorrected is set, but placement.staleness = 0: no samples are old. Leave it out.",
            )
        return
    entry, options = _algorithm(name), config.algorithm.options
    if not entry.generates:
        yield (
            "error",
            f"placement.staleness = 1: {name} learns from what its data holds, and there is nothing to sample beside "
            "an update. Set it to 0.",
        )
        return
    if entry.answer is not None:
        yield (
            "error",
            f"placement.staleness = 1: {name} has several models that write one after the other, and the generation "
            "block is given the parameters of one. Set it to 0, or choose an algorithm with one policy.",
        )
    yield from _device_conflicts(config)
    if config.hybrid_engine.offload_actor_layers:
        yield (
            "error",
            "placement.staleness = 1 keeps a copy of the policy in the compute dtype on its devices while the next "
            "step is sampled, which is what hybrid_engine.offload_actor_layers = "
            f"{config.hybrid_engine.offload_actor_layers} is to save. Set one of them to 0.",
        )
    corrections = {option: getattr(options, option, None) for option in ("rollout_is", "rollout_rs")}
    if not placement.uncorrected and all(value in (None, "none") for value in corrections.values()):
        offered = any(value is not None for value in corrections.values())
        advice = (
            "Set algorithm.rollout_is = 'token' (each token weighted by the old policy's probability over the "
            "sampler's, cut at algorithm.rollout_is_threshold), or leave out what is too far off by "
            "algorithm.rollout_rs; "
            if offered
            else f"{name} offers no correction: choose another algorithm, or placement.staleness = 0; "
        )
        yield (
            "error",
            "placement.staleness = 1: each step learns from samples of parameters that are one step older, and nothing "
            f"here corrects for it. {advice}placement.uncorrected = True learns from them as if they were new.",
        )


def _device_conflicts(config: RunConfig) -> Iterator[Problem]:
    """The thread that samples and the one that trains must not share a device: two threads would start programs there
    in an order that differs from device to device."""
    placement = config.placement
    sampling = {"generation": placement.owner("generation")}
    if config.reward_model.path:
        sampling["reward_model"] = placement.owner("reward_model")
    training = {role.section for role in _algorithm(config.algorithm.name).roles(config.algorithm.options)}
    owners = {placement.owner(role): role for role in sorted(training)} | {"policy": "policy"}
    for role, owner in sampling.items():
        if owner in owners:
            advice = (
                "Give it sizes (placement.generation.fsdp = 4 or the like; mesh has the other devices)"
                if role == "generation"
                else "Give it sizes, or placement.reward_model.beside = 'generation'"
            )
            yield (
                "error",
                f"placement.staleness = 1 uses the devices of placement.{role} while the {owners[owner]} is updated or "
                f"read, so they must be others, and both are on the same ones. {advice}, or set placement.staleness = "
                "0.",
            )
