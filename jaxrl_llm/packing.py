"""Ragged sequences to packed rows of one shape, and back. Host work, numpy only.

A row of `row_tokens` columns holds several sequences, told apart by segment ids and with positions that restart.
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
    """Where each sequence went: ``row[n]`` over all micro-batches, first column ``start[n]``, ``length[n]``."""

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    num_rows: int


def place(lengths: Sequence[int], row_tokens: int) -> Placement:
    """First-fit decreasing: sequences in order of falling length, each into the first row with room.

    Deterministic, and at most one row a sequence.

    Raises:
      ValueError: a sequence is longer than a row.
    """
    length = np.asarray(lengths, np.int64)
    if len(length) and length.max() > row_tokens:
        raise ValueError(f"a sequence of {length.max()} tokens does not fit into rows of {row_tokens}")
    row, start = np.zeros(len(length), np.int64), np.zeros(len(length), np.int64)
    free = np.full(len(length), row_tokens, np.int64)
    used = 0
    for n in np.argsort(-length, kind="stable"):
        target = (
            int(np.argmax(free[: used + 1] >= length[n])) if used < len(length) else int(np.argmax(free >= length[n]))
        )
        row[n], start[n] = target, row_tokens - free[target]
        free[target] -= length[n]
        used = max(used, target + 1)
    return Placement(row, start, length, used)


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
) -> tuple[MiniBatch, Placement]:
    """Packs one optimizer batch. Sequences without a trained token are placed nowhere (length 0).

    Args:
      aggregation: see `algorithms.aggregation`; its weights and denominator go into the result.
      max_micro_batches: M of the result.
    """
    trained = np.array([int(mask.sum()) for mask in sequences.loss_mask], np.int64)
    lengths = [len(ids) if count else 0 for ids, count in zip(sequences.tokens, trained, strict=True)]
    placement = place(lengths, shape.row_tokens)
    num_micro = -(-placement.num_rows // shape.rows_per_micro)
    total_rows = max_micro_batches * shape.rows_per_micro
    if num_micro > max_micro_batches:
        raise ValueError(f"{placement.num_rows} rows do not fit into {max_micro_batches} micro-batches")
    weights, denominator = token_weights(trained, aggregation, max_response_tokens)

    flat = (total_rows, shape.row_tokens)
    names = [field.name for field in dataclasses.fields(Rows)]
    dtypes = {"tokens": np.int32, "segment_ids": np.int32, "positions": np.int32, "loss_mask": bool}
    fields: dict[str, Any] = {name: np.zeros(flat, dtypes.get(name, np.float32)) for name in names}
    segments = np.zeros(total_rows, np.int32)
    for n in np.flatnonzero(placement.length):
        row, columns = placement.row[n], slice(placement.start[n], placement.start[n] + placement.length[n])
        segments[row] += 1
        mask = sequences.loss_mask[n]
        fields["tokens"][row, columns] = sequences.tokens[n]
        fields["segment_ids"][row, columns] = segments[row]
        fields["positions"][row, columns] = np.arange(placement.length[n])
        fields["loss_mask"][row, columns] = mask
        fields["weights"][row, columns] = np.where(mask, weights[n], 0)
        for name in ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
            values = getattr(sequences, name)
            if values is not None:
                fields[name][row, columns] = np.where(mask, values[n], 0)
    stacked = (max_micro_batches, shape.rows_per_micro, shape.row_tokens)
    rows = Rows(**{name: array.reshape(stacked) for name, array in fields.items()})
    return MiniBatch(rows, num_micro, denominator), placement


def unpack(values: np.ndarray, placement: Placement, lengths: Sequence[int]) -> list[np.ndarray]:
    """Per-sequence slices of ``[M, R, T]`` values; zeros of ``lengths[n]`` for a sequence that was not placed."""
    flat = values.reshape(-1, values.shape[-1])
    return [
        flat[row, start : start + length].copy() if length else np.zeros(full, values.dtype)
        for row, start, length, full in zip(placement.row, placement.start, placement.length, lengths, strict=True)
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
