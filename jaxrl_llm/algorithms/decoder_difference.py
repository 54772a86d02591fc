"""How far the decoder's log-probs of sampled tokens are from the trainer's: the metrics that `checks` bounds.

    rollout/logprob_diff_mean, _max = mean, max of |old_t - sampler_t| over the trained tokens

An algorithm that samples adds `of_rows` to its loss; in a step in which the policy is not updated `of_sequences` tells
the same from a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.types import Rows

MEAN, LARGEST = "rollout/logprob_diff_mean", "rollout/logprob_diff_max"


def of_rows(rows: Rows) -> tuple[dict[str, tuple[Array, Array]], dict[str, Array]]:
    """What `Objective.counted` and `Objective.maxima` take; the old log-probs must be of the policy that sampled."""
    difference = jnp.where(rows.loss_mask, jnp.abs(rows.old_logprobs - rows.sampler_logprobs), 0.0)
    count = jnp.sum(rows.loss_mask, dtype=jnp.float32)
    return {MEAN: (jnp.sum(difference, dtype=jnp.float32), count)}, {LARGEST: jnp.max(difference)}


def of_sequences(sequences: Sequences, old: Sequence[np.ndarray]) -> dict[str, float]:
    """The metrics; both 0 where nothing is trained.

    Args:
      old: log-probs ``[t]`` of each sequence's tokens under the parameters that wrote them.
    """
    assert sequences.sampler_logprobs is not None, "the sequences were sampled"
    found = [
        np.abs(ours - theirs)[mask]
        for ours, theirs, mask in zip(old, sequences.sampler_logprobs, sequences.loss_mask, strict=True)
    ]
    differences = np.concatenate(found) if any(map(len, found)) else np.zeros(1, np.float32)
    return {MEAN: float(differences.mean()), LARGEST: float(differences.max())}
