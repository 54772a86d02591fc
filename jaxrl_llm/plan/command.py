"""The command ``plan``: memory, traffic and time of a run on devices that are not here, before anything is rented.

The programs of the run are compiled ahead of time for abstract arrays: no weights are read, no device is used.
"""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

from clu import parameter_overview
from rich.console import Console

from jaxrl_kernels.gpu_compile import Report
from jaxrl_llm import config as configs
from jaxrl_llm.config import RunConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.plan import device_kinds
from jaxrl_llm.plan.abstract_roles import model_shape
from jaxrl_llm.plan.device_kinds import DEVICE_KINDS, PlannedDevices
from jaxrl_llm.plan.estimate import Estimate, estimate
from jaxrl_llm.plan.report import as_json, mesh_text, show, show_ranking
from jaxrl_llm.plan.search import rank, ranked
from jaxrl_llm.plan.setup import Setup

MOST_DEVICES = 4096
COMPILED_OF_SEARCH = 3
"""Of the meshes that a search ranks by formulas, the best is compiled until it stays the best, at most so many."""


def plan(
    config: RunConfig, devices: int, device_kind: str, *, search: bool = False, json_path: pathlib.Path | None = None
) -> dict[str, Any]:
    """Prints the plan and returns it as `report.as_json` has it; of a search, that of the best mesh, with the ranking.

    Args:
      config: what `config.resolve` returns; its mesh is the one that is planned, but for a search.

    Raises:
      UserError: the run can't be on such devices.
    """
    check(devices, device_kind)
    device_kinds.start_without_devices(devices)
    shape = model_shape(config)
    if not search:
        config = configs.with_mesh(config, devices)
    planned = device_kinds.planned_devices(DEVICE_KINDS[device_kind], devices)
    progress, console = Console(stderr=True), Console()
    size = parameter_overview.count_parameters(Decoder(shape).abstract_params())
    title = f"{config.model.path or shape.architecture}, {size / 1e9:.3g} B parameters, on {devices} x {device_kind}"
    if search:
        rows = ranked(config, shape, planned)
        progress.print(
            f"{len(rows)} meshes by formulas, {sum(row[2].fits for row in rows)} of them fit", highlight=False
        )
        for _ in range(COMPILED_OF_SEARCH):
            one, setup, formula = rows[0]
            if formula.compiled:
                break
            rows[0] = one, setup, compiled(setup, planned, progress, mesh_text(one))
            rows.sort(key=rank)
        console.rule(title)
        show_ranking(console, rows)
        found: dict[str, Any] = {"ranking": [as_json(setup, planned, one) for _, setup, one in rows]}
        best, setup, estimated = next(row for row in rows if row[2].compiled)
    else:
        best, found = config, {}
        setup = Setup.of(config, shape, planned)
        estimated = compiled(setup, planned, progress, mesh_text(config))
    console.rule(f"{title}: {mesh_text(best)}")
    show(console, setup, planned, estimated)
    found = {**as_json(setup, planned, estimated), **found}
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json={json_path}: the plan can't be written there ({error.strerror}).") from error
    return found


def check(devices: int, device_kind: str) -> None:
    """
    Raises:
      UserError: the command line asks for what there is not.
    """
    if device_kind not in DEVICE_KINDS:
        raise UserError(f"--device-kind {device_kind or 'is missing'}: it must be one of {', '.join(DEVICE_KINDS)}.")
    if not 1 <= devices <= MOST_DEVICES:
        raise UserError(f"--devices {devices}: give a number of devices from 1 to {MOST_DEVICES}, for example 8.")


def compiled(setup: Setup, planned: PlannedDevices, progress: Console, mesh: str) -> Estimate:
    """The estimate from all programs, each compiled; tells of each."""
    programs = setup.programs
    reports: dict[str, Report] = {}
    for number, (name, program) in enumerate(programs.items(), start=1):
        start = time.perf_counter()
        progress.print(f"compiling {name} for {mesh} ({number} of {len(programs)}) …", highlight=False, end=" ")
        reports[name] = program.compile()
        progress.print(f"{time.perf_counter() - start:.0f} s", highlight=False)
    return estimate(setup, planned, reports)
