"""Work split over pages: how many parts a row gets, which tokens each reads, and how parts become one result.

Both Pallas kernels use it. A part is a range of tokens of one row; it gives the softmax-weighted mean of its values
and the logarithm of its weights' sum, both float32. Together these are exact: no part knows the others' largest
score, and none is rounded to the cache's dtype.
"""

import jax
import jax.numpy as jnp

EMPTY = -1e30
"""Log-sum-exp of a part that saw no token. Finite, so that the difference of two is 0 and not NaN."""

_TOKENS_PER_SPLIT = 256  # a part shorter than this spends more on its start and on the combination than on reading
_MAX_SPLITS = 64


def choose_num_splits(*, num_programs: int, max_tokens: int, programs_per_core: int, num_cores: int | None) -> int:
    """Parts per row so that a small batch still fills the chip.

    Args:
      num_programs: programs without a split, sequences times key/value heads.
      max_tokens: most tokens that a row can read.
      programs_per_core: programs of the kernel that a core runs at once.
      num_cores: streaming multiprocessors; None counts 132 (an H100's or H200's).
    """
    wanted = -(-programs_per_core * (num_cores or 132) // max(num_programs, 1))
    useful = -(-max_tokens // _TOKENS_PER_SPLIT)
    return max(1, min(wanted, useful, _MAX_SPLITS))


def part_of_row(length, split, *, num_splits: int, window: int | None, unit: int):
    """First and last (excluded) token of a part; the window's start and the length bound them.

    The row's own tokens are divided, not the page table's columns: a short row in a wide table keeps all its parts
    busy. Parts begin at multiples of ``unit`` tokens, so every block of a kernel lies at a multiple of it.
    """
    length = jnp.asarray(length, jnp.int32)
    begin = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    first_unit = jax.lax.div(begin, jnp.int32(unit))
    end_unit = jax.lax.div(length + (unit - 1), jnp.int32(unit))
    per_split = jax.lax.div(end_unit - first_unit + (num_splits - 1), jnp.int32(num_splits))
    first = (first_unit + split * per_split) * unit
    return first, jnp.minimum(first + per_split * unit, length)


def combine(outputs, log_sums):
    """One result from the parts.

    Args:
      outputs: float32 ``[splits, ..., h]``, 0 where a part saw nothing.
      log_sums: float32 ``[splits, ...]`` natural logarithms, ``EMPTY`` where a part saw nothing.

    Returns:
      float32 ``[..., h]``; 0 where no part saw anything.
    """
    weights = jnp.exp(log_sums - jnp.max(log_sums, axis=0, keepdims=True))
    total = jnp.sum(weights, axis=0)  # at least 1: the largest part's own weight
    return jnp.sum(outputs * weights[..., None], axis=0) / total[..., None]
