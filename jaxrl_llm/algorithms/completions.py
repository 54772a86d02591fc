"""A prompt and what was written after it, as one training sequence."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int, Integer


def joined(
    prompt: Integer[np.ndarray, " p"],
    response: Integer[np.ndarray, " r"],
    written: Bool[np.ndarray, " r"] | None = None,
) -> tuple[Int[np.ndarray, " t"], Bool[np.ndarray, " t"]]:
    """The tokens of both, and which of them are trained: none of the prompt's.

    Args:
      written: which tokens of the response count, where others wrote parts of it; None for all, EOS included.
    """
    counted = np.ones(len(response), bool) if written is None else written
    return (
        np.concatenate([prompt, response]).astype(np.int32),
        np.concatenate([np.zeros(len(prompt), bool), counted]),
    )
