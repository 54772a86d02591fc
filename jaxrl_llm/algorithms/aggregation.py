"""From token losses to one number: a weight per token and one global denominator.

| mode | weight of a token | denominator |
|---|---|---|
| `token-mean` (default) | 1 | trained tokens |
| `seq-mean-token-mean` | 1 / trained tokens of its sequence | sequences |
| `seq-mean-token-sum` | 1 | sequences |
| `seq-mean-token-sum-norm` | 1 / the largest response length of the run (Dr. GRPO, arXiv:2503.20783) | sequences |

The denominator counts the whole optimizer batch: over all micro-batches, devices and processes. Sequences
without a trained token are not counted. Names and meaning follow verl's `loss_agg_mode`.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def token_weights(
    lengths: Int[np.ndarray, " N"], mode: str, max_response_tokens: int
) -> tuple[Float[np.ndarray, " N"], float]:
    """Weight of each sequence's tokens, and the denominator.

    Args:
      lengths: trained tokens of each sequence.
      mode: one of `MODES`.
      max_response_tokens: the constant divisor of `seq-mean-token-sum-norm`.

    Returns:
      float32 weights (0 for an empty sequence) and the denominator (at least 1, so that an empty batch gives 0).
    """
    if mode not in MODES:
        raise ValueError(f"loss_aggregation is {mode!r}; it is one of {', '.join(MODES)}")
    filled = lengths > 0
    weights = filled.astype(np.float32)
    if mode == "token-mean":
        return weights, float(max(lengths.sum(), 1))
    if mode == "seq-mean-token-mean":
        weights = (weights / np.maximum(lengths, 1)).astype(np.float32)
    elif mode == "seq-mean-token-sum-norm":
        weights = (weights / max_response_tokens).astype(np.float32)
    return weights, float(max(filled.sum(), 1))
