"""Checks and times every kernel on the device at hand.

    python -m jaxrl_kernels.bench                the shared cases, and shapes of real models timed
    python -m jaxrl_kernels.bench --check        the same, then generation and a GRPO step of a 1.5B-shaped model
    python -m jaxrl_kernels.bench --json FILE    the figures as JSON too

Right means: equal to the reference within rounding. Shares are of a copy's bandwidth and of a matrix product's rate,
both measured in the same run. On a CPU all shapes are small. Exits with 1 if any result is wrong. Imports only jax,
numpy and this package; the model's part of ``--check`` needs jaxrl_llm and says so where that is missing.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_kernels.bench import problems, results, timing
from jaxrl_kernels.bench.problem import Problem
from jaxrl_kernels.device import target_device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_kernels.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="all that a GPU should show, in under 5 minutes on one")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures here")
    parser.add_argument("--size", default="auto", choices=("auto", *problems.SIZES), help="auto: full on a GPU")
    parser.add_argument("--only", default="", metavar="KERNEL", help="one kernel")
    options = parser.parse_args(arguments)

    started = time.perf_counter()
    device = target_device()
    size_name = options.size if options.size != "auto" else ("full" if device.platform == "gpu" else "small")
    size = problems.SIZES[size_name]
    about = {
        "device": device.kind,
        "compute_capability": device.compute_capability,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "size": size_name,
    }
    print(f"{device.kind}, jax {jax.__version__}, Python {about['python']}, {about['date']}; sizes: {size_name}\n")

    copy = timing.copy_bandwidth(size.copy_bytes)
    product = timing.product_rate(size.product, size.dtype)
    print(
        f"copy: {copy / 1e9:,.1f} GB/s; product of {size.dtype} matrices: {product / 1e12:,.2f} TFLOP/s\n", flush=True
    )

    def chosen(all_problems: list[Problem]) -> list[Problem]:
        return [problem for problem in all_problems if options.only in ("", problem.kernel)]

    big = chosen(problems.large(size))
    checked = results.check(chosen(problems.shared()), workers=min(16, os.cpu_count() or 1))
    checked += results.check(big)
    show(CHECK_COLUMNS, [check_row(group) for group in by_implementation(checked)])
    not_right = {(entry.kernel, entry.implementation, entry.problem) for entry in checked if entry.verdict != "right"}
    timed = results.time(big, copy, product, not_right)
    show(TIME_COLUMNS, [time_row(entry) for entry in timed])

    figures: dict[str, Any] = {
        **about,
        "copy_bytes_per_s": copy,
        "product_flops_per_s": product,
        "checked": [dataclasses.asdict(entry) for entry in checked],
        "timed": [dataclasses.asdict(entry) for entry in timed],
    }
    if options.check:
        figures["model"] = model_figures(size_name, CHECK_S - (time.perf_counter() - started))
    figures["seconds"] = time.perf_counter() - started
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    wrong = [entry for entry in checked if entry.verdict == "wrong"]
    for entry in wrong:
        print(f"WRONG: {entry.kernel} {entry.implementation}, {entry.problem}: {entry.reason}")
    print(f"{'WRONG results' if wrong else 'All that can run here is right'}; {figures['seconds']:.0f} s")
    return 1 if wrong else 0


def model_figures(size_name: str, left_s: float) -> dict[str, Any]:
    """Generation and a GRPO step, by jaxrl_llm if it is there; stops between two figures when the time is up."""
    try:
        from jaxrl_llm.bench import whole_model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"generation and a GRPO step: left out, jaxrl_llm can't be imported ({error})\n")
        return {"left_out": str(error)}
    end = time.perf_counter() + left_s
    found: dict[str, Any] = {}
    for name, value in whole_model.measure(size_name):
        found[name] = value
        if time.perf_counter() > end:
            found["left_out"] = f"the rest, after {CHECK_S} s"
            break
    show(
        ("figure", "value"), [(name, f"{value:,.4g}" if name != "left_out" else value) for name, value in found.items()]
    )
    return found


CHECK_S = 270
"""Seconds of ``--check`` after which no further figure of the model is begun."""

CHECK_COLUMNS = ("kernel", "implementation", "right", "largest error", "note")
TIME_COLUMNS = ("kernel", "implementation", "shape", "time", "rate", "share")


def by_implementation(checked: Sequence[results.Checked]) -> list[list[results.Checked]]:
    """The results grouped by kernel and implementation, in their order."""
    groups: dict[tuple[str, str], list[results.Checked]] = {}
    for entry in checked:
        groups.setdefault((entry.kernel, entry.implementation), []).append(entry)
    return list(groups.values())


def check_row(group: Sequence[results.Checked]) -> tuple[str, ...]:
    """One line: how many of the problems that it takes are right, and what it refuses."""
    taken = [entry for entry in group if entry.verdict != "refused"]
    refused = [entry for entry in group if entry.verdict == "refused"]
    wrong = [entry for entry in taken if entry.verdict == "wrong"]
    names = group[0].kernel, group[0].implementation
    if not taken:
        return (*names, "-", "-", f"can't run here: {refused[0].reason}")
    note = f"WRONG: {', '.join(entry.problem for entry in wrong[:3])}" if wrong else ""
    if refused and not wrong:
        note = f"{len(refused)} refused, such as {refused[0].problem}: {refused[0].reason}"
    error = max(entry.error for entry in taken)
    return (*names, f"{len(taken) - len(wrong)} of {len(taken)}", f"{error:.1e}", note)


def time_row(entry: results.Timed) -> tuple[str, ...]:
    if entry.unit == "B/s":
        rate, of = f"{entry.rate / 1e9:,.1f} GB/s", "copy"
    else:
        rate, of = f"{entry.rate / 1e12:,.3g} TFLOP/s", "product"
    shape = f"{entry.problem}, {entry.part}" if entry.part else entry.problem
    taken = f"{entry.seconds * 1e6:,.0f} µs"
    return entry.kernel, entry.implementation, shape, taken, rate, f"{entry.share:.0%} of the {of}"


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], write: Callable[[str], Any] = print) -> None:
    """A table in Markdown, columns aligned."""
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    write(line(columns))
    write("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        write(line(row))
    write("")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
