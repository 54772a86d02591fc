"""One step of staleness: while a step learns, the completions of the next one are sampled on devices of their own.

    step k:  take the samples of step k  ->  parameters after step k - 1 to the generation block
                ->  one thread: sample and score step k + 1      (those parameters, the generation block)
                    beside it:  log-probs and updates of step k  (the policy's block)

So step k learns from samples of the parameters after step k - 2, and the first two steps both from those of the first
parameters: whatever the two blocks' speeds are. The layout change is the only place where both blocks are touched, and
nothing samples then, so an update can donate what it likes. Whatever else needs the decoder (an evaluation, a save)
waits for the samples first. Of several processes each has a part of both blocks; there the two threads take turns to
start programs (`turns`), so that all processes start them in the same order.

The old policy of the loss is the current one, and `algorithm.rollout_is` weights tokens by old over sampler (decoupled
PPO). The decoder is compared with the trainer on the parameters that sampled: a copy of them in the compute dtype is
kept until the samples are there, and `rollout/logprob_diff_*` is of the first prompts, up to
`training.micro_batch_tokens`. What staleness makes of the difference is `staleness/logprob_diff_*`, which no check
bounds.

A run that is made longer (`num_steps`) samples its first new step with the newest parameters.

After verl's recipe `one_step_off_policy`, which corrects nothing unless asked to.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import packing, processes, rollouts_json, turns
from jaxrl_llm.algorithms.interface import Context, Sequences
from jaxrl_llm.algorithms.on_policy import trained_sequences
from jaxrl_llm.config import RunConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.observability.watchdog import beside
from jaxrl_llm.rollout import Arranged
from jaxrl_llm.types import Example, Params, Rollouts

THREAD = "sampling ahead"
ENDING_S = 30  # beyond the time of a reward call
STALENESS = "rollout/staleness"
"""Metric: how many steps older than the current parameters those that sampled are."""


class SampleAhead:
    """The samples of the next step: being made, or there. Belongs to the thread that trains, which alone calls it.

    Args:
      trainer: a `trainer.Trainer` (whose module imports this one).
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._work: _Work | None = None
        self._ready: Rollouts | None = None
        self._failed_at: dict[str, Any] | None = None

    def collect(self, context: Context, timer: PhaseTimer) -> Rollouts:
        """The samples of this step, and starts those of the next where the run has one."""
        self.settle(timer)
        trainer = self._trainer
        rollouts, self._ready = self._ready, None
        if rollouts is None:  # of the first step
            assert trainer.data is not None, "the samples of a run ahead are of its training rows"
            rollouts = trainer.algorithm.collect(context, next(trainer.data))
            rollouts.metrics[STALENESS] = 0.0
        if trainer.step_index + 1 < trainer.total_steps:
            self._start(timer)
        return rollouts

    def settle(self, timer: PhaseTimer | None = None) -> None:
        """Waits for the samples that are being made; afterwards the decoder is free.

        Raises:
          Exception: what making them raised; once.
        """
        if self._work is None:
            return
        work, asked = self._work, time.perf_counter()
        timer = timer or PhaseTimer()
        with timer("wait"), turns.waiting():
            work.wait()  # an interrupt while waiting leaves it for `close`
        turns.end()
        self._work, self._failed_at = None, work.position  # unless all that follows succeeds
        rollouts = work.result()
        with timer("logprobs"):
            rollouts.metrics |= self._difference(rollouts, work.sampler)
        rollouts.metrics |= {STALENESS: 1.0, "perf/overlap": work.overlap(asked), **work.seconds()}
        self._ready, self._failed_at = rollouts, None

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as JSON, when `settle` has returned or raised: the samples that the next step learns
        from, and the position in the data behind them. Where making them failed there are none, and the position is
        the one before."""
        assert self._work is None
        data = self._trainer.data
        position = None if data is None else self._failed_at or data.state()
        return {"data": position, "ahead": None if self._ready is None else rollouts_json.to_json(self._ready)}

    def restore(self, host: dict[str, Any]) -> None:
        """Goes on with the samples in what `state` gave; the data's position is set already."""
        values, data = host.get("ahead"), self._trainer.data
        self._ready = None if values is None or data is None else rollouts_json.from_json(values, data.example)

    def close(self) -> None:
        """Ends the thread, if there is one: at the decoder's next dispatch or within the time of a reward call. Of
        several processes each closes at the same place, or this one has failed alone and the thread may never end."""
        work, self._work = self._work, None
        if work is None:
            return
        self._trainer.rollout.interrupt()
        turns.abandon()
        with turns.waiting():
            limit_s = self._trainer.config.reward_runner.timeout_s + ENDING_S
            work.wait(None if processes.count() == 1 else limit_s)
        turns.end()

    def _start(self, timer: PhaseTimer) -> None:
        trainer = self._trainer
        assert trainer.data is not None
        state = trainer.roles[trainer.main]
        with timer("layout"):
            arranged = trainer.rollout.arrange(state.whole)
            # The update donates the parameters; what a base under adapters holds is not donated.
            sampler = dataclasses.replace(state, params=self._copy(state.params), opt_state=None).whole
        position, examples = trainer.data.state(), next(trainer.data)
        context = AheadContext(trainer, arranged, trainer.step_index + 1, dict(trainer.memory))
        collect = trainer.algorithm.collect
        turns.begin()
        self._work = _Work(lambda: collect(context, examples), context.timer, sampler, position)

    def _copy(self, params: Params) -> Params:
        """In the dtype of a forward pass, in arrays of its own."""
        dtype = self._trainer.dtype
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        program = jax.jit(_copied, static_argnums=1, out_shardings=shardings)
        return jax.block_until_ready(program(params, dtype))

    def _difference(self, rollouts: Rollouts, sampler: Params) -> dict[str, float]:
        """How far the decoder's log-probs are from the trainer's of the same parameters, on the first prompts."""
        if rollouts.sampler_logprobs is None or not len(rollouts):
            return {}
        trainer = self._trainer
        sequences = trained_sequences(rollouts, np.ones(len(rollouts), bool))
        room, members = trainer.config.training.micro_batch_tokens, []
        for group in packing.mini_batches(sequences, 1):
            room -= sum(len(sequences.tokens[n]) for n in group)
            if members and room < 0:
                break
            members.append(group)
        part = packing.select(sequences, np.concatenate(members))
        assert part.sampler_logprobs is not None
        found = trainer.per_token(trainer.main, part, "logprobs", sampler)
        differences = np.concatenate(
            [
                np.abs(trained - sampled)[mask]
                for trained, sampled, mask in zip(found, part.sampler_logprobs, part.loss_mask, strict=True)
            ]
        )
        if not differences.size:
            return {}
        return {
            "rollout/logprob_diff_mean": float(differences.mean()),
            "rollout/logprob_diff_max": float(differences.max()),
        }


def told_apart(rollouts: Rollouts, learned: dict[str, float]) -> dict[str, float]:
    """A step's metrics of its updates. Where its samples are older than the parameters that it trained, the difference
    of the two has its own name, since `checks` bounds that of a decoder and a trainer with the same parameters."""
    if not rollouts.metrics.get(STALENESS):
        return learned
    return {name.replace("rollout/logprob_diff", "staleness/logprob_diff"): value for name, value in learned.items()}


@dataclasses.dataclass
class AheadContext:
    """What an algorithm may ask for while it samples ahead; see `algorithms.interface.Context`. All of it is as it was
    when the thread began.

    Attributes:
      arranged: the parameters that sample.
    """

    _trainer: Any
    arranged: Arranged
    step: int
    memory: dict[str, Any]
    timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)

    @property
    def config(self) -> RunConfig:
        return self._trainer.config

    @property
    def options(self) -> Any:
        return self._trainer.options

    def rollouts(
        self,
        examples: Sequence[Example],
        *,
        role: str = "policy",
        samples: int | None = None,
        temperature: float | None = None,
        draw: int = 0,
    ) -> Rollouts:
        if role != self._trainer.main:
            raise self._refused(f"samples of the role {role!r}")
        return self._trainer.rollout.rollouts(
            self.arranged,
            examples,
            step=self.step,
            samples=samples,
            temperature=temperature,
            draw=draw,
            timer=self.timer,
        )

    def more_examples(self) -> Sequence[Example]:
        assert self._trainer.data is not None
        return next(self._trainer.data)

    def logprobs(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        raise self._refused("log-probabilities")

    def values(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        raise self._refused("values")

    def _refused(self, what: str) -> UserError:
        return UserError(
            f"algorithm.name = {self.config.algorithm.name!r}: its `collect` asks for {what}, and with "
            "placement.staleness = 1 it runs beside an update of the models that would answer. Ask in `prepare`, or "
            "set placement.staleness = 0."
        )


class _Work:
    """Samples in the making, on a thread of its own.

    Attributes:
      sampler: the parameters that sample, in the training layout.
      position: in the data, before anything was drawn for these samples.
    """

    def __init__(self, collect: Callable[[], Rollouts], timer: PhaseTimer, sampler: Params, position: dict[str, Any]):
        self.sampler, self.position = sampler, position
        self._collect, self._timer = collect, timer
        self._rollouts: Rollouts | None = None
        self._error: BaseException | None = None
        self._begin = self._end = time.perf_counter()
        # Not waited for at the interpreter's exit: a second Ctrl-C must end a run whose device hangs.
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with beside(THREAD), turns.beside():
                self._rollouts = self._collect()
        except BaseException as error:  # noqa: BLE001 - raised where the samples are taken
            self._error = error
        self._end = time.perf_counter()

    def wait(self, limit_s: float | None = None) -> None:
        self._thread.join(limit_s)

    def result(self) -> Rollouts:
        if self._error is not None:
            raise self._error
        assert self._rollouts is not None
        return self._rollouts

    def overlap(self, asked: float) -> float:
        """The part of the sampling, from 0 to 1, during which the run did something else, up to `asked`."""
        return min(max(asked - self._begin, 0.0) / max(self._end - self._begin, 1e-9), 1.0)

    def seconds(self) -> dict[str, float]:
        return {f"ahead/{phase}_s": seconds for phase, seconds in self._timer.seconds.items()}


def _copied(params: Params, dtype: Any) -> Params:
    # `jnp.copy`: jit hands on an argument that it returns as it is, and the update would donate that.
    return jax.tree.map(lambda leaf: jnp.copy(leaf.astype(dtype)), params)
