"""Packing is lossless, bounded and deterministic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import packing
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.packing import Block, RowShape, fill_rows, micro_batches_for, pack, unpack
from tests.cases import case


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 11), min_size=1, max_size=5)), max_size=15))
def test_every_completion_is_placed_once_behind_its_prompt(groups):
    """No two blocks share a column, and the number of rows is bounded.

    Caught: placing into a row by its number of blocks instead of its free columns; the part that is left of a split
    group forgotten; its part placed and kept."""
    blocks, count = [], 0
    for prompt, lengths in groups:
        blocks.append(Block(prompt, tuple(range(count, count + len(lengths))), tuple(lengths)))
        count += len(lengths)
    placed, num_rows = fill_rows(blocks, 17)
    taken = np.zeros((max(num_rows, 1), 17), int)
    for block, row, start in placed:
        assert start + block.size <= 17
        taken[row, start : start + block.size] += 1
    assert taken.max(initial=0) <= 1
    assert sorted(n for block, _, _ in placed for n in block.members) == list(range(count))
    owner = {n: (prompt, length) for (prompt, lengths), block in zip(groups, blocks, strict=True)
             for n, length in zip(block.members, lengths, strict=True)}  # fmt: skip
    for block, _, _ in placed:
        assert [owner[n] for n in block.members] == [(block.prompt, length) for length in block.lengths]
    longest = max((prompt + max(lengths) for prompt, lengths in groups), default=1)
    assert num_rows <= micro_batches_for(count, longest, RowShape(17, 1))


def test_what_is_left_of_a_row_takes_part_of_a_group():
    """Where the completions are at least as long as the prompt that is repeated. Caught: whole groups only."""
    groups = [Block(2, (0, 1), (6, 2)), Block(2, (2, 3), (6, 2))]
    placed, num_rows = fill_rows(groups, 16)
    assert num_rows == 2 and [(block.members, row, start) for block, row, start in placed] == [
        ((2, 3), 0, 0),
        ((1,), 0, 10),
        ((0,), 1, 0),
    ]
    _, num_rows = fill_rows([Block(3, (0, 1), (6, 2)), Block(3, (2, 3), (6, 2))], 16)
    assert num_rows == 2


def test_long_sequences_are_refused():
    """Caught: no check, which never ends."""
    with pytest.raises(ValueError, match="18 tokens"):
        fill_rows([Block(1, (0,), (2,)), Block(8, (1,), (10,))], 17)


def test_a_first_token_cannot_be_trained():
    """Caught: leaving such a sequence out without a word."""
    sequences = Sequences([np.arange(3, dtype=np.int32)], [np.array([True, True, True])], np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="first token"):
        pack(sequences, RowShape(8, 1), aggregation="token-mean", max_response_tokens=3, max_micro_batches=1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=6),
    st.integers(15, 40),
)
def test_a_group_shares_its_prompt(groups, row_tokens):
    """Each completion sees its own prompt's tokens at their positions, goes on from them, and its first token is
    predicted by the prompt's last.

    Caught: positions that go on from the completion before; a prefix id of another group in the same row; the
    first token predicted by the column before it.
    """
    tokens, masks, owners = [], [], []
    for group, (prompt, completions) in enumerate(groups):
        for index, length in enumerate(completions):
            tokens.append(
                np.concatenate([100 * group + np.arange(prompt), 1000 + 10 * index + np.arange(length)]).astype(
                    np.int32
                )
            )
            masks.append(np.arange(prompt + length) >= prompt)
            owners.append(group)
    sequences = Sequences(tokens, masks, np.array(owners, np.int32))
    batch, placement = pack(
        sequences,
        RowShape(row_tokens, 1),
        aggregation="token-mean",
        max_response_tokens=9,
        max_micro_batches=len(tokens),
    )
    rows = {
        name: getattr(batch.rows, name)[:, 0]
        for name in ("tokens", "segment_ids", "prefix_ids", "positions", "predictors")
    }
    lengths = [len(ids) for ids in tokens]
    for name, expected in (("tokens", tokens), ("positions", [np.arange(n) for n in lengths])):
        for got, want in zip(unpack(getattr(batch.rows, name), placement, lengths), expected, strict=True):
            np.testing.assert_array_equal(got, want)
    for n, (row, prompt, completion) in enumerate(
        zip(placement.row, placement.prompt, placement.completion, strict=True)
    ):
        segment, prefix = rows["segment_ids"][row, completion], rows["prefix_ids"][row, completion]
        own = rows["segment_ids"][row, prompt]
        assert len(set(segment)) == len(set(prefix)) == len(set(own)) == 1
        assert (prefix[0] == own[0]) if prefix[0] else (segment[0] == own[0])
        assert (rows["segment_ids"][row] == segment[0]).sum() == lengths[n] - (
            0 if segment[0] == own[0] else prompt.stop - prompt.start
        )
        assert rows["predictors"][row, completion.start] == prompt.stop - 1
        np.testing.assert_array_equal(
            rows["predictors"][row, completion][1:], np.arange(completion.start, completion.stop - 1)
        )
    assert batch.rows.loss_mask.sum() == sum(mask.sum() for mask in masks)
    used = (batch.rows.segment_ids > 0).sum()
    assert used <= sum(lengths)
    if all(prompt + sum(completions) <= row_tokens for prompt, completions in groups):
        once = sum(prompt + sum(completions) for prompt, completions in groups)
        repeated = placement.num_rows * max(prompt for prompt, _ in groups)  # at most one group a row is split
        assert once <= used <= once + repeated


def ragged(lengths, prompts):
    generator = np.random.default_rng(0)
    tokens = [generator.integers(1, 50, length).astype(np.int32) for length in lengths]
    masks = [np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    values = [np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32) for mask in masks]
    return Sequences(tokens, masks, np.arange(len(lengths), dtype=np.int32), advantages=values)


def test_rows_are_filled():
    """Above nine tenths for groups of ragged completions, in rows as long as a micro-batch. Caught: groups in whole
    only."""
    random = np.random.default_rng(0)
    tokens, masks, group = [], [], []
    for prompt in range(64):
        prompt_ids = random.integers(1, 50, random.integers(64, 200)).astype(np.int32)
        for length in random.integers(16, 256, 8):
            tokens.append(np.concatenate([prompt_ids, random.integers(1, 50, length).astype(np.int32)]))
            masks.append(np.arange(len(tokens[-1])) >= len(prompt_ids))
            group.append(prompt)
    shape = RowShape.of(4096, 4096, 1)
    most = micro_batches_for(len(tokens), 200 + 256, shape)
    batch, _ = pack(
        Sequences(tokens, masks, np.asarray(group, np.int32)),
        shape,
        aggregation="token-mean",
        max_response_tokens=256,
        max_micro_batches=most,
    )
    assert len(batch.rows.tokens) == most, "more rows than were said to be possible"
    assert (batch.rows.segment_ids > 0).sum() > 0.9 * batch.num_micro_batches * 4096


def test_more_rows_than_foreseen_double_the_capacity():
    """Caught: sequences beyond the capacity left out."""
    sequences = ragged([9, 9, 9], [1, 1, 1])
    batch, _ = pack(sequences, RowShape(10, 1), aggregation="token-mean", max_response_tokens=8, max_micro_batches=1)
    assert (len(batch.rows.tokens), batch.num_micro_batches, int(batch.rows.loss_mask.sum())) == (4, 3, 24)


def test_unpack_inverts_pack():
    """Caught: a start column taken from another row; a mask shifted by one."""
    lengths, prompts = [5, 9, 3, 12, 4], [2, 3, 3, 1, 1]  # the third has no trained token
    sequences = ragged(lengths, prompts)
    batch, placement = pack(
        sequences, RowShape(12, 2), aggregation="token-mean", max_response_tokens=9, max_micro_batches=3
    )
    assert batch.rows.tokens.shape == (3, 2, 12)
    for field, originals in (("tokens", sequences.tokens), ("loss_mask", sequences.loss_mask)):
        for n, got in enumerate(unpack(getattr(batch.rows, field), placement, lengths)):
            if n != 2:
                np.testing.assert_array_equal(got, originals[n])
    for n, got in enumerate(unpack(batch.rows.advantages, placement, lengths)):
        np.testing.assert_array_equal(got, sequences.advantages[n] if n != 2 else np.zeros(3))
    assert batch.denominator == sum(mask.sum() for mask in sequences.loss_mask)
    assert batch.rows.loss_mask.sum() == batch.denominator
    assert (batch.rows.positions[batch.rows.segment_ids == 0] == 0).all()


def test_t09_positions_restart_with_each_sequence():
    """Caught: positions that run on over a row."""
    expected = case("T09")["expected"]["position_ids"]
    sequences = ragged([3, 5], [1, 1])
    batch, placement = pack(
        sequences, RowShape(8, 1), aggregation="token-mean", max_response_tokens=5, max_micro_batches=1
    )
    assert placement.num_rows == 1
    positions = unpack(batch.rows.positions, placement, [3, 5])
    assert positions[0].tolist() == expected[0][2:]
    assert positions[1].tolist() == expected[1]


def test_t17_tokens_that_the_policy_did_not_write_are_seen_and_not_trained():
    """A tool's answer between two turns. Caught: a completion placed as trained from its first trained token on;
    weights on every column of a completion; a denominator that counts the tool's tokens."""
    given, expected = case("T17")["input"], case("T17")["expected"]
    wrote = np.concatenate([np.full(count, who == "model") for who, count in given["segments"]])
    sequences = Sequences(
        [np.arange(1, len(wrote) + 1, dtype=np.int32)],
        [wrote],
        np.zeros(1, np.int32),
        advantages=[np.ones(len(wrote), np.float32)],
    )
    width = len(wrote) + given["right_pad"]
    batch, _ = pack(sequences, RowShape(width, 1), aggregation="token-mean", max_response_tokens=8, max_micro_batches=1)
    assert batch.rows.loss_mask[0, 0].tolist() == [bool(one) for one in expected["loss_mask"]]
    assert (batch.rows.segment_ids[0, 0] > 0).tolist() == [bool(one) for one in expected["attention_mask"]]
    for values in (batch.rows.weights, batch.rows.advantages):
        assert values[0, 0].tolist() == expected["loss_mask"]
    assert batch.rows.positions[0, 0, :-1].tolist() == list(range(len(wrote)))
    assert batch.denominator == expected["trainable_tokens"]


def test_mini_batches_hold_whole_groups():
    """Caught: a split by sequences, which tears a group."""
    group = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], np.int32)
    sequences = Sequences([np.zeros(2, np.int32)] * 10, [np.array([False, True])] * 10, group)
    parts = packing.mini_batches(sequences, 2)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 7), st.booleans()), min_size=1, max_size=8),
    st.integers(24, 50),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_pair_stands_in_one_row_and_names_its_partner(pairs, row_tokens, share_prompts, random):
    """At each trained token the partner's segment, in the same row; a prompt that both have stands there once where
    prompts are shared, and a prompt that differs never does; the number of rows is bounded.

    Caught: pairs split where a row is full; the partner's place in the batch; the own segment; prompts shared by their
    group alone."""
    tokens, masks = [], []
    for number, (prompt, chosen, rejected, differ) in enumerate(pairs):
        for place, length in enumerate((chosen, rejected)):
            head = np.full(prompt, 10 * number + (place if differ else 0))
            tokens.append(np.concatenate([head, 1000 + np.arange(length)]).astype(np.int32))
            masks.append(np.arange(prompt + length) >= prompt)
    count = 2 * len(pairs)
    order = np.array(random.sample(range(count), count))
    sequences = packing.select(
        Sequences(tokens, masks, np.arange(count, dtype=np.int32) // 2, partner=np.arange(count, dtype=np.int32) ^ 1),
        order,
    )
    shape = RowShape(row_tokens, 1)
    most = micro_batches_for(count, max(map(len, tokens)), shape)
    batch, placement = pack(
        sequences,
        shape,
        aggregation="seq-mean-token-mean",
        max_response_tokens=7,
        max_micro_batches=most,
        share_prompts=share_prompts,
    )
    assert len(batch.rows.tokens) == most and batch.denominator == count
    segment_ids, partner_ids = batch.rows.segment_ids[:, 0], batch.rows.partner_ids[:, 0]
    for n, other in enumerate(sequences.partner):
        row = placement.row[n]
        assert row == placement.row[other] >= 0
        trained, of_other = (batch.rows.loss_mask[row, 0] & _columns(placement, i, row_tokens) for i in (n, other))
        assert trained.sum() == sequences.loss_mask[n].sum()
        assert set(partner_ids[row][trained]) == set(segment_ids[row][of_other])
        assert set(partner_ids[row][trained]) != set(segment_ids[row][trained])
        prompt, _, _, differ = pairs[order[n] // 2]
        assert (placement.prompt[n].stop - placement.prompt[n].start) == (prompt if share_prompts and not differ else 0)
    assert not partner_ids[~batch.rows.loss_mask[:, 0]].any()


def _columns(placement, n, row_tokens):
    columns = np.arange(row_tokens)
    return (columns >= placement.completion[n].start) & (columns < placement.completion[n].stop)


def test_a_pair_that_is_longer_than_a_row_is_refused():
    """Caught: a pair split over two rows."""
    tokens = [np.arange(n, dtype=np.int32) for n in (9, 8)]
    sequences = Sequences(
        tokens, [np.arange(len(ids)) >= 3 for ids in tokens], np.zeros(2, np.int32), partner=np.array([1, 0])
    )
    options = {"aggregation": "seq-mean-token-mean", "max_response_tokens": 9, "max_micro_batches": 2}
    with pytest.raises(ValueError, match="2 sequences that are compared, together of 17 tokens"):
        pack(sequences, RowShape(16, 1), **options, share_prompts=False)
    batch, _ = pack(sequences, RowShape(16, 1), **options)  # with the prompt once it fits
    assert batch.num_micro_batches == 1
