"""Packing is lossless, bounded and deterministic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import packing
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.packing import RowShape, pack, place, unpack
from tests.cases import case


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 17), max_size=40))
def test_no_two_sequences_share_a_column(lengths):
    """Caught: placing into a row by its number of sequences instead of its free columns."""
    placement = place(lengths, 17)
    taken = np.zeros((max(placement.num_rows, 1), 17), int)
    for row, start, length in zip(placement.row, placement.start, placement.length, strict=True):
        if length:
            assert start + length <= 17
            taken[row, start : start + length] += 1
    assert taken.max(initial=0) <= 1
    assert taken.sum() == sum(lengths)
    assert placement.num_rows <= max(sum(length > 0 for length in lengths), 1)


def test_long_sequences_are_refused():
    with pytest.raises(ValueError, match="18 tokens"):
        place([3, 18], 17)


def ragged(lengths, prompts):
    generator = np.random.default_rng(0)
    tokens = [generator.integers(1, 50, length).astype(np.int32) for length in lengths]
    masks = [np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    values = [np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32) for mask in masks]
    return Sequences(tokens, masks, np.arange(len(lengths), dtype=np.int32), advantages=values)


def test_unpack_inverts_pack():
    """Caught: a start column taken from the wrong row; a mask shifted by one."""
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
    """Caught: positions that count padding or run on over a row."""
    expected = case("T09")["expected"]["position_ids"]
    sequences = ragged([3, 5], [1, 1])
    batch, placement = pack(
        sequences, RowShape(8, 1), aggregation="token-mean", max_response_tokens=5, max_micro_batches=1
    )
    assert placement.num_rows == 1
    positions = unpack(batch.rows.positions, placement, [3, 5])
    assert positions[0].tolist() == expected[0][2:]
    assert positions[1].tolist() == expected[1]


def test_mini_batches_hold_whole_groups():
    """Caught: a split by sequences, which tears a group."""
    group = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], np.int32)
    sequences = Sequences([np.zeros(2, np.int32)] * 10, [np.array([False, True])] * 10, group)
    parts = packing.mini_batches(sequences, 2)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
