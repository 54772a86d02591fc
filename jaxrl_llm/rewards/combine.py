"""Adds several rewards of one sample up, and says what a batch of scores amounts to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """Scores of N samples, float32 ``[N]``.

    Attributes:
      total: weighted sum over the rewards that apply to the sample; NaN where none does.
      components: each reward's unweighted score, NaN where it does not apply; the parts of a reward that
        returns a dict are there too, as ``reward/part``. Failed calls hold the failure score.
      failures: calls that raised, took too long, returned NaN or infinity, or ended their process.
      failure_messages: what went wrong, the first of each kind.
    """

    total: np.ndarray
    components: dict[str, np.ndarray]
    failures: int
    failure_messages: list[str]


def weighted_sum(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Sum of weight times score over the rewards in ``weights`` that apply (are not NaN), float32 ``[N]``.

    A sample to which none applies is NaN, not 0: it has no score, and must not count as a bad one.
    """
    scores = np.stack([components[name] for name in weights], axis=1)
    factors = np.asarray(list(weights.values()), np.float32)
    applies = ~np.isnan(scores)
    total = np.sum(np.where(applies, scores, 0.0) * factors[None, :], axis=1, dtype=np.float32)
    return np.where(applies.any(axis=1), total, np.float32(np.nan))
