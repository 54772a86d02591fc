"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl_llm.config import RunConfig
from jaxrl_llm.plan.device_kinds import MEMORY_MARGIN, Efficiency, PlannedDevices
from jaxrl_llm.plan.estimate import Estimate
from jaxrl_llm.plan.memory import BlockMemory
from jaxrl_llm.plan.setup import Setup

SHOWN_OF_SEARCH = 12


def mesh_text(config: RunConfig) -> str:
    texts = [sizes_text(dataclasses.asdict(config.mesh))]
    texts += [f"{role}: {sizes_text(dataclasses.asdict(mesh))}" for role, mesh in config.placement.blocks().items()]
    if config.rollout.tensor:
        texts.append(f"rollout.tensor {config.rollout.tensor}")
    return "; ".join(texts)


def sizes_text(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 device"


def show(console: Console, setup: Setup, planned: PlannedDevices, plan: Estimate) -> None:
    """Memory by part and phase, bytes sent, seconds, and whether it fits."""
    unit, scale = ("GB", 1e9) if plan.peak_bytes >= 1e9 else ("MB", 1e6)
    for name, block in plan.blocks.items():
        where = "Memory of a device"
        if len(plan.blocks) > 1:
            fullest = ", the fullest block" if name == plan.fullest else ""
            where += f" of {name} ({sizes_text(block.mesh.shape)}){fullest}"
        console.print(_memory_table(where, block, unit, scale))
    if any(plan.sent.values()):
        console.print(_sent_table(plan, unit, scale))
    seconds = Table(title="A step, estimated")
    seconds.add_column("phase")
    seconds.add_column("s", justify="right")
    for name, value in plan.seconds.items():
        seconds.add_row(name, f"{value:,.3g}")
    seconds.add_section()
    seconds.add_row("step", f"{plan.step_s:,.3g}")
    if plan.step_s < 0.999 * sum(plan.seconds.values()):
        seconds.caption = "blocks of devices work beside each other"
    console.print(seconds)
    for line in notes(setup, planned, plan):
        console.print(line, highlight=False)


def _memory_table(title: str, block: BlockMemory, unit: str, scale: float) -> Table:
    table = Table(title=title)
    table.add_column("part")
    table.add_column(unit, justify="right")
    for name, size in block.parts.items():
        if size:
            table.add_row(name, f"{size / scale:,.2f}")
    table.add_section()
    for name, size in block.phases.items():
        table.add_row(f"all there is: {name}", f"{size / scale:,.2f}")
    if block.on_host:
        table.caption = f"{block.on_host / scale:,.2f} {unit} of it rest in the host's memory between uses"
    return table


def _sent_table(plan: Estimate, unit: str, scale: float) -> Table:
    table = Table(title=f"Received by a device, {unit}")
    for name in ("program", "collective", "over", "each time", "once"):
        table.add_column(name, justify="right" if name in ("each time", "once") else "left")
    for program, sent in plan.sent.items():
        for one in sent:
            if one.bytes >= 1e-4 * scale:  # counts and flags
                figures = (f"{one.bytes / scale:,.4g}", "") if one.in_loop else ("", f"{one.bytes / scale:,.4g}")
                where = ", ".join(one.axes) + (" (across machines)" if one.across_hosts else "")
                table.add_row(program, f"{one.kind} ({one.count})", where, *figures)
    table.caption = "each time: of a micro-batch of an update, or of a token that is decoded"
    return table


def notes(setup: Setup, planned: PlannedDevices, plan: Estimate) -> list[str]:
    """The verdict, and what the figures rest on."""
    efficiency, kind = Efficiency(), planned.kind
    limit = (1 - MEMORY_MARGIN) * planned.memory_bytes
    verdict = "It fits" if plan.fits else "It does NOT fit"
    if plan.compiled and planned.simulated:
        verdict += ", if its programs took what the CPU's compiler gives them"
    if plan.compiled and not planned.simulated:
        source = "the compiler's"
    elif plan.compiled:
        source = (
            "the CPU compiler's, since the CUDA plugin is not installed (pip install --no-deps jax-cuda13-plugin "
            "jax-cuda13-pjrt, of jax's version): XLA for GPUs fuses and lays out otherwise, so take them as rough"
        )
    else:
        source = "of a formula, nothing was compiled"
    fullest = plan.blocks[plan.fullest]
    where = f" on the devices of {plan.fullest} ({sizes_text(fullest.mesh.shape)}), the fullest block"
    lines = [
        f"{verdict}: at most {plan.peak_bytes / 1e9:.2f} GB{where if len(plan.blocks) > 1 else ''} of "
        f"{planned.memory_bytes / 1e9:.1f}, of which "
        f"{MEMORY_MARGIN:.0%} stay free for the driver, NCCL and the allocator: {limit / 1e9:.1f} remain.",
        f"Temporaries are {source}.",
        f"An update has {plan.micro_batches} micro-batches of {setup.row_shape.rows_per_micro} rows of "
        f"{setup.row_shape.row_tokens} tokens where every prompt and completion is as long as it may be.",
        f"Seconds assume {efficiency.training:.0%} of {kind.flops / 1e12:.4g} TFLOP/s in training and prefill, "
        f"{efficiency.decoding:.0%} of {kind.memory_rate / 1e12:.3g} TB/s in decoding, {efficiency.communication:.0%} "
        f"of {kind.link_rate / 1e9:.3g} GB/s within a machine and of {kind.network_rate / 1e9:.3g} between machines, "
        f"and {efficiency.collective_s * 1e6:.0f} us for each collective; rewards, data and the host are not in them. "
        f"Peaks: {kind.source}.",
    ]
    if setup.mesh.shape["pipeline"] > 1:
        lines.insert(3, f"The stages of the pipeline are idle {plan.bubble:.1%} of an update.")
    return lines


def show_ranking(console: Console, rows: Sequence[tuple[RunConfig, Setup, Estimate]]) -> None:
    table = Table(title="Meshes, best first")
    for name in ("mesh", "GB of a device", "fits", "step s", "layout", "prefill", "decode", "training", "temporaries"):
        table.add_column(name, justify="left" if name in ("mesh", "fits", "temporaries") else "right")
    for config, _, plan in rows[:SHOWN_OF_SEARCH]:
        generating = [plan.seconds.get(name, 0.0) for name in ("layout change", "prefill", "decode")]
        table.add_row(
            mesh_text(config),
            f"{plan.peak_bytes / 1e9:.1f}",
            "yes" if plan.fits else "no",
            f"{plan.step_s:.3g}",
            *[f"{value:.3g}" for value in generating],
            f"{sum(plan.seconds.values()) - sum(generating):.3g}",
            "compiled" if plan.compiled else "formula",
        )
    if len(rows) > SHOWN_OF_SEARCH:
        table.caption = f"and {len(rows) - SHOWN_OF_SEARCH} more, which --json has"
    console.print(table)


def as_json(setup: Setup, planned: PlannedDevices, plan: Estimate) -> dict[str, Any]:
    """Everything of a plan: bytes of one device, seconds of a step. What stands outside ``blocks`` is of the fullest
    one."""
    return {
        "mesh": dict(setup.mesh.shape),
        "generation_mesh": None if setup.generation is None else dict(setup.generation.mesh.shape),
        "devices": sum(mesh.size for mesh in setup.groups.meshes),
        "device_kind": planned.kind.name,
        "compiled": plan.compiled,
        "simulated_on_cpu": planned.simulated,
        "dtype": str(setup.dtype),
        "memory_bytes": planned.memory_bytes,
        "margin": MEMORY_MARGIN,
        "peak_bytes": plan.peak_bytes,
        "fits": plan.fits,
        "parts_bytes": plan.parts,
        "phases_bytes": plan.phases,
        "fullest": plan.fullest,
        "blocks": {
            name: {
                "mesh": dict(block.mesh.shape),
                "peak_bytes": block.peak_bytes,
                "fits": block.fits,
                "parts_bytes": block.parts,
                "phases_bytes": block.phases,
                "on_host_bytes": block.on_host,
            }
            for name, block in plan.blocks.items()
        },
        "seconds": plan.seconds,
        "step_s": plan.step_s,
        "micro_batches": plan.micro_batches,
        "bubble": plan.bubble,
        "received": {name: [dataclasses.asdict(one) for one in sent] for name, sent in plan.sent.items()},
        "peaks": {
            name: getattr(planned.kind, name)
            for name in ("flops", "memory_rate", "link_rate", "network_rate", "source")
        },
        "efficiency": dataclasses.asdict(Efficiency()),
    }
