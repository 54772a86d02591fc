"""The configurations that ship: each tells a command that exists, each algorithm has one, and they teach."""

from __future__ import annotations

import ast
import json
import pathlib
import re

import jax
import pytest

from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.config import resolve
from jaxrl_llm.config_file import read_config
from jaxrl_llm.rewards.calling import find_function
from jaxrl_llm.trainer import Trainer

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.py"))
TINY = [path for path in FILES if path.stem.startswith("tiny_")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_tells_its_command(path: pathlib.Path):
    """Caught: a file copied from another whose docstring still names that one."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    named = re.findall(r"python -m jaxrl_llm\.main .*--config (\S+)", text)
    assert f"configs/{path.name}" in named
    assert all((ROOT / name).is_file() for name in named)


def test_each_algorithm_has_a_tiny_configuration():
    """Caught: an algorithm without a file."""
    assert {resolve(read_config(str(path)), 1).algorithm.name for path in TINY} == set(ALGORITHMS)


def test_the_readme_lists_each_tiny_configuration():
    """Caught: a file that its table lacks; a row of a file that is gone."""
    listed = re.findall(r"^\|.*`(tiny_\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.stem for path in TINY]


@pytest.mark.parametrize(
    ("completion", "score"), [("95", 1.0), ("85", 0.5), ("5", 0.5), ("195", 2 / 3), ("59", 0.0), ("", 0.0)]
)
def test_the_share_of_right_digits_counts_from_the_last(completion: str, score: float):
    """Caught: digits compared from the first; a longer completion not counted against its length."""
    config = read_config(str(ROOT / "configs" / "tiny_gdpo.py"))
    assert find_function(config.rewards.digits.function)(completion=completion, answer="95") == pytest.approx(score)


def taught(name: str, workdir: pathlib.Path, **changes) -> dict[int, float]:
    """Held-out accuracy by step of a run of a tiny configuration, with options by path (``__`` is a dot)."""
    overrides = {
        "checkpoint.save_final": False,
        "checkpoint.every_steps": 0,
        "eval.every_steps": 0,
        "eval.max_rows": 200,
    }
    overrides |= {path.replace("__", "."): value for path, value in changes.items()}
    config = read_config(
        str(ROOT / "configs" / f"{name}.py"), [(path, str(value)) for path, value in overrides.items()]
    )
    Trainer(resolve(config, 1), workdir, devices=jax.devices()[:1]).train()
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}


def test_dpo_learns_from_pairs(tmp_path: pathlib.Path):
    """Nothing is generated but the answers of the two evaluations."""
    accuracy = taught("tiny_dpo", tmp_path, num_steps=10)
    assert accuracy[10] > accuracy[0] + 0.1, accuracy


def test_rloo_learns_from_its_own_answers(tmp_path: pathlib.Path):
    accuracy = taught("tiny_rloo", tmp_path, num_steps=8)
    assert accuracy[8] > accuracy[0] + 0.1, accuracy
