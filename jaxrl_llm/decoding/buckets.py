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
      rows: rows of a decode program: all slots, a quarter of them (the end of a batch, small batches), or one; where a
        step costs what its rows cost, as on CPUs, every eighth up to three quarters (seven eighths cost what all do).
      columns: of its page table, in pages; doubling up to a full context, there in half steps.
      prefill_tokens: tokens in a row of prompts; each four times the one before, as rows are usually full.
      context_pages: cached pages that a row of prompts can read.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    context_pages: int

    @classmethod
    def of(cls, rollout: RolloutConfig, context: int, *, fine: bool = False) -> Buckets:
        """Args: ``fine``: more sizes, for a device whose steps cost what their rows cost."""
        longest_prompt = max(context - 1, 1)
        most_prefill = min(rollout.prefill_tokens, rollout.num_slots * longest_prompt)
        slots = rollout.num_slots
        few: tuple[int, ...] = (1, slots // 4) if slots >= _FEW_ROWS_FROM else ()
        columns = growing(
            pages_for(_SMALLEST_TABLE_TOKENS, rollout.page_size), pages_for(context, rollout.page_size), factor=2
        )
        if fine:
            few = tuple(sorted({*few, *(eighths * slots // 8 for eighths in range(1, 7))})) if few else ()
            between = {3 * size // 2 for size in columns[:-1] if 3 * size // 2 < columns[-1]}
            columns = tuple(sorted({*columns, *between}))
        return cls(
            rows=(*few, slots),
            columns=columns,
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
