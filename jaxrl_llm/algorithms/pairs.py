"""What algorithms that compare two completions of a prompt share: sequences of pairs, and their sums in packed rows.

The two completions of a pair stand in one row as segments, each knows the other's (`Rows.partner_ids`), and the loss of
the pair stands at every trained token of both: with the aggregation `seq-mean-token-mean` it counts once a sequence, so
that the batch's loss is the mean over its pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.completions import joined
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.algorithms.segments import segment_mean, segment_sum, sum_at
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Example, Rollouts, Rows

AGGREGATION = "seq-mean-token-mean"


def rollouts_of_pairs(examples: Sequence[Example]) -> Rollouts:
    """The data's completions as rollouts, the chosen one of each prompt before the rejected one. Nothing is scored."""
    responses: list[np.ndarray] = []
    for example in examples:
        assert example.response_ids is not None and example.rejected_ids is not None, "the rows hold preferences"
        responses += [example.response_ids, example.rejected_ids]
    return Rollouts(
        examples=examples,
        group=np.repeat(np.arange(len(examples), dtype=np.int32), 2),
        responses=responses,
        sampler_logprobs=None,
        texts=[""] * len(responses),
        finish_reasons=["stop"] * len(responses),
        rewards=np.full(len(responses), np.nan, np.float32),
    )


def sequences_of_pairs(rollouts: Rollouts, pairs: np.ndarray) -> Sequences:
    """Sequences of pairs, the chosen one at even places and the rejected one behind it; with the sampler's log-probs
    where the completions were sampled.

    Args:
      pairs: ``[P, 2]`` indices into the rollouts: chosen, rejected. A pair is a group of its own.
    """
    order = pairs.reshape(-1).tolist()
    both = [joined(rollouts.examples[int(rollouts.group[n])].prompt_ids, rollouts.responses[n]) for n in order]
    sampled = None
    if rollouts.sampler_logprobs is not None:
        sampled = [np.zeros(len(ids), np.float32) for ids, _ in both]
        for n, one, (_, mask) in zip(order, sampled, both, strict=True):
            one[mask] = rollouts.sampler_logprobs[n]
    count = len(pairs)
    return Sequences(
        [ids for ids, _ in both],
        [mask for _, mask in both],
        np.repeat(np.arange(count, dtype=np.int32), 2),
        sampler_logprobs=sampled,
        partner=np.arange(2 * count, dtype=np.int32) ^ 1,
        extras={"chosen": np.tile(np.array([1.0, -1.0], np.float32), count)},
    )


def number_of(context: Context, example: Example, column: str, meaning: str) -> float:
    """The finite number in a column of a training row.

    Raises:
      UserError: it is missing or something else; `meaning` ends the message.
    """
    value = example.metadata.get(column)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        source = context.config.data.train
        where = f"data.train={source!r}, row {example.row}" if source else f"Example {example.row}"
        raise UserError(f"{where}: {column} is {value!r}; {meaning}")
    return float(value)


def per_sequence(values: Sequence[np.ndarray], masks: Sequence[np.ndarray], *, mean: bool = False) -> np.ndarray:
    """The sum (or mean) of each sequence's trained tokens, ``[N]`` float32 from float64."""
    reduce: Callable[..., np.floating] = np.mean if mean else np.sum
    sums = [
        reduce(one[mask].astype(np.float64)) if mask.any() else 0.0 for one, mask in zip(values, masks, strict=True)
    ]
    return np.asarray(sums, np.float32)


def both(values: Float[Array, "R T"], rows: Rows, *, mean: bool = False) -> tuple[Array, Array]:
    """Sums (or means) of the chosen and of the rejected completion of each trained token's pair, ``[R T]`` flat.

    Args:
      values: per token; what stands where the mask is False does not count.
    """
    mask, ids = rows.loss_mask, rows.segment_ids
    kept = jnp.where(mask, values, 0.0)
    own, other = segment_sum(kept, ids), sum_at(kept, ids, rows.partner_ids)
    if mean:
        counts = mask.astype(jnp.float32)
        own = segment_mean(kept, mask, ids)
        other = other / jnp.maximum(sum_at(counts, ids, rows.partner_ids), 1.0)
    is_chosen = rows.extras["chosen"] > 0
    return jnp.where(is_chosen, own, other).reshape(-1), jnp.where(is_chosen, other, own).reshape(-1)


def mean_of_pairs(values: Float[Array, " N"], rows: Rows) -> tuple[Array, Array]:
    """(sum, count) over pairs of a value that stands at every trained token of both."""
    share = rows.weights.reshape(-1)
    return jnp.sum(share * values) / 2, jnp.sum(share) / 2
