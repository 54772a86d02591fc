"""What an algorithm is: a small tuple of pure functions and data.

The trainer calls them in this order, and nothing else in the project knows an algorithm's name::

    rollouts  = algorithm.collect(context, examples)       # generate and score, or read what the data holds
    sequences = algorithm.prepare(context, rollouts)       # advantages, old/reference log-probs; still ragged
    objective = algorithm.losses(options, outputs, rows)   # inside the jitted update, once per micro-batch
    memory    = algorithm.after_step(options, memory, metrics)

A new algorithm is one file that makes an `Algorithm`, and one line in `ALGORITHMS` (`algorithms/__init__.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.config import RunConfig
from jaxrl_llm.types import Example, Rollouts, Rows, TokenOutputs


@dataclasses.dataclass
class Sequences:
    """N training sequences, ragged, on the host: what `prepare` returns and `packing.pack` packs.

    All lists have N entries of length ``[t]``, aligned as `types` says: the entry at ``t`` belongs to ``tokens[t]``.

    Attributes:
      tokens: int32 prompt and response ids.
      loss_mask: bool, True where the token is trained. A sequence without any is left out of the batch
        and of every denominator.
      advantages, ref_logprobs, sampler_logprobs: float32; None means all zero.
      old_logprobs: float32; None means "the current ones": the update takes the log-probs that it computes
        anyway, without their gradient, so that the ratio is exactly 1.
      group: ``[N]`` int32, the prompt each sequence belongs to: mini-batches hold whole groups.
      metrics: gathered on the way, by metric name.
    """

    tokens: list[np.ndarray]
    loss_mask: list[np.ndarray]
    group: np.ndarray
    advantages: list[np.ndarray] | None = None
    old_logprobs: list[np.ndarray] | None = None
    ref_logprobs: list[np.ndarray] | None = None
    sampler_logprobs: list[np.ndarray] | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class Objective(NamedTuple):
    """Sums over one micro-batch, never means: they add up over any split of the batch.

    Attributes:
      total: the weighted sum to minimise. The update divides it by `MiniBatch.denominator`.
      weighted: metrics as weighted sums, divided by the same denominator.
      counted: metrics as (sum, count) pairs; both are added up, then divided.
      maxima: metrics of which the largest value is kept.
    """

    total: Float[Array, ""]
    weighted: dict[str, Float[Array, ""]]
    counted: dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
    maxima: dict[str, Float[Array, ""]]


@runtime_checkable
class Context(Protocol):
    """What the trainer offers to `collect` and `prepare` in one step."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def options(self) -> Any: ...

    @property
    def step(self) -> int:
        """Steps done before this one."""
        ...

    @property
    def memory(self) -> dict[str, Any]:
        """The algorithm's own, see `Algorithm.init`."""
        ...

    def rollouts(self, examples: Sequence[Example]) -> Rollouts:
        """Generates `rollout.samples_per_prompt` completions for each prompt and scores them."""
        ...

    def logprobs(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        """Per-token log-probs ``[t]`` of each sequence under a role's current parameters (0 where masked)."""
        ...


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """See the module's text.

    Attributes:
      name: as in `algorithm.name`.
      options: frozen dataclass type of its options, made with `config.option`.
      roles: the model roles it needs beside ``policy``, given the options (``reference``).
      init: its own memory between steps, given the options: a flat dict of floats, saved with the run.
      collect, prepare, losses, after_step: see the module's text. `losses` is traced by jax; the others are
        ordinary Python on the host.
      validate: conflicts among its options and the rest, as (``error`` | ``warning``, paragraph) pairs.
      generates: False if it learns from the data alone; such a run makes no decoder unless it evaluates.
    """

    name: str
    options: type
    roles: Callable[[Any], tuple[str, ...]]
    init: Callable[[Any], dict[str, float]]
    collect: Callable[[Context, Sequence[Example]], Rollouts]
    prepare: Callable[[Context, Rollouts], Sequences]
    losses: Callable[[Any, TokenOutputs, Rows], Objective]
    after_step: Callable[[Any, dict[str, float], dict[str, float]], dict[str, float]]
    validate: Callable[[Any, RunConfig], list[tuple[str, str]]]
    loss_aggregation: Callable[[Any], str]
    generates: bool = True
