"""Ragged sequences to packed rows of one shape, and back. Host work, numpy only.

A row of `row_tokens` columns holds several sequences, told apart by segment ids and with positions that restart.
The samples of one prompt share it: the prompt stands once in the row, as a segment of its own, and each completion
is a segment that continues it. So a group of 8 costs one prompt and 8 completions instead of 8 of both.
Rows come in micro-batches of `rows_per_micro`; every field is ``[M, R, T]`` with fixed M, so one compiled
program serves every step and only `num_micro_batches` of them are computed.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.models.pipeline import Schedule
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
    def of(cls, row_tokens: int, micro_batch_tokens: int, shards: int, schedule: Schedule | None = None) -> RowShape:
        """As many rows as `micro_batch_tokens` per shard allow, at least one. Micro-batches that go through the stages
        of a pipeline together are one here; each of them has so many rows per shard of a stage.

        Args:
          shards: `sharding.batch_shards`, stages included.
        """
        together = 1 if schedule is None else schedule.micro_batches // schedule.stages
        return cls(row_tokens, shards * together * max(1, micro_batch_tokens // row_tokens))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the sequences went, by index n: its prompt at columns ``prompt[n]`` and its completion at ``completion[n]``
    of row ``row[n]``, counted over all micro-batches. A sequence that was left out has row -1.
    """

    row: np.ndarray
    prompt: list[slice]
    completion: list[slice]
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Block:
    """Sequences that stand together in a row: their prompt once, then their completions.

    Attributes:
      prompt: its tokens; 0 where each member brings its own.
      members: indices of the sequences; ``lengths`` are the tokens of their completions.
      whole: they may not be told apart into several rows.
    """

    prompt: int
    members: tuple[int, ...]
    lengths: tuple[int, ...]
    whole: bool = False

    @property
    def size(self) -> int:
        return self.prompt + sum(self.lengths)

    def split(self, room: int) -> tuple[Block, Block]:
        """As many of the completions, in order, as fit into `room` behind the prompt, and the others."""
        if self.whole:
            return (self, Block(self.prompt, (), ())) if self.size <= room else (Block(self.prompt, (), ()), self)
        free = room - self.prompt
        taken: list[int] = []
        for index, length in enumerate(self.lengths):
            if length <= free:
                taken.append(index)
                free -= length
        kept = [index for index in range(len(self.lengths)) if index not in taken]
        first, second = (
            Block(self.prompt, tuple(self.members[i] for i in part), tuple(self.lengths[i] for i in part))
            for part in (taken, kept)
        )
        return first, second


def fill_rows(blocks: Sequence[Block], row_tokens: int) -> tuple[list[tuple[Block, int, int]], int]:
    """Every block with its row and first column, and the number of rows.

    Row by row: the largest block that still fits, until none does; what is left of the row takes a part of the
    largest one, where its completions are at least as long as the prompt that has to stand there again. Deterministic.

    Raises:
      ValueError: a prompt with one completion, or a block that stays whole, is longer than a row.
    """
    pool: list[tuple[int, int, Block]] = []
    for block in blocks:
        while block.members:
            part, block = block.split(row_tokens)
            if not part.members:
                longest = block.size if block.whole else block.prompt + max(block.lengths)
                kind = f"{len(block.members)} sequences that are compared, together" if block.whole else "a sequence"
                raise ValueError(f"{kind} of {longest} tokens, does not fit into rows of {row_tokens}")
            pool.append((part.size, len(pool), part))
    pool.sort(key=lambda entry: entry[:2])
    placed: list[tuple[Block, int, int]] = []
    num_rows, number = 0, len(pool)
    while pool:
        free = row_tokens
        while fitting := bisect.bisect_right(pool, free, key=lambda entry: entry[0]):
            size, _, block = pool.pop(fitting - 1)
            placed.append((block, num_rows, row_tokens - free))
            free -= size
        if pool:
            part, rest = pool[-1][2].split(free)
            if part.members and part.size >= 2 * part.prompt:
                pool.pop()
                placed.append((part, num_rows, row_tokens - free))
                number += 1
                bisect.insort(pool, (rest.size, number, rest), key=lambda entry: entry[:2])
        num_rows += 1
    return placed, num_rows


def _blocks(sequences: Sequences, prompts: np.ndarray, share_prompts: bool) -> list[Block]:
    """The sequences of each prompt, the longest completion first; each for itself where prompts are not shared.
    Sequences that are compared with each other are one block in any case.

    Args:
      prompts: ``[N]`` tokens before the first trained one; 0 leaves a sequence out.
    """
    compared = sequences.partner is not None
    groups: dict[Any, list[int]] = {}
    for n in np.flatnonzero(prompts).tolist():
        shared = (int(sequences.group[n]), sequences.tokens[n][: prompts[n]].tobytes())
        groups.setdefault(int(sequences.group[n]) if compared else shared if share_prompts else n, []).append(n)
    blocks = []
    for members in groups.values():
        members.sort(key=lambda n: -len(sequences.tokens[n]))
        prompt = int(prompts[members[0]])
        if compared:
            heads = {sequences.tokens[n][: prompts[n]].tobytes() for n in members}
            prompt = prompt if share_prompts and len(heads) == 1 else 0
        lengths = tuple(len(sequences.tokens[n]) - prompt for n in members)
        blocks.append(Block(prompt, tuple(members), lengths, whole=compared))
    return blocks


def micro_batches_for(num_sequences: int, longest: int, shape: RowShape) -> int:
    """The most micro-batches that `num_sequences` of at most `longest` tokens can need.

    One row a sequence at most; and of the rows that `fill_rows` makes, no two but the last hold together less than a
    row, so that they are more than half full on average.
    """
    rows = min(num_sequences, 2 * -(-num_sequences * longest // shape.row_tokens) + 2)
    return max(1, -(-rows // shape.rows_per_micro))


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
      max_micro_batches: M of the result, doubled as often as needed.
      share_prompts: whether the samples of a group share their prompt; changes speed, not the result.
    """
    trained = np.array([int(mask.sum()) for mask in sequences.loss_mask], np.int64)
    prompts = np.array(
        [int(np.argmax(mask)) if count else 0 for mask, count in zip(sequences.loss_mask, trained, strict=True)],
        np.int64,
    )
    if any(count and not prompt for count, prompt in zip(trained, prompts, strict=True)):
        raise ValueError("the first token of a sequence can't be trained: nothing stands before it to predict it")
    placed, num_rows = fill_rows(_blocks(sequences, prompts, share_prompts), shape.row_tokens)
    num_micro = -(-num_rows // shape.rows_per_micro)
    while num_micro > max_micro_batches:
        max_micro_batches *= 2
    weights, denominator = token_weights(trained, aggregation, max_response_tokens)

    total_rows = max_micro_batches * shape.rows_per_micro
    names = tuple(sequences.extras)
    fields = dict(vars(Rows.zeros((total_rows, shape.row_tokens), names)))
    extras = fields.pop("extras")
    segments = [0] * total_rows
    placement = Placement(
        np.full(len(trained), -1, np.int64), [slice(0, 0)] * len(trained), [slice(0, 0)] * len(trained), num_rows
    )
    # Rows are filled from left to right: ids grow along a row, and attention skips blocks by their range of ids.
    for block, row, start in placed:
        prompt = block.prompt
        column = start + prompt
        shared = 0
        if prompt:
            segments[row] += 1
            shared = segments[row]
            _write(fields, row, slice(start, column), shared, 0, sequences.tokens[block.members[0]][:prompt], 0)
        own: dict[int, int] = {}
        for n in block.members:
            tokens = sequences.tokens[n][prompt:]
            columns = slice(column, column + len(tokens))
            apart = not prompt or len(block.members) > 1
            if apart:  # a lone completion simply goes on in its prompt's segment
                segments[row] += 1
            own[n] = segments[row]
            _write(fields, row, columns, segments[row], shared if apart else 0, tokens, prompt)
            if prompt:
                fields["predictors"][row, column] = start + prompt - 1
            mask = sequences.loss_mask[n][prompt:]
            fields["loss_mask"][row, columns] = mask
            fields["weights"][row, columns] = np.where(mask, weights[n], 0)
            for name in ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
                values = getattr(sequences, name)
                if values is not None:
                    fields[name][row, columns] = np.where(mask, values[n][prompt:], 0)
            for name in names:
                value = sequences.extras[name][n]
                extras[name][row, columns] = np.where(mask, value[prompt:] if np.ndim(value) else value, 0)
            placement.row[n] = row
            placement.prompt[n], placement.completion[n] = slice(start, start + prompt), columns
            column = columns.stop
        if sequences.partner is not None:
            for n in block.members:
                mask = sequences.loss_mask[n][prompt:]
                partner = own.get(int(sequences.partner[n]), 0)
                fields["partner_ids"][row, placement.completion[n]] = np.where(mask, partner, 0)
    stacked = (max_micro_batches, shape.rows_per_micro, shape.row_tokens)
    rows = jax.tree.map(lambda array: array.reshape(stacked), Rows(**fields, extras=extras))
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
    """Per-sequence values out of ``[M, R, T, …]``; zeros of ``lengths[n]`` for a sequence that was not placed."""
    flat = values.reshape(-1, *values.shape[2:])
    return [
        np.zeros((length, *values.shape[3:]), values.dtype)
        if row < 0
        else np.concatenate([flat[row, prompt], flat[row, completion]])
        for row, prompt, completion, length in zip(
            placement.row, placement.prompt, placement.completion, lengths, strict=True
        )
    ]


def select(sequences: Sequences, members: np.ndarray) -> Sequences:
    """The sequences with the given indices, in that order."""

    def take(values: list[np.ndarray] | None) -> list[np.ndarray] | None:
        return None if values is None else [values[n] for n in members]

    partner = None
    if sequences.partner is not None:
        place = {int(n): index for index, n in enumerate(members)}
        partner = np.array([place[int(sequences.partner[n])] for n in members], np.int32)
    return Sequences(
        tokens=[sequences.tokens[n] for n in members],
        loss_mask=[sequences.loss_mask[n] for n in members],
        group=sequences.group[members],
        advantages=take(sequences.advantages),
        old_logprobs=take(sequences.old_logprobs),
        ref_logprobs=take(sequences.ref_logprobs),
        sampler_logprobs=take(sequences.sampler_logprobs),
        partner=partner,
        extras={name: [values[n] for n in members] for name, values in sequences.extras.items()},
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
