"""How time and memory grow with what is asked: batch, context, live tokens, group size. A table each.

Every point is measured until its repeats are done or its seconds are used up, at least once after what compiles; the
tables say how many repeats a median is of. Points come in growing order; those beyond the time of all are left out.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.table import Table

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.types import Params

Row = dict[str, float | str]
"""A line of a table: columns by name."""


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured.

    Attributes:
      batch_tokens, context_tokens: new tokens of each sequence against batch and against context.
      batch_prompt: tokens of the prompts against batch.
      context_batch: sequences at once against context.
      load: (slots, longest sequence, requests) of the ragged load.
      prompts, update_tokens: tokens of prompt and completion of the updates; one prompt each.
      row_tokens: rows of an update hold at most so many.
      repeats, point_s: of a point, whichever is reached first.
      total_s: each table has its share of it, and what those before left over; what would come later is left out.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    batch_prompt: int = 16
    batch_tokens: int = 32
    contexts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    context_batch: int = 4
    context_tokens: int = 32
    load: tuple[int, int, int] = (8, 384, 24)
    groups: tuple[int, ...] = (2, 4, 8, 16)
    prompts: tuple[int, ...] = (64, 512)
    update_tokens: int = 64
    row_tokens: int = 1152
    repeats: int = 3
    point_s: float = 5.0
    total_s: float = 450.0


FULL = Size()
QUICK = Size(
    batches=(1, 2),
    batch_prompt=4,
    batch_tokens=4,
    contexts=(16, 32),
    context_batch=2,
    context_tokens=4,
    load=(4, 128, 10),
    groups=(2, 4),
    prompts=(8,),
    update_tokens=8,
    row_tokens=40,
    repeats=2,
)
"""For a model of a few thousand parameters: shows that everything runs, in seconds."""


@dataclasses.dataclass(frozen=True)
class Model:
    decoder: Decoder
    params: Params


def load(path: str) -> Model:
    """The model at a ``model.path``; ``random`` is one of a few thousand random parameters."""
    if path == "random":
        from jaxrl_llm.bench.whole_model import WORK

        decoder = Decoder(WORK["tiny"].model)
        return Model(decoder, jax.jit(decoder.init)(jax.random.key(0)))
    from jaxrl_llm.models.loading import load_model

    return Model(*load_model(path))


def repeat(size: Size, turn: Callable[[int], float]) -> tuple[float, int]:
    """The median of the seconds that ``turn`` returns, and of how many."""
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < size.repeats and (not seconds or time.perf_counter() - start < size.point_s):
        seconds.append(turn(len(seconds) + 1))
    return statistics.median(seconds), len(seconds)


def titles(size: Size) -> dict[str, str]:
    slots, longest, requests = size.load
    return {
        "batch": f"Decode against batch: {size.batch_tokens} tokens each after {size.batch_prompt}",
        "context": f"Against context, batch {size.context_batch}: {size.context_tokens} tokens each after the prompt",
        "memory": f"Cache against live tokens: {requests} requests of up to {longest} tokens in {slots} slots",
        "update": f"GRPO update against group size: one prompt, completions of {size.update_tokens} tokens",
    }


def measure(model: Model, size: Size, tables: tuple[str, ...]) -> Iterator[tuple[str, list[Row]]]:
    """The tables asked for, one after the other, by name; every row is shown on standard error as it comes."""
    from jaxrl_llm.bench import growth_decode, growth_update

    makers: dict[str, Callable[[Model, Size], Iterator[Row]]] = {
        "batch": growth_decode.against_batch,
        "context": growth_decode.against_context,
        "memory": growth_decode.cache_memory,
        "update": growth_update.against_group_size,
    }
    start = time.perf_counter()
    for index, name in enumerate(tables):
        rows = []
        for row in makers[name](model, size):
            rows.append(row)
            shown = ", ".join(f"{column} {_shown(value)}" for column, value in row.items())
            print(f"{name}: {shown}", file=sys.stderr, flush=True)
            if time.perf_counter() - start > size.total_s * (index + 1) / len(tables):
                print(f"{name}: its time is up; what has not come yet is left out", file=sys.stderr, flush=True)
                break
        yield name, rows


TABLES = ("batch", "context", "memory", "update")


def table_of(title: str, rows: list[Row]) -> Table:
    """The rows as printed."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    return table


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
