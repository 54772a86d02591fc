"""``python -m jaxrl_llm.data.prepare gsm8k --input train.jsonl --output train.parquet``: data files for training.

Writes verl's columns (``data_source``, ``prompt`` as a chat, ``ability``, ``reward_model``, ``extra_info``) to parquet,
or the same rows to JSONL, by the ending of ``--output``. The built-in tasks need no file (``builtin:addition/train``);
writing one shows what their rows look like and lets other programs train on the same data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from jaxrl_llm.data.columns import map_row
from jaxrl_llm.data.sources import BUILTIN, Row, iterate_rows
from jaxrl_llm.errors import UserError

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ROW_GROUP_ROWS = 1000


def gsm8k_rows(rows: Iterable[Row], split: str, instruction: str) -> Iterator[Row]:
    """GSM8K's ``question`` and ``answer`` as verl's columns; the ground truth is what follows ``####``.

    Raises:
      UserError: a row lacks a column or its answer has no ``####`` line.
    """
    for index, row in enumerate(rows):
        where = f"row {index} of the input"
        if not isinstance(row.get("answer"), str) or "####" not in row["answer"]:
            raise UserError(f"{where} has no GSM8K answer: a text column 'answer' that ends in '#### <number>'.")
        record = map_row(row, where, prompt_column="question")
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{record.prompt} {instruction}".strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": record.answer},
            "extra_info": {
                "split": split,
                "index": index,
                "answer": row["answer"],
                "question": record.prompt,
            },
        }


def write_rows(rows: Iterable[Row], output: Path, *, overwrite: bool = False) -> int:
    """Writes rows to a ``.parquet`` or ``.jsonl`` file in row groups and returns their number.

    The file appears under its name only when it is complete.

    Raises:
      UserError: the file is there and ``overwrite`` is off; another ending; no row.
    """
    writers = {".parquet": _write_parquet, ".jsonl": _write_json_lines}
    if output.suffix not in writers:
        raise UserError(f"--output {output} must end in {' or '.join(writers)}.")
    if output.exists() and not overwrite:
        raise UserError(f"--output {output} exists. Choose another name, or add --overwrite to replace it.")
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.unfinished")
    try:
        written = writers[output.suffix](iter(rows), unfinished)
        if not written:
            raise UserError("The input holds no rows, so there is nothing to write.")
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)
    return written


def _write_parquet(rows: Iterator[Row], file: Path) -> int:
    written, writer = 0, None
    while group := list(itertools.islice(rows, ROW_GROUP_ROWS)):
        table = pyarrow.Table.from_pylist(group, schema=writer.schema if writer else None)
        writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
        written += len(group)
    if writer:
        writer.close()
    return written


def _write_json_lines(rows: Iterator[Row], file: Path) -> int:
    written = 0
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            written += 1
    return written


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.data.prepare", description=(__doc__ or "").split("\n\n")[0]
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    gsm8k = tasks.add_parser("gsm8k", help="GSM8K's questions from JSONL, parquet or the hub")
    gsm8k.add_argument("--input", required=True, help="train.jsonl, a .parquet file, or openai/gsm8k:main@train")
    gsm8k.add_argument("--split", default="", help="recorded in extra_info; the input's name unless given")
    gsm8k.add_argument("--instruction", default=GSM8K_INSTRUCTION, help="put after each question")
    for task, (_, splits) in BUILTIN.items():
        tasks.add_parser(task, help=f"the built-in task {task}").add_argument("--split", choices=splits, required=True)
    for subparser in tasks.choices.values():
        subparser.add_argument("--output", required=True, type=Path, help="a .parquet or .jsonl file")
        subparser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after an error that the user can mend."""
    arguments = _arguments(argv)
    try:
        if arguments.task == "gsm8k":
            split = arguments.split or Path(arguments.input).stem
            rows: Iterable[Row] = gsm8k_rows(iterate_rows(arguments.input), split, arguments.instruction)
        else:
            rows = BUILTIN[arguments.task][0](arguments.split)
        written = write_rows(rows, arguments.output, overwrite=arguments.overwrite)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{written} rows written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
