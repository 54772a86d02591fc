"""From shapes and compiled programs to memory by part, seconds by phase, and whether a run fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_kernels.gpu_compile import Report
from jaxrl_llm.plan import formulas
from jaxrl_llm.plan.collectives import Collective, collectives
from jaxrl_llm.plan.device_kinds import Efficiency, PlannedDevices
from jaxrl_llm.plan.memory import BlockMemory, memory_by_block
from jaxrl_llm.plan.seconds import Work, phase_seconds, step_seconds
from jaxrl_llm.plan.setup import Setup


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A plan of a run on one mesh, and the blocks beside it. Bytes are of one device.

    Attributes:
      blocks: memory by block of devices.
      seconds: by phase of a step.
      step_s: of a step, whose phases may run beside each other.
      sent: collectives by program.
      micro_batches: of an update, as expected.
      bubble: part of the time of layers in which the policy's pipeline has nothing to do; 0 without one.
      compiled: whether temporaries are the compiler's, or a formula's.
    """

    blocks: dict[str, BlockMemory]
    seconds: dict[str, float]
    step_s: float
    sent: dict[str, list[Collective]]
    micro_batches: int
    bubble: float
    compiled: bool

    @property
    def fullest(self) -> str:
        """The block whose devices hold the most."""
        return max(self.blocks, key=lambda name: self.blocks[name].peak_bytes)

    @property
    def parts(self) -> dict[str, int]:
        """Of the fullest block."""
        return self.blocks[self.fullest].parts

    @property
    def phases(self) -> dict[str, int]:
        return self.blocks[self.fullest].phases

    @property
    def peak_bytes(self) -> int:
        return self.blocks[self.fullest].peak_bytes

    @property
    def fits(self) -> bool:
        return all(block.fits for block in self.blocks.values())


def estimate(
    setup: Setup, planned: PlannedDevices, reports: Mapping[str, Report] | None, efficiency: Efficiency | None = None
) -> Estimate:
    """
    Args:
      reports: of `Setup.programs` by name; None takes formulas for temporaries and collectives.
    """
    efficiency = efficiency or Efficiency()
    if reports is None:
        temporaries, sent = formulas.temporaries(setup), formulas.sent(setup)
    else:
        temporaries = {name: _temporaries(report) for name, report in reports.items()}
        sent = {name: collectives(report.text, setup.programs[name].mesh) for name, report in reports.items()}
    work = Work.of(setup)
    seconds = phase_seconds(setup, planned, efficiency, work, sent)
    return Estimate(
        blocks=memory_by_block(setup, temporaries, planned.memory_bytes),
        seconds=seconds,
        step_s=step_seconds(setup, seconds),
        sent=sent,
        micro_batches=work.micro_batches(setup.row_shape),
        bubble=0.0 if setup.schedule is None else setup.schedule.bubble,
        compiled=reports is not None,
    )


def _temporaries(report: Report) -> int:
    return report.temporary_bytes + max(0, report.output_bytes - report.alias_bytes)
