"""The few shapes that device programs come in, so that any traffic compiles a bounded number of them."""

from __future__ import annotations

import bisect
import dataclasses

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.decoding.pages import pages_for

_SMALLEST_PREFILL_TOKENS = 64
_SMALLEST_TABLE_TOKENS = 128
_FEW_ROWS_FROM = 16  # with fewer slots smaller decode programs save little


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes in ascending order; each method gives the smallest that holds its argument.

    Attributes:
      rows: rows of a decode program: all slots, a quarter of them (the end of a batch, small batches), or one.
      columns: of its page table, in pages; doubling up to a full context.
      prefill_tokens: tokens in a row of prompts; each four times the one before, as rows are usually full.
      context_pages: cached pages that a row of prompts can read.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    context_pages: int

    @classmethod
    def of(cls, rollout: RolloutConfig, context: int) -> Buckets:
        longest_prompt = max(context - 1, 1)
        most_prefill = min(rollout.prefill_tokens, rollout.num_slots * longest_prompt)
        few = (1, rollout.num_slots // 4) if rollout.num_slots >= _FEW_ROWS_FROM else ()
        return cls(
            rows=(*few, rollout.num_slots),
            columns=growing(
                pages_for(_SMALLEST_TABLE_TOKENS, rollout.page_size), pages_for(context, rollout.page_size), factor=2
            ),
            prefill_tokens=growing(_SMALLEST_PREFILL_TOKENS, most_prefill, factor=4),
            context_pages=2 * pages_for(context, rollout.page_size),
        )

    def decode_rows(self, count: int) -> int:
        return self.rows[bisect.bisect_left(self.rows, count)]

    def table_columns(self, count: int) -> int:
        return self.columns[bisect.bisect_left(self.columns, count)]

    def prefill(self, count: int) -> int:
        return self.prefill_tokens[bisect.bisect_left(self.prefill_tokens, count)]


def growing(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """``smallest`` times powers of ``factor`` while below ``largest``, then ``largest`` itself."""
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(factor * sizes[-1], largest))
    return tuple(sizes)
