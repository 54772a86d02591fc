"""Ragged sequences to packed rows of one shape, and back. Host work, numpy only.

A row of `row_tokens` columns holds several sequences, told apart by segment ids and with positions that restart.
The samples of one prompt share it: the prompt stands once in the row, as a segment of its own, and each completion
is a segment that continues it. So a group of 8 costs one prompt and 8 completions instead of 8 of both.
Rows come in micro-batches of `rows_per_micro`; every field is ``[M, R, T]`` with fixed M, so one compiled
program serves every step and only `num_micro_batches` of them are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.types import MiniBatch, Rows


@dataclasses.dataclass(frozen=True)
class RowShape:
    """The one shape of training rows: ``[M, rows_per_micro, row_tokens]``.

    Attributes:
      row_tokens: T; no sequence may be longer.
      rows_per_micro: R, a multiple of the number of batch shards.
    """

    row_tokens: int
    rows_per_micro: int

    @classmethod
    def of(cls, row_tokens: int, micro_batch_tokens: int, shards: int) -> RowShape:
        """As many rows as `micro_batch_tokens` per shard allow, at least one."""
        return cls(row_tokens, shards * max(1, micro_batch_tokens // row_tokens))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the sequences went, by index n: its prompt at columns ``prompt[n]`` and its completion at ``completion[n]``
    of row ``row[n]``, counted over all micro-batches. A sequence that was left out has row -1.
    """

    row: np.ndarray
    prompt: list[slice]
    completion: list[slice]
    num_rows: int


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Row and first column of each block, and the number of rows: longest first, each into the first row with room.

    Deterministic, and at most one row a block.

    Raises:
      ValueError: a block is longer than a row.
    """
    length = np.asarray(lengths, np.int64)
    if len(length) and length.max() > row_tokens:
        raise ValueError(f"a sequence of {length.max()} tokens does not fit into rows of {row_tokens}")
    row, start = np.zeros(len(length), np.int64), np.zeros(len(length), np.int64)
    free = np.full(len(length), row_tokens, np.int64)
    used = 0
    for n in np.argsort(-length, kind="stable"):
        target = int(np.argmax(free[: used + 1] >= length[n]))  # an unused row always has room
        row[n], start[n] = target, row_tokens - free[target]
        free[target] -= length[n]
        used = max(used, target + 1)
    return row, start, used


def _blocks(sequences: Sequences, prompts: np.ndarray, row_tokens: int, share_prompts: bool) -> list[list[int]]:
    """Indices that are placed together: completions of one prompt, as many as fit a row behind it.

    Args:
      prompts: ``[N]`` tokens before the first trained one; 0 leaves a sequence out.
    """
    blocks: list[list[int]] = []
    open_block: dict[tuple[int, bytes], tuple[list[int], int]] = {}
    for n in np.flatnonzero(prompts):
        tokens, prompt = sequences.tokens[n], int(prompts[n])
        key = (int(sequences.group[n]), tokens[:prompt].tobytes())
        completion = len(tokens) - prompt
        block, length = open_block.get(key, ([], row_tokens)) if share_prompts else ([], row_tokens)
        if length + completion > row_tokens:
            block, length = [], prompt
            blocks.append(block)
        block.append(int(n))
        open_block[key] = (block, length + completion)
    return blocks


def micro_batches_for(num_sequences: int, shape: RowShape) -> int:
    """The most micro-batches that `num_sequences` can need: one row a sequence."""
    return max(1, -(-num_sequences // shape.rows_per_micro))


def pack(
    sequences: Sequences,
    shape: RowShape,
    *,
    aggregation: str,
    max_response_tokens: int,
    max_micro_batches: int,
    share_prompts: bool = True,
) -> tuple[MiniBatch, Placement]:
    """Packs one optimizer batch. Sequences without a trained token are placed nowhere.

    Args:
      aggregation: see `algorithms.aggregation`; its weights and denominator go into the result.
      max_micro_batches: M of the result.
      share_prompts: whether the samples of a group share their prompt; changes speed, not the result.
    """
    trained = np.array([int(mask.sum()) for mask in sequences.loss_mask], np.int64)
    prompts = np.array(
        [int(np.argmax(mask)) if count else 0 for mask, count in zip(sequences.loss_mask, trained, strict=True)],
        np.int64,
    )
    if any(count and not prompt for count, prompt in zip(trained, prompts, strict=True)):
        raise ValueError("the first token of a sequence can't be trained: nothing stands before it to predict it")
    blocks = _blocks(sequences, prompts, shape.row_tokens, share_prompts)
    lengths = [int(prompts[block[0]] + sum(len(sequences.tokens[n]) - prompts[n] for n in block)) for block in blocks]
    block_row, block_start, num_rows = first_fit_decreasing(lengths, shape.row_tokens)
    num_micro = -(-num_rows // shape.rows_per_micro)
    if num_micro > max_micro_batches:
        raise ValueError(f"{num_rows} rows do not fit into {max_micro_batches} micro-batches")
    weights, denominator = token_weights(trained, aggregation, max_response_tokens)

    total_rows = max_micro_batches * shape.rows_per_micro
    integers = ("tokens", "segment_ids", "positions", "prefix_ids", "predictors")
    fields: dict[str, Any] = {
        field.name: np.zeros(
            (total_rows, shape.row_tokens),
            bool if field.name == "loss_mask" else np.int32 if field.name in integers else np.float32,
        )
        for field in dataclasses.fields(Rows)
    }
    segments = [0] * total_rows
    placement = Placement(
        np.full(len(trained), -1, np.int64), [slice(0, 0)] * len(trained), [slice(0, 0)] * len(trained), num_rows
    )
    # From left to right: segment ids then grow along a row, and attention skips blocks by their range of ids.
    for b in np.lexsort((block_start, block_row)).tolist():
        block, row, start = blocks[b], int(block_row[b]), int(block_start[b])
        prompt = int(prompts[block[0]])
        column = start + prompt
        segments[row] += 1
        shared = segments[row]
        _write(fields, row, slice(start, column), shared, 0, sequences.tokens[block[0]][:prompt], 0)
        for n in block:
            tokens = sequences.tokens[n][prompt:]
            columns = slice(column, column + len(tokens))
            if len(block) > 1:  # a lone completion simply goes on in its prompt's segment
                segments[row] += 1
            _write(fields, row, columns, segments[row], shared if len(block) > 1 else 0, tokens, prompt)
            fields["predictors"][row, column] = start + prompt - 1
            mask = sequences.loss_mask[n][prompt:]
            fields["loss_mask"][row, columns] = mask
            fields["weights"][row, columns] = np.where(mask, weights[n], 0)
            for name in ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
                values = getattr(sequences, name)
                if values is not None:
                    fields[name][row, columns] = np.where(mask, values[n][prompt:], 0)
            placement.row[n] = row
            placement.prompt[n], placement.completion[n] = slice(start, start + prompt), columns
            column = columns.stop
    stacked = (max_micro_batches, shape.rows_per_micro, shape.row_tokens)
    rows = Rows(**{name: array.reshape(stacked) for name, array in fields.items()})
    return MiniBatch(rows, num_micro, denominator), placement


def _write(
    fields: dict[str, Any], row: int, columns: slice, segment: int, prefix: int, tokens: np.ndarray, position: int
) -> None:
    """Writes one run of tokens whose first has the given position, each predicted from the column before it."""
    fields["tokens"][row, columns] = tokens
    fields["segment_ids"][row, columns] = segment
    fields["prefix_ids"][row, columns] = prefix
    fields["positions"][row, columns] = position + np.arange(len(tokens))
    fields["predictors"][row, columns] = np.maximum(np.arange(columns.start, columns.stop) - 1, 0)


def unpack(values: np.ndarray, placement: Placement, lengths: Sequence[int]) -> list[np.ndarray]:
    """Per-sequence values out of ``[M, R, T]``; zeros of ``lengths[n]`` for a sequence that was not placed."""
    flat = values.reshape(-1, values.shape[-1])
    return [
        np.zeros(length, values.dtype) if row < 0 else np.concatenate([flat[row, prompt], flat[row, completion]])
        for row, prompt, completion, length in zip(
            placement.row, placement.prompt, placement.completion, lengths, strict=True
        )
    ]


def select(sequences: Sequences, members: np.ndarray) -> Sequences:
    """The sequences with the given indices, in that order."""

    def take(values: list[np.ndarray] | None) -> list[np.ndarray] | None:
        return None if values is None else [values[n] for n in members]

    return Sequences(
        tokens=[sequences.tokens[n] for n in members],
        loss_mask=[sequences.loss_mask[n] for n in members],
        group=sequences.group[members],
        advantages=take(sequences.advantages),
        old_logprobs=take(sequences.old_logprobs),
        ref_logprobs=take(sequences.ref_logprobs),
        sampler_logprobs=take(sequences.sampler_logprobs),
    )


def mini_batches(sequences: Sequences, prompts_per_update: int) -> list[np.ndarray]:
    """Indices of the sequences of each optimizer batch: `prompts_per_update` whole groups, in order of the data.

    The last one may be smaller; its denominator is its own count.
    """
    groups = np.unique(sequences.group)
    return [
        np.flatnonzero(np.isin(sequences.group, groups[first : first + prompts_per_update]))
        for first in range(0, len(groups), prompts_per_update)
    ]
