"""From shapes and compiled programs to memory by part, seconds by phase, and whether a run fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_kernels.gpu_compile import Report
from jaxrl_llm.plan import formulas
from jaxrl_llm.plan.collectives import Collective, collectives
from jaxrl_llm.plan.device_kinds import MEMORY_MARGIN, Efficiency, PlannedDevices
from jaxrl_llm.plan.programs import device_bytes
from jaxrl_llm.plan.seconds import Work, phase_seconds
from jaxrl_llm.plan.setup import Setup


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A plan of a run on one mesh. Bytes are of one device.

    Attributes:
      parts: memory by part; not all parts are there at the same time.
      phases: memory by phase of a step, everything that lies on the device then.
      seconds: by phase of a step.
      sent: collectives by program.
      micro_batches: of an update, as expected.
      bubble: part of the time of layers in which a pipeline's stages have nothing to do; 0 without one.
      compiled: whether temporaries are the compiler's, or a formula's.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    seconds: dict[str, float]
    sent: dict[str, list[Collective]]
    micro_batches: int
    bubble: float
    memory_bytes: int
    compiled: bool

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= (1 - MEMORY_MARGIN) * self.memory_bytes

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def estimate(
    setup: Setup, planned: PlannedDevices, reports: Mapping[str, Report] | None, efficiency: Efficiency | None = None
) -> Estimate:
    """
    Args:
      reports: of `Setup.programs` by name; None takes formulas for temporaries and collectives.
    """
    efficiency = efficiency or Efficiency()
    temporaries = {name: _temporaries(report) for name, report in (reports or {}).items()}
    meshes = dict.fromkeys((f"update of {role}" for role in setup.trained), setup.mesh)
    if setup.generation is not None:
        meshes |= {"decode": setup.generation.mesh, "prefill": setup.generation.mesh}
    sent = {name: collectives(report.text, meshes[name]) for name, report in (reports or {}).items()}
    if reports is None:
        temporaries = {f"update of {role}": formulas.temporaries(setup, role) for role in setup.trained}
        sent = formulas.sent(setup)
    counts = Work.of(setup)
    idle = 0.0 if setup.schedule is None else setup.schedule.bubble
    seconds = phase_seconds(setup, planned, efficiency, counts, sent, idle)
    parts, phases = _memory(setup, temporaries)
    return Estimate(
        parts, phases, seconds, sent, counts.micro_batches, idle, planned.memory_bytes, compiled=reports is not None
    )


def _temporaries(report: Report) -> int:
    return report.temporary_bytes + max(0, report.output_bytes - report.alias_bytes)


def _memory(setup: Setup, temporaries: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    generation, layout = setup.generation, setup.layout
    pools = 0 if generation is None else device_bytes(generation.pools)
    state = setup.parameter_bytes() + setup.frozen_bytes() + setup.optimizer_bytes()
    gradients = max(setup.gradient_bytes(role) for role in setup.trained)
    rows = device_bytes(setup.update(setup.trained[0]).arguments[2])
    updates = {role: temporaries[f"update of {role}"] for role in setup.trained}
    held = 0 if setup.models[setup.main].decoder.lora is None else layout.new  # the base stays between steps
    phases = {"update": state + pools + held + rows + max(updates.values())}
    parts = {
        "parameters": setup.parameter_bytes(),
        "frozen models": setup.frozen_bytes(),
        "optimizer": setup.optimizer_bytes(),
        "gradients": gradients,
        "activations": max(updates[role] - setup.gradient_bytes(role) for role in setup.trained),
        "batch": rows,
    }
    if generation is not None:
        kept = device_bytes(generation.decode().arguments[2])
        decoding = max(temporaries.get(name, 0) for name in ("decode", "prefill"))
        parts |= {
            "generation weights": layout.new,
            "KV pages": pools,
            "decoding": kept + decoding,
            "layout change": layout.passing,
        }
        phases["layout change"] = state + pools + layout.new + layout.passing
        phases["generation"] = state + pools + layout.new + kept + decoding
    return parts, phases
