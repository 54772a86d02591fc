"""What an algorithm is: a small tuple of pure functions and data.

The trainer calls them in this order, and nothing else in the project knows an algorithm's name::

    rollouts  = algorithm.collect(context, examples)       # generate and score, or read what the data holds
    sequences = algorithm.prepare(context, rollouts)       # advantages, old/reference log-probs; still ragged
    objective = algorithm.losses(options, outputs, rows)   # inside the jitted update, once per micro-batch
    memory    = algorithm.after_step(options, memory, metrics)

A new algorithm is one file that makes an `Algorithm`: beside this one with a line in `ALGORITHMS`
(`algorithms/__init__.py`), or anywhere, named by ``algorithm.name = path.py:its_name``. A complete file, REINFORCE with
a part of the batch's mean as its baseline::

    import dataclasses

    import numpy as np

    from jaxrl_llm.algorithms import on_policy
    from jaxrl_llm.config import option

    @dataclasses.dataclass(frozen=True)
    class Options(on_policy.Options):
        baseline: float = option(1.0, "the part of the mean reward that is taken off", low=0.0)

    def advantages(context, rollouts, scores, sequences):
        centred = scores.total - context.options.baseline * np.nanmean(scores.total)
        return np.nan_to_num(centred)                    # one number for all tokens of a sample; NaN is not scored

    reinforce = on_policy.algorithm(
        "reinforce", Options, advantages, surrogate=on_policy.likelihood, min_samples=1
    )
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.config import RunConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Example, Rollouts, Rows, TokenOutputs, ValueOutputs


@dataclasses.dataclass(frozen=True)
class Role:
    """A model that an algorithm needs.

    Attributes:
      name: ``policy`` is the one that generates, is evaluated and exported; any other name is the algorithm's own.
      head: ``tokens``: next-token distributions. ``values``: a number per token. ``both``: of one trunk.
      trained: whether it has an optimizer and is updated.
      settings: the section of the configuration that says where its parameters come from and how it is optimised:
        ``policy`` (`model` and `optimizer`), ``critic``, ``reference``, ``teacher``.
    """

    name: str
    head: Literal["tokens", "values", "both"] = "tokens"
    trained: bool = False
    settings: str = ""

    @property
    def section(self) -> str:
        return self.settings or self.name


POLICY = Role("policy", trained=True)
REFERENCE = Role("reference")
CRITIC = Role("critic", head="values", trained=True)
TEACHER = Role("teacher")


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
      partner: ``[N]`` indices of the sequence of the same group that each is compared with in the loss. Groups then
        stay together in one row. None where sequences are independent.
      extras: what else the losses read, by name; float32 lists like those above, or one number for all tokens of a
        sequence.
      metrics: gathered on the way, by metric name.
    """

    tokens: list[np.ndarray]
    loss_mask: list[np.ndarray]
    group: np.ndarray
    advantages: list[np.ndarray] | None = None
    old_logprobs: list[np.ndarray] | None = None
    ref_logprobs: list[np.ndarray] | None = None
    sampler_logprobs: list[np.ndarray] | None = None
    partner: np.ndarray | None = None
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)
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


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The divergence of the policy's next-token distribution from a frozen role's, computed in the update.

    Attributes:
      role: the teacher's name.
      beta: 1 is the reverse KL(policy || teacher), 0 the forward one, between a Jensen-Shannon divergence.
      top_k: compare the teacher's so many likeliest tokens, and the rest as one; 0 = the whole vocabulary.
    """

    role: str = "teacher"
    beta: float = 1.0
    top_k: int = 0


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

    def rollouts(
        self,
        examples: Sequence[Example],
        *,
        role: str = "policy",
        samples: int | None = None,
        temperature: float | None = None,
        draw: int = 0,
    ) -> Rollouts:
        """Generates completions for each prompt with a role's current parameters, and scores them.

        Args:
          samples, temperature: in place of `rollout.samples_per_prompt` and `rollout.temperature`.
          draw: another number draws other samples of the same prompts in the same step.
        """
        ...

    def more_examples(self) -> Sequence[Example]:
        """The next batch of the training rows, for an algorithm that needs more than one (dynamic sampling).

        Raises:
          UserError: the prompts of this step did not come from training rows.
        """
        ...

    def logprobs(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        """Per-token log-probs ``[t]`` of each sequence under a role's current parameters (0 where masked)."""
        ...

    def values(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        """Values ``[t + 1]`` of each sequence's states under a role's value head: entry ``t`` is of the state before
        token ``t``, the last of the state after all. Only those before and right after a trained token are real; the
        others, and all of a sequence without a trained token, are 0."""
        ...


Loss = Callable[[Any, Any, Rows], Objective]
"""``losses(options, outputs, rows)``; outputs are `TokenOutputs`, or `ValueOutputs` of a role with values alone."""

_NOTHING: Callable[..., Any] = lambda *_: []  # noqa: E731


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """See the module's text.

    Attributes:
      name: as in `algorithm.name`.
      options: frozen dataclass type of its options, made with `config.option`.
      roles: the models it needs, given the options; the policy is among them unless it trains another model.
      init: its own memory between steps, given the options: a flat dict of floats, saved with the run.
      collect, prepare, losses, after_step: see the module's text. `losses` is traced by jax; the others are
        ordinary Python on the host. With several trained roles `prepare` may return a dict of `Sequences` by role (a
        role that is not in it rests this step), and `losses` is a dict of functions by role.
      rests: in how many of a run's first steps a trained role is not updated, given the options, the configuration and
        the role: its learning rate's schedule counts the updates that are left.
      validate: conflicts among its options and the rest, as (``error`` | ``warning``, paragraph) pairs.
      metric_name: what a metric of a role's loss is called, given both: for roles with the same loss, whose metrics
        would have the same names.
      loss_aggregation: see `algorithms.aggregation`, given the options.
      generates: False if it learns from the data alone; such a run makes no decoder unless it evaluates.
      data: what its training rows must hold: ``prompt``, ``completion``, ``preference`` or ``label``.
      compares: whether its sequences have partners (`Sequences.partner`), so that two must fit into a row.
      needs_rewards: whether a run without any reward is refused.
      longest: most tokens of a sequence, given the options and the most of a prompt and of a response.
      extras: names of `Sequences.extras` that its losses read, given the options.
      divergence: what `TokenOutputs.divergence` is to hold, given the options; None for nothing.
      evaluate: metrics on the evaluation rows in place of generated answers.
      answer: rollouts for evaluation where several roles write an answer together, given context, examples, samples
        and temperature; None lets the policy answer.
    """

    name: str
    options: type
    collect: Callable[[Context, Sequence[Example]], Rollouts]
    prepare: Callable[[Context, Rollouts], Sequences | Mapping[str, Sequences]]
    losses: Loss | Mapping[str, Loss]
    roles: Callable[[Any], tuple[Role, ...]] = lambda options: (POLICY,)
    init: Callable[[Any], dict[str, float]] = lambda options: {}
    after_step: Callable[[Any, dict[str, float], dict[str, float]], dict[str, float]] = (
        lambda options, memory, metrics: memory
    )
    rests: Callable[[Any, RunConfig, Role], int] = lambda options, config, role: 0
    validate: Callable[[Any, RunConfig], list[tuple[str, str]]] = _NOTHING
    metric_name: Callable[[str, str], str] = lambda role, metric: metric
    loss_aggregation: Callable[[Any], str] = lambda options: "token-mean"
    generates: bool = True
    data: Literal["prompt", "completion", "preference", "label"] = "prompt"
    compares: bool = False
    needs_rewards: bool = True
    longest: Callable[[Any, int, int], int] = lambda options, prompt, response: prompt + response
    extras: Callable[[Any], tuple[str, ...]] = lambda options: ()
    divergence: Callable[[Any], Divergence | None] = lambda options: None
    evaluate: Callable[[Context, Sequence[Example]], dict[str, float]] | None = None
    answer: Callable[[Context, Sequence[Example], int, float], Rollouts] | None = None

    def loss_of(self, role: str) -> Loss:
        """The loss of a trained role."""
        return self.losses[role] if isinstance(self.losses, Mapping) else self.losses

    def trained_roles(self, options: Any) -> tuple[Role, ...]:
        return tuple(role for role in self.roles(options) if role.trained)

    def exported_role(self, options: Any, name: str) -> str:
        """The role of that name, the main one by default.

        Raises:
          UserError: it is not the main one, and writes no text.
        """
        main = self.main_role(options).name
        writers = (role.name for role in self.trained_roles(options) if role.head != "values")
        names = dict.fromkeys((main, *writers))
        if name and name not in names:
            raise UserError(f"role = {name!r}: a run of {self.name} can export {', '.join(names)}. Name one of these.")
        return name or main

    def main_role(self, options: Any) -> Role:
        """The model that the run is for: it is evaluated and exported. The policy, or the first trained one."""
        trained = self.trained_roles(options)
        return next((role for role in trained if role.name == "policy"), trained[0])

    def require_writer(self, options: Any) -> None:
        """Refuses a run whose model writes no text.

        Raises:
          UserError: it says what the model is for.
        """
        if self.main_role(options).head == "values":
            raise UserError(
                f"A run of {self.name} trains a model that scores texts and writes none, so there is nothing to "
                "generate. Export it and give the folder as reward_model.path of a run that does; `eval` tells how "
                "well it scores."
            )


def by_role(prepared: Any, trained: Sequence[Role]) -> dict[str, Sequences]:
    """What `prepare` returned as the sequences of each trained role."""
    if isinstance(prepared, Mapping):
        return dict(prepared)
    return {role.name: prepared for role in trained}


Outputs = TokenOutputs | ValueOutputs
