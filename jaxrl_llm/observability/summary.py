"""What a run came to, in one table at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from jaxrl_llm.observability.progress import KL_LABELS

Row = Mapping[str, float]


def summarize(rows: Sequence[Row], num_steps: int) -> list[tuple[str, str]]:
    """The lines of the summary of a run of ``num_steps`` from its metrics (``read_metrics``): label and text.

    First and last rewards and KLs are means over the first and last tenth of the steps, so that one lucky batch is not
    taken for progress.
    """
    lines = [("steps", f"{max((int(row['step']) for row in rows), default=0)} of {num_steps}")]
    rewards, losses = _values(rows, "reward/mean"), _values(rows, "loss/total")
    kl, divergences = next(
        ((KL_LABELS[name], found) for name in KL_LABELS if (found := _values(rows, name))), ("KL", [])
    )
    for label, values, form in (
        ("mean reward", rewards, ".3f"),
        ("loss", [] if rewards else losses, ".3f"),  # a policy loss says nothing by itself
        (kl, divergences, ".4f"),
    ):
        if values:
            tenth = max(len(values) // 10, 1)
            lines.append((label, f"{_mean(values[:tenth]):{form}} → {_mean(values[-tenth:]):{form}}"))
    for label, name in (("held-out accuracy", "eval/accuracy"), ("held-out reward", "eval/reward/mean")):
        values = _values(rows, name)
        if values:
            lines.append((label, f"{values[0]:.3f} → {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"))
    differences = _values(rows, "rollout/logprob_diff_max")
    if differences:
        lines.append(("largest log-prob difference", f"{max(differences):.1e} (decoder against trainer)"))
    for label, name in (
        ("generation", "perf/generation_tokens_per_s"),
        ("training", "perf/train_tokens_per_s"),
    ):
        values = _values(rows, name)
        if values:
            lines.append((label, f"{_median(values):,.0f} tokens/s (median)"))
    lines += _time_lines(rows)
    peaks = _values(rows, "memory/peak_bytes")
    if peaks:
        lines.append(("peak memory", f"{max(peaks) / 2**30:.2f} GiB"))
    compiles = _values(rows, "compile/count")
    if compiles:
        lines.append(
            (
                "programs compiled",
                f"{sum(compiles):.0f} in {sum(_values(rows, 'compile/seconds')):.1f} s",
            )
        )
    return lines


def print_summary(
    rows: Sequence[Row],
    num_steps: int,
    files: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> None:
    """Prints ``summarize(rows, num_steps)`` as a table.

    Args:
      files: what to look at next, as label and path.
    """
    table = Table(title="run summary", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in [*summarize(rows, num_steps), *(files or {}).items()]:
        table.add_row(label, text)
    (console or Console(stderr=True)).print(table)


def _time_lines(rows: Sequence[Row]) -> list[tuple[str, str]]:
    total = sum(_values(rows, "time/step_s"))
    if not total:
        return []
    names = {name for row in rows for name in row if name.startswith("time/") and name != "time/step_s"}
    shares = {name.removeprefix("time/").removesuffix("_s"): sum(_values(rows, name)) / total for name in names}
    largest = sorted(shares.items(), key=lambda pair: -pair[1])
    text = ", ".join(f"{phase} {share:.0%}" for phase, share in largest if share >= 0.005)
    return [("time in steps", f"{total:.1f} s: {text}")]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
