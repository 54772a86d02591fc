"""The growth benchmark on a tiny model: every row is there, and what holds by construction holds in the tables."""

import dataclasses
import json
import sys

import pytest

from jaxrl_llm.bench import __main__ as bench
from jaxrl_llm.bench.growth import QUICK, TABLES, load, measure
from jaxrl_llm.bench.whole_model import WORK

PAGE = 16  # tokens, the default of rollout.page_size


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """As the command writes them."""
    file = tmp_path_factory.mktemp("growth") / "growth.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "restart_with_huge_pages", lambda: None)  # it would start this process again
        patch.setattr(sys, "argv", ["bench", "growth", "--quick", "--json", str(file)])
        bench.main()
    about = json.loads(file.read_text())
    assert about["model"] == "random" and about["workload"]["batches"] == list(QUICK.batches)
    return about["figures"]


def test_every_row_is_there_and_positive(tables):
    """Caught: a point left out; a time that is not measured."""
    assert tuple(tables) == TABLES
    assert [row["batch"] for row in tables["batch"]] == list(QUICK.batches)
    assert [row["context"] for row in tables["context"]] == list(QUICK.contexts)
    assert [(row["prompt"], row["group"], row["prompts shared"]) for row in tables["update"]] == [
        (prompt, group, shared) for prompt in QUICK.prompts for group in QUICK.groups for shared in ("no", "yes")
    ]
    values = [value for rows in tables.values() for row in rows for value in row.values()]
    assert all(value > 0 for value in values if not isinstance(value, str))


def test_pages_follow_the_live_tokens(tables):
    """Each running sequence holds the pages of its cached tokens and of those of a dispatch queued ahead (8 here), the
    last one partly filled; nothing else is held.

    Caught: the pages of the pool in place of those in use; pages counted after the finished samples gave theirs back.
    """
    rows = tables["memory"]
    config, (slots, longest, _) = WORK["tiny"].model, QUICK.load
    page_bytes = 2 * config.num_layers * PAGE * config.num_kv_heads * config.head_size * 4
    for row in rows:
        assert row["live tokens"] <= PAGE * row["pages in use"] < row["live tokens"] + (PAGE + 8) * row["running"]
        assert row["MiB"] * 2**20 == pytest.approx(row["pages in use"] * page_bytes)
        assert row["of that"] == pytest.approx(row["pages in use"] / (slots * longest // PAGE))
    assert max(row["running"] for row in rows) == slots and rows[-1]["running"] < slots
    # The load grows and ends: what is in use differs by more than the pool that stands behind it.
    assert max(row["pages in use"] for row in rows) > 4 * min(row["pages in use"] for row in rows)


def test_updates_compute_full_rows(tables):
    """Every token once, the prompt of a group once or with each completion. Caught: rows padded to one length."""
    for row in tables["update"]:
        prompt, group, new = row["prompt"], row["group"], QUICK.update_tokens
        expected = prompt + group * new if row["prompts shared"] == "yes" else group * (prompt + new)
        assert row["tokens computed"] == expected


def test_what_comes_after_the_time_is_left_out(capsys):
    size = dataclasses.replace(QUICK, total_s=0.0)
    ((name, rows),) = measure(load("random"), size, ("update",))
    assert name == "update" and len(rows) == 1
    assert "update: its time is up" in capsys.readouterr().err


def test_an_unknown_table_is_named(monkeypatch, capsys):
    monkeypatch.setattr(bench, "restart_with_huge_pages", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench", "growth", "--tables", "batch,memry"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "memry is none of batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bound", "--quick"], "--quick says nothing about bound; it is for growth, memory, pipeline"),
        (["generation", "--prompts", "8"], "--prompts says nothing about generation; it is for step, bound"),
        (["pipeline", "--model", "builtin:tiny_addition"], "--model says nothing about pipeline"),
        (["memory", "--quick", "--model", "builtin:tiny_addition"], "in place of --model"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(arguments, message, monkeypatch, capsys):
    """Caught: figures of the given model, written as those of a random one."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        bench.parse()
    assert message in capsys.readouterr().err


def test_a_workload_is_told_where_it_is_one(monkeypatch, tmp_path):
    """`generation` has its own loads. Caught: the prompts of `step` written beside its figures."""
    file = tmp_path / "figures.json"
    monkeypatch.setattr(bench, "restart_with_huge_pages", lambda: None)
    monkeypatch.setattr(bench.generation, "measure", lambda model, repeats: ({}, {}))
    monkeypatch.setattr(bench.generation, "figures", lambda seconds: {})
    monkeypatch.setattr(sys, "argv", ["bench", "generation", "--steps", "2", "--json", str(file)])
    bench.main()
    assert json.loads(file.read_text())["workload"] == {"steps": 2}
