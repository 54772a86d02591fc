"""Where rows come from: JSONL, JSON and parquet files, Hugging Face data sets, and the built-in tasks.

A row is a plain ``dict`` of plain Python values (lists, dicts, strings, numbers) whatever the file, so a
chat template or a reward never meets an array where it expects a list.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxrl_llm.data.addition import addition_rows
from jaxrl_llm.data.arithmetic import arithmetic_rows
from jaxrl_llm.errors import UserError, readable

Row = dict[str, Any]

BUILTIN: dict[str, tuple[Callable[[str], list[Row]], tuple[str, ...]]] = {
    "addition": (addition_rows, ("train", "eval", "sft", "preferences", "preferences_eval", "labels")),
    "arithmetic": (arithmetic_rows, ("train", "eval")),
}
PARQUET_BATCH_ROWS = 1024
HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[^@]+))?")


def read_rows(path: str | Path) -> list[Row]:
    """Every row of ``path``, in file order.

    ``path`` is a ``.jsonl``, ``.json`` (a list of objects) or ``.parquet`` file, ``builtin:TASK/SPLIT``, or a
    Hugging Face data set ``owner/name[:config][@split]`` (split ``train`` unless given).

    Raises:
      UserError: nothing is there, it can't be read, or it holds no row.
    """
    rows = list(iterate_rows(path))
    if not rows:
        raise UserError(f"The data file {path} holds no rows. Point data.train or data.eval at a file with rows.")
    return rows


def iterate_rows(path: str | Path) -> Iterator[Row]:
    """Like ``read_rows``, one row at a time; a parquet file is never in memory as a whole."""
    text = str(path)
    if not text:
        raise UserError(
            "No data file is given. Set data.train (and data.eval) to a .jsonl or .parquet file, "
            "builtin:addition/train, or a Hugging Face data set such as openai/gsm8k:main."
        )
    if text.startswith("builtin:"):
        return iter(_builtin(text.removeprefix("builtin:")))
    file = Path(os.path.expanduser(text))
    readers = {".jsonl": _json_lines, ".json": _json_list, ".parquet": _parquet}
    with readable(f"The data file {text}"):
        there, is_file = file.exists(), file.is_file()
    if file.suffix in readers:
        if not is_file:
            raise UserError(f"The data file {file} does not exist (looked in {file.absolute().parent}).")
        return readers[file.suffix](file)
    match = HUB_ID.fullmatch(text)
    if match and not there:
        return _hugging_face(match["name"], match["config"], match["split"] or "train")
    raise UserError(
        f"The data path {text!r} is not understood. Allowed: a file ending in {', '.join(readers)}; "
        f"builtin:{'|'.join(BUILTIN)}/SPLIT; a Hugging Face data set owner/name[:config][@split]."
    )


def _builtin(name: str) -> list[Row]:
    task, _, split = name.partition("/")
    if task not in BUILTIN or split not in BUILTIN[task][1]:
        known = ", ".join(f"builtin:{t}/{s}" for t, (_, splits) in BUILTIN.items() for s in splits)
        raise UserError(f"The built-in data set 'builtin:{name}' does not exist. Known: {known}.")
    return BUILTIN[task][0](split)


def _json_lines(file: Path) -> Iterator[Row]:
    # As bytes, so that a wrong encoding is told with its line.
    with readable(f"The data file {file}"), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield _object(_parse(line.removeprefix(codecs.BOM_UTF8), where), where)


def _json_list(file: Path) -> Iterator[Row]:
    with readable(f"The data file {file}"):
        content = file.read_bytes()
    rows = _parse(content.removeprefix(codecs.BOM_UTF8), str(file))
    if not isinstance(rows, list):
        raise UserError(f"{file} holds a JSON {type(rows).__name__}; a list of objects is needed (or use .jsonl).")
    for index, row in enumerate(rows):
        yield _object(row, f"{file}, entry {index}")


def _parse(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text ({error}). Save the file with the encoding UTF-8.") from error
    except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, endless brackets
        raise UserError(f"{where} is not valid JSON: {error}. Each row must be one JSON object.") from error


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where} is a JSON {type(row).__name__}; each row must be an object of columns.")
    return row


def _parquet(file: Path) -> Iterator[Row]:
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            # Small record batches: one array of a nested column can't hold more than 2 GB of strings.
            for batch in parquet.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # a damaged page is an OSError
        raise UserError(f"{file} can't be read as parquet: {error}. Write or fetch it again.") from error
    except (ValueError, OverflowError) as error:  # times between microseconds, or beyond what Python's dates hold
        raise UserError(
            f"{file} has a column whose values have no Python form: {error}. Leave it out, or write it as text."
        ) from error


def _hugging_face(name: str, config: str | None, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            f"{name!r} is no local file, and reading it as a Hugging Face data set needs the package 'datasets': "
            "pip install 'jaxrl-llm[datasets]'. Otherwise point data.train / data.eval at a file."
        ) from error
    try:
        return iter(datasets.load_dataset(name, config, split=split))
    except (OSError, ValueError) as error:  # what a missing set, config, split or network raises
        raise UserError(
            f"The Hugging Face data set {name!r} (config {config!r}, split {split!r}) can't be loaded: {error}"
        ) from error
