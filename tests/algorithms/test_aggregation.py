"""Weights and denominators: the numeric cases, and independence of any split."""

import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import MODES, token_weights
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.packing import RowShape, micro_batches_for, pack
from tests.cases import case


def aggregate(token_losses, mode, max_response_tokens=1, parts=None):
    """The loss of ragged token losses; with `parts`, each part's contribution to it."""
    lengths = np.array([len(one) for one in token_losses])
    weights, denominator = token_weights(lengths, mode, max_response_tokens)
    sums = [weights[n] * np.sum(one) / denominator for n, one in enumerate(token_losses)]
    return sum(sums) if parts is None else [sum(sums[n] for n in part) for part in parts]


def packed(masks, row_tokens, rows_per_micro, mode):
    """Sequences with these loss masks as one optimizer batch."""
    sequences = Sequences(
        [np.zeros(len(mask), np.int32) for mask in masks],
        [np.array(mask) for mask in masks],
        np.arange(len(masks), dtype=np.int32),
    )
    shape = RowShape(row_tokens, rows_per_micro)
    count = micro_batches_for(len(masks), row_tokens, shape)
    return pack(sequences, shape, aggregation=mode, max_response_tokens=row_tokens, max_micro_batches=count)[0]


def test_l09_dr_grpo_divides_by_a_constant():
    """Caught: the padded width as divisor; summing over sequences without averaging."""
    spec = case("L09")
    given, expected = spec["input"], spec["expected"]
    losses = [[-a] * n for a, n in zip(expected["advantage"], given["response_lengths"], strict=True)]
    limit = given["max_response_length"]
    assert aggregate(losses, "seq-mean-token-sum-norm", limit) == pytest.approx(expected["loss_drgrpo"], abs=1e-6)
    assert aggregate(losses, "token-mean", limit) == pytest.approx(expected["loss_token_mean"], abs=1e-6)
    assert aggregate(losses, "seq-mean-token-mean", limit) == pytest.approx(
        expected["loss_seq_mean_token_mean"], abs=1e-6
    )


def test_l11_token_mean_over_micro_batches():
    """Caught: a mean over each sequence, which here is a micro-batch, in place of one over all tokens."""
    spec = case("L11")
    parts = spec["input"]["micro_batches_token_losses"]
    assert aggregate(parts, "token-mean") == pytest.approx(spec["expected"]["token_mean"], abs=1e-6)
    contributions = aggregate(parts, "token-mean", parts=[[0], [1], [2]])
    np.testing.assert_allclose(contributions, spec["expected"]["micro_batch_contributions"], atol=1e-6)


def test_l13_sequence_mean_with_a_short_last_micro_batch():
    """Caught: the last micro-batch counted like a full one."""
    spec = case("L13")
    losses = [[value] for value in spec["input"]["sequence_losses"]]
    assert aggregate(losses, "seq-mean-token-mean") == pytest.approx(spec["expected"]["seq_mean"], abs=1e-6)
    size = spec["input"]["micro_batch_size"]
    batch = packed([[False, True]] * len(losses), 2, size, "seq-mean-token-mean")  # a sequence a row
    np.testing.assert_allclose(
        batch.rows.weights.sum((1, 2)) / batch.denominator, spec["expected"]["weights"], atol=1e-6
    )


def test_l49_only_trained_tokens_count():
    """Caught: tool tokens in the denominator."""
    spec = case("L49")
    mask = [False, *map(bool, spec["input"]["loss_mask"])]  # behind a prompt of one token
    batch = packed([mask], 9, 1, "token-mean")
    loss = np.sum(batch.rows.weights[0, 0, 1:] * spec["input"]["token_losses"]) / batch.denominator
    assert loss == pytest.approx(spec["expected"]["token_mean"], abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences_change_nothing(mode):
    """Caught: counting a sequence without a trained token; 0/0 in a batch of only such sequences."""
    losses = [[1.0, 2.0], [3.0]]
    assert aggregate([*losses, []], mode, 4) == pytest.approx(aggregate(losses, mode, 4))
    assert aggregate([[]], mode, 4) == 0.0
