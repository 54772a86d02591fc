"""Shapes of device programs: few, and wide enough for everything."""

import pytest

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.decoding.buckets import Buckets
from jaxrl_llm.decoding.pages import pages_for


@pytest.mark.parametrize("context", [2, 16, 100, 768, 4096, 131072])
@pytest.mark.parametrize("num_slots", [1, 5, 16, 64])
def test_few_buckets_that_hold_everything(context, num_slots):
    """A prompt longer than the largest prefill comes in pieces; what they read fits at any length."""
    rollout = RolloutConfig(num_slots=num_slots)
    buckets = Buckets.of(rollout, context)
    assert buckets.rows[-1] == num_slots
    assert buckets.columns[-1] == pages_for(context, rollout.page_size)
    assert buckets.context_pages >= pages_for(context, rollout.page_size)
    assert buckets.prefill(min(rollout.prefill_tokens, num_slots * (context - 1)))
    for sizes in (buckets.rows, buckets.columns, buckets.prefill_tokens):
        assert list(sizes) == sorted(set(sizes)) and sizes[0] >= 1
    assert len(buckets.rows) * len(buckets.columns) + 2 * len(buckets.prefill_tokens) <= 48


def test_a_device_whose_steps_cost_what_their_rows_cost_has_a_program_for_every_eighth():
    """Caught: only halves and quarters; seven eighths too; the same without ``fine``."""
    rollout = RolloutConfig(num_slots=64)
    assert Buckets.of(rollout, 256, fine=True).rows == (1, 8, 16, 24, 32, 40, 48, 64)
    assert Buckets.of(rollout, 256).rows == (1, 16, 64)


def test_smallest_that_holds_it():
    """Seen to catch: bisect_right, which takes the next size at an exact fit."""
    buckets = Buckets(rows=(4, 16), columns=(8, 16, 20), prefill_tokens=(64, 256), context_pages=40)
    assert [buckets.decode_rows(count) for count in (1, 4, 5, 16)] == [4, 4, 16, 16]
    assert [buckets.table_columns(count) for count in (0, 8, 9, 20)] == [8, 8, 16, 20]
    assert [buckets.prefill(count) for count in (1, 64, 65)] == [64, 64, 256]
