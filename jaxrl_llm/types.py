"""The records that flow through a step: prompts -> rollouts -> rewards -> batch -> state.

Shape letters, used everywhere in this project:

    B prompts · G samples per prompt · N = B·G sequences · T tokens · V vocabulary · L layers
    D embedding · H query heads · K key/value heads · h head size · P pages · S page size
    R packed rows (a row holds several sequences, told apart by segment ids and positions)
    `[n, t]` is always per sequence

One alignment, stated once: ``x_logprobs[n, t] = log p(tokens[n, t] | tokens[n, :t])``. Nothing else in
the project shifts: a log-probability, a mask entry, an advantage and a reward of token ``t`` all sit at ``t``.
The first token of a sequence has no log-probability (it is 0 and never counts).

Log-probabilities are natural logarithms in float32. Their prefix says whose they are: ``actor_`` (the
parameters being trained, now), ``old_`` (the same before this rollout's updates), ``ref_`` (the frozen
reference), ``sampler_`` (as the decoder reported while generating). Masks are bool; True means it counts.

Worked example: the prompt ``7+8=`` is tokens ``[1, 10, 13, 11, 15]`` (1 is BOS), the sampled answer ``15``
plus end of sequence is ``[4, 8, 2]``. In a packed row of 10 tokens::

    tokens            1  10  13  11  15   4   8   2   0   0
    segment_ids       1   1   1   1   1   1   1   1   0   0      0 is padding
    positions         0   1   2   3   4   5   6   7   0   0
    loss_mask         .   .   .   .   .   x   x   x   .   .      the tokens the policy wrote, EOS included
    old_logprobs      0   0   0   0   0 -.1 -.2 -.1   0   0      log p of the token standing in that column
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Params = dict[str, Any]
"""A nested dict of arrays: one model's parameters."""

if TYPE_CHECKING:
    RowArray = Array
else:
    RowArray = Array | np.ndarray  # the same record on the host and on the devices

FinishReason = str
"""Why a completion ended: ``stop`` (an EOS id or a stop string) or ``length`` (a token budget or the context)."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One row of a data set, tokenized. Host memory only.

    Attributes:
      uid: names the group of samples drawn from this row: unique over rows, epochs and repeats of a
        row (``"<row>@<epoch>"``), so two rows with equal text are still two groups.
      prompt: the prompt as text after the chat template.
      prompt_ids: its token ids ``[t]``, int32, with exactly one BOS where the model uses one.
      answer: the ground truth that rewards compare with; None where there is none.
      metadata: every other column of the row, given to rewards.
      response_ids: token ids ``[t]`` of the completion, EOS included: the one to imitate, the chosen one of a pair,
        or the labelled one. None where only the prompt is read. What stands behind the first turn of the assistant
        in a chat of several belongs to it, the other roles' turns too.
      response_mask: bool ``[t]``, True where a token of ``response_ids`` is trained; None for all of them.
      rejected_ids: token ids ``[t]`` of the completion that ``response_ids`` is preferred to, EOS included.
      label: whether ``response_ids`` is desirable; None unless the data says so.
      row: index of the row in its file, which with the epoch fixes the sampling randomness.
      epoch: which pass over the data this is, from 0.
    """

    uid: str
    prompt: str
    prompt_ids: np.ndarray
    answer: Any = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    response_ids: np.ndarray | None = None
    response_mask: np.ndarray | None = None
    rejected_ids: np.ndarray | None = None
    label: bool | None = None
    row: int = 0
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """What the decoder returns for one sample.

    Attributes:
      token_ids: sampled ids ``[t]`` int32, the EOS or stop tokens included; these exact ids are trained on,
        text is never encoded again.
      logprobs: ``sampler_logprobs`` ``[t]`` float32 of the full tempered distribution, also under
        top-k/top-p/min-p. With temperature 0 the distribution is the untempered one.
      text: the decoded text, special tokens and a matched stop string removed.
      finish_reason: ``stop`` or ``length``.
      time_s: seconds from admission to the last token.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    text: str
    finish_reason: FinishReason
    time_s: float = 0.0


@dataclasses.dataclass
class Rollouts:
    """Scored samples of B prompts, ragged and on the host; sample n belongs to prompt ``group[n]``.

    Attributes:
      examples: the B prompts.
      group: ``[N]`` int32, index into ``examples``.
      responses: N token id arrays ``[t]``, EOS included.
      sampler_logprobs: N arrays ``[t]`` float32; None when nothing was sampled (SFT, DPO).
      texts: N decoded responses.
      finish_reasons: N of ``stop`` | ``length``.
      rewards: ``[N]`` float32, the weighted sum; NaN means "not scored": left out of group statistics,
        loss and denominators.
      components: per reward name, ``[N]`` float32 unweighted, NaN where it does not apply.
      metrics: counts and seconds gathered on the way, by metric name.
    """

    examples: Sequence[Example]
    group: np.ndarray
    responses: list[np.ndarray]
    sampler_logprobs: list[np.ndarray] | None
    texts: list[str]
    finish_reasons: list[FinishReason]
    rewards: np.ndarray
    components: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.responses)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed sequences, the only thing the jitted update reads. Every field is ``[R, T]`` (see the module's
    worked example), numpy on the host or a global array sharded over ``(data, fsdp)`` by row.

    Attributes:
      segment_ids: int32; 0 is padding, sequences of a row count from 1.
      positions: int32; restart at 0 with each sequence, and go on from `prefix_ids`' segment where there is one.
      prefix_ids: int32; the segment that this token's segment continues (a prompt that several completions of
        the row share), which it sees as well and whose positions it goes on from; 0 for none.
      predictors: int32; the column whose hidden state predicts this token: the one before it, or the last of
        the prompt for the first token of a completion that shares it. Only meaningful where `loss_mask`.
      loss_mask: True where the token is trained.
      weights: float32; a token's weight in its aggregation (1, or 1/length of its sequence …); 0 where masked.
      advantages, old_logprobs, ref_logprobs, sampler_logprobs: float32, 0 where masked.
    """

    tokens: Int[RowArray, "*b R T"]
    segment_ids: Int[RowArray, "*b R T"]
    positions: Int[RowArray, "*b R T"]
    prefix_ids: Int[RowArray, "*b R T"]
    predictors: Int[RowArray, "*b R T"]
    loss_mask: Bool[RowArray, "*b R T"]
    weights: Float[RowArray, "*b R T"]
    advantages: Float[RowArray, "*b R T"]
    old_logprobs: Float[RowArray, "*b R T"]
    ref_logprobs: Float[RowArray, "*b R T"]
    sampler_logprobs: Float[RowArray, "*b R T"]


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """What one optimizer update consumes: micro-batches of packed rows and the global denominator.

    Attributes:
      rows: fields ``[M, R, T]``, M the largest number of micro-batches a step can need, so that one
        compiled program serves every step.
      num_micro_batches: how many of the M hold data; the rest is never touched.
      denominator: what the sum of weighted token losses is divided by: tokens or sequences of the
        whole optimizer batch over all devices and processes, never of a micro-batch.
    """

    rows: Rows
    num_micro_batches: int
    denominator: float


class TokenOutputs(NamedTuple):
    """What a policy forward gives each loss: per-token values of the row's own tokens, float32 ``[R, T]``."""

    logprobs: Float[Array, "R T"]
    entropy: Float[Array, "R T"]
