"""The learning curve of a run as a picture: reward of each step, accuracy where it was measured."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

CURVE_FILE = "learning_curve.png"
_REWARD_COLOR, _ACCURACY_COLOR = "#2463a8", "#c4501b"
_PANELS = (("reward/mean", "mean reward"), ("loss/total", "loss"))


def plot_learning_curve(
    rows: Sequence[Mapping[str, float]], path: str | os.PathLike[str], *, title: str = ""
) -> pathlib.Path | None:
    """Draws the metrics of a run, as ``read_metrics`` gives them, to a PNG.

    Returns:
      The path; None when nothing can be drawn (no step has a reward, loss or accuracy).
    """
    curve = next(((name, label) for name, label in _PANELS if _points(rows, name)), None)
    accuracy = _points(rows, "eval/accuracy")
    if curve is None and not accuracy:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas directly: pyplot would start a window system and change the user's global state.
    figure = Figure(figsize=(7, 2.6 * (bool(curve) + bool(accuracy)) + 0.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(bool(curve) + bool(accuracy), 1, sharex=True, squeeze=False)[:, 0]
    if curve:
        _draw_curve(panels[0], _points(rows, curve[0]), curve[1])
    if accuracy:
        _draw_accuracy(panels[-1], accuracy)
    panels[-1].set_xlabel("step")
    figure.suptitle(title or "learning curve", fontsize=11)
    path = pathlib.Path(path)
    figure.savefig(path)
    return path


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over about a tenth of the run around each value; the window shrinks evenly towards both ends.

    Centred, so that the smoothed curve doesn't lag behind the run as an exponential average would.
    """
    half = max(len(values) // 20, 1)
    smoothed = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


def _draw_curve(axes: Any, points: list[tuple[float, float]], label: str) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=_REWARD_COLOR, alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, smooth(values), color=_REWARD_COLOR, linewidth=2, label="moving mean")
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=8)
    _tidy(axes)


def _draw_accuracy(axes: Any, points: list[tuple[float, float]]) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=_ACCURACY_COLOR, marker="o", linewidth=1.5)
    for step, value in (points[0], points[-1]) if len(points) > 1 else points:
        axes.annotate(f"{value:.3f}", (step, value), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=8)
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(-0.02, 1.12)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
