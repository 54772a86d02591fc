"""What a person sees: progress, picture, summary."""

from __future__ import annotations

import io
import math
import pathlib

import pytest
from rich.console import Console

from jaxrl_llm.observability.curve import plot_learning_curve, smooth
from jaxrl_llm.observability.progress import Progress, describe
from jaxrl_llm.observability.summary import print_summary, summarize

METRICS = {"reward/mean": 0.25, "kl/mean": 0.01, "perf/generation_tokens_per_s": 1234.5, "eval/accuracy": math.nan}


def test_one_line_says_what_matters():
    assert describe(METRICS) == "reward 0.250  KL 0.0100  tokens/s 1,234"
    assert describe({}) == ""


def test_without_a_reference_the_kl_of_the_update_is_shown():
    """Caught: no KL at all under algorithm.kl_coef = 0, the default."""
    assert describe({"policy/approx_kl": 0.02}) == "KL of a step 0.0200"
    assert describe({"policy/approx_kl": 0.02, "kl/mean": 0.01}) == "KL 0.0100"
    rows = [{"step": 1, "policy/approx_kl": 0.02}, {"step": 2, "policy/approx_kl": 0.03}]
    assert dict(summarize(rows, 2))["KL of a step"] == "0.0200 → 0.0300"
    rows[1]["kl/mean"] = 0.01
    assert dict(summarize(rows, 2))["KL"] == "0.0100 → 0.0100"
    assert "KL" not in dict(summarize([{"step": 1, "loss/total": 2.0}], 1))


def test_without_a_terminal_lines_are_printed(monkeypatch):
    """The last step is always shown; in between at most one line in two seconds."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress(10, 4, console=Console(file=out, width=120)) as progress:
        for step in range(5, 11):
            now[0] += 1.0
            progress.update(step, METRICS)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["5/10", "7/10", "9/10", "10/10"]
    assert lines[0] == "step 5/10  reward 0.250  KL 0.0100  tokens/s 1,234"  # the first step compiles
    assert lines[1] == "step 7/10  reward 0.250  KL 0.0100  tokens/s 1,234  0:03 left"


def test_in_a_terminal_there_is_a_bar():
    out = io.StringIO()
    with Progress(2, console=Console(file=out, width=120, force_terminal=True)) as progress:
        progress.update(2, METRICS)
    assert "2/2" in out.getvalue() and "reward 0.250" in out.getvalue() and "left" in out.getvalue()


def test_the_moving_mean_does_not_lag():
    """A straight line stays itself, ends included. Caught: an exponential average."""
    assert smooth([float(n) for n in range(60)]) == pytest.approx(range(60))
    assert smooth([0.0, 3.0, 0.0]) == pytest.approx([0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "eval/accuracy": 0.3}, {"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": math.nan}],
        [{"step": 1, "loss/total": 2.0}, {"step": 2, "loss/total": 1.0}],
        [{"step": 1, "eval/accuracy": 0.5}],
    ],
)
def test_the_curve_is_drawn_from_what_there_is(tmp_path: pathlib.Path, rows: list[dict]):
    path = plot_learning_curve(rows, tmp_path / "curve.png", title="a run")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_no_picture(tmp_path: pathlib.Path):
    assert plot_learning_curve([{"step": 1, "kl/mean": 0.1}], tmp_path / "curve.png") is None
    assert not list(tmp_path.iterdir())


def test_the_summary_compares_the_first_and_last_tenth():
    """Caught: the first and last step alone, where one lucky batch looks like progress."""
    rows = [
        {"step": step, "reward/mean": step / 100, "time/step_s": 2.0, "time/update_s": 1.0} for step in range(1, 21)
    ]
    rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"] = 0.25, 0.95
    lines = dict(summarize(rows, 20))
    assert lines["steps"] == "20 of 20"
    assert lines["mean reward"] == "0.015 → 0.195"
    assert lines["held-out accuracy"] == "0.250 → 0.950"
    assert lines["time in steps"] == "40.0 s: update 50%"
    out = io.StringIO()
    print_summary(rows, 20, {"folder": "outputs/x"}, Console(file=out, width=100))
    assert "outputs/x" in out.getvalue() and "0.250 → 0.950" in out.getvalue()
