"""Rows from files."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.data.sources import iterate_rows, read_rows
from jaxrl_llm.errors import UserError


def test_parquet_gives_plain_python(tmp_path: Path):
    """Case D01. Seen to catch: reading through pandas, whose list columns are arrays."""
    row = {
        "prompt": [{"role": "user", "content": "hi"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 3, "tags": ["a", "b"]},
    }
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    (read,) = read_rows(file)
    assert read == row
    assert type(read["prompt"]) is list and type(read["prompt"][0]) is dict
    assert type(read["extra_info"]["index"]) is int and type(read["extra_info"]["tags"]) is list
    assert type(read["prompt"][0]["content"]) is str and bool(read["prompt"])


def test_parquet_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Case D07. Seen to catch: `read_table`, which holds the whole nested file and fails above 2 GB."""
    rows = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(100)]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=10)
    read = []
    original = pyarrow.RecordBatch.to_pylist

    def counted(batch: pyarrow.RecordBatch) -> list:
        read.append(batch.num_rows)
        return original(batch)

    class Batch:
        def __init__(self, batch: pyarrow.RecordBatch):
            self._batch = batch

        def to_pylist(self) -> list:
            return counted(self._batch)

    iter_batches = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr("jaxrl_llm.data.sources.PARQUET_BATCH_ROWS", 10)
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "iter_batches",
        lambda self, **options: (Batch(batch) for batch in iter_batches(self, **options)),
    )
    iterator = iterate_rows(file)
    assert next(iterator) == rows[0]
    assert read == [10]
    assert list(iterator) == rows[1:]


def test_json_files(tmp_path: Path):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": None}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert read_rows(tmp_path / "rows.jsonl") == read_rows(tmp_path / "rows.json") == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": ', "line 2 is not valid JSON"),
        ("rows.jsonl", "[1]", "line 1 is a JSON list"),
        ("rows.jsonl", '{"a": 1}\n{"a": ' + "9" * 5000 + "}", "line 2 is not valid JSON: Exceeds the limit"),
        ("rows.jsonl", "[" * 100_000, "line 1 is not valid JSON: maximum recursion"),
        ("rows.json", '{"a": 1}', "a list of objects"),
        ("rows.parquet", "PAR1 not", "can't be read as parquet"),
        ("rows.jsonl", "", "holds no rows"),
        ("rows.csv", "a,b", "is not understood"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(("name", "where"), [("rows.jsonl", r"rows\.jsonl, line 2"), ("rows.json", r"rows\.json")])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le"])
def test_another_encoding_is_named(tmp_path: Path, name: str, where: str, encoding: str):
    """Caught: a UnicodeDecodeError that comes through."""
    first, second = b'{"prompt": "a"}', '{"prompt": "\u00e9\ud7a3"}'.encode(encoding, "replace")
    (tmp_path / name).write_bytes(first + b"\n" + second if name == "rows.jsonl" else b"[" + second + b"]")
    with pytest.raises(UserError, match=f"{where} is not UTF-8 text"):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_files_as_windows_writes_them(tmp_path: Path, name: str):
    """Caught: the byte-order mark given to the JSON parser, which refuses it."""
    text = '{"prompt": "\u00e9"}' if name == "rows.jsonl" else '[{"prompt": "\u00e9"}]'
    (tmp_path / name).write_bytes(f"\ufeff{text}\r\n".encode())
    assert read_rows(tmp_path / name) == [{"prompt": "\u00e9"}]


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pyarrow tells some damage with an OSError. Caught: only its own exceptions expected."""
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a"}]), file)

    def damaged(self, **options):
        raise OSError("Couldn't deserialize thrift")

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", damaged)
    with pytest.raises(UserError, match=r"rows\.parquet can't be read as parquet: Couldn't"):
        read_rows(file)


def test_missing_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="builtin:addition/sft"):
        read_rows("builtin:addition/test")
    with pytest.raises(UserError, match=r"data\.train"):
        read_rows("")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"jaxrl-llm\[datasets\]"):
        read_rows("openai/gsm8k:main@test")


def test_times_that_python_can_not_hold_are_refused_by_name(tmp_path: Path):
    """Caught: the reader's own ValueError and OverflowError."""
    for number, kind in ((1, "ns"), (2**60, "us")):
        file = tmp_path / f"{kind}.parquet"
        column = pyarrow.array([number], pyarrow.timestamp(kind))
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "when": column}), file)
        with pytest.raises(UserError, match="whose values have no Python form"):
            read_rows(file)
