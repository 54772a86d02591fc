"""The command that writes data files."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.data.columns import map_row
from jaxrl_llm.data.prepare import main
from jaxrl_llm.data.sources import read_rows

ROWS = [
    {"question": "A pen costs $2. What do 3 cost?", "answer": "3*2 = <<3*2=6>>6\n#### 6"},
    {"question": "What is half of 2,468?", "answer": "It is 1,234.\n#### 1,234"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_gsm8k(source: Path, tmp_path: Path, ending: str):
    output = tmp_path / "new" / f"train.{ending}"
    assert main(["gsm8k", "--input", str(source), "--output", str(output)]) == 0
    first, second = read_rows(output)
    assert list(first) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "6"}
    assert first["extra_info"]["split"] == "train" and second["extra_info"]["index"] == 1
    record = map_row(second, "row 1")
    assert record.answer == "1234"
    assert record.prompt[0]["content"].startswith("What is half") and "####" in record.prompt[0]["content"]
    assert not list(output.parent.glob(".*"))


def test_files_are_not_replaced_unasked(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Seen to catch: opening the output before looking whether it is there."""
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    command = ["gsm8k", "--input", str(source), "--output", str(output)]
    assert main(command) == 2
    assert output.read_text() == "precious" and "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert len(read_rows(output)) == 2


def test_bad_input_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture):
    source, output = tmp_path / "bad.jsonl", tmp_path / "out.parquet"
    source.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"question": "x", "answer": "6"}))
    assert main(["gsm8k", "--input", str(source), "--output", str(output)]) == 2
    assert "row 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


def test_built_in_tasks(tmp_path: Path):
    output = tmp_path / "eval.parquet"
    assert main(["addition", "--split", "eval", "--output", str(output)]) == 0
    assert read_rows(output) == read_rows("builtin:addition/eval")
