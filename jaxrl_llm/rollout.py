"""Generate and score: the half of a step that happens in the generation layout.

`Rollout` owns the hybrid engine, the decoder engine and the reward workers, and makes each only when it is first needed
(SFT without evaluation needs none of them).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import processes
from jaxrl_llm.config import REWARD_MODEL, RunConfig, longest_sequence
from jaxrl_llm.decoding.engine import Engine, OnText
from jaxrl_llm.decoding.request import Request, SamplingParams, sample_seeds
from jaxrl_llm.device_groups import DeviceGroups
from jaxrl_llm.errors import Interrupted, RunStopped
from jaxrl_llm.hybrid_engine import HeldParams, HybridEngine
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.observability.watchdog import seen
from jaxrl_llm.rewards.combine import RewardResult, weighted_sum
from jaxrl_llm.rewards.model_scorer import ModelScorer
from jaxrl_llm.rewards.pool import RewardRunner
from jaxrl_llm.types import Completion, Example, Params, Rollouts

EVALUATION_STREAM = 2**32 - 1
"""Stands in for the step in the seeds of evaluation samples: every evaluation draws the same numbers, and
none that training draws."""


@dataclasses.dataclass(frozen=True)
class Arranged:
    """Parameters that are in the generation layout already (`Rollout.arrange`)."""

    params: Params


class Rollout:
    """Completions and rewards for prompts. One thread at a time may ask for them.

    Args:
      make_scorer: starts the reward workers.
    """

    def __init__(
        self,
        config: RunConfig,
        decoder: Decoder,
        groups: DeviceGroups,
        dtype: Any,
        tokenizer: Any,
        make_scorer: Callable[[], RewardRunner],
    ):
        self.config, self.decoder, self.groups, self.dtype, self.tokenizer = (
            config,
            decoder,
            groups,
            dtype,
            tokenizer,
        )
        self._make_scorer = make_scorer
        self._kept: HeldParams | None = None
        self._interrupted = threading.Event()

    @functools.cached_property
    def hybrid_engine(self) -> HybridEngine:
        return HybridEngine(
            self.decoder,
            self.groups.policy,
            self.config.hybrid_engine,
            self.dtype,
            weight_dtype=self.config.rollout.weight_dtype,
            tensor=self.config.rollout.tensor,
            block=self.groups.generation,
        )

    @functools.cached_property
    def engine(self) -> Engine:
        context = min(longest_sequence(self.config), self.decoder.config.max_position)
        mesh = self.hybrid_engine.generation_mesh
        return Engine(
            self.decoder,
            mesh,
            self.config.rollout,
            self.tokenizer,
            context=context,
            dtype=self.dtype,
            fit_pages=self.config.hybrid_engine.kv_cache_policy == "dynamic",
        )

    @functools.cached_property
    def reward_runner(self) -> RewardRunner:
        return processes.together(self._make_scorer)

    @functools.cached_property
    def reward_model(self) -> ModelScorer:
        settings = self.config.reward_model
        with processes.agreement():  # each process reads the files itself
            return ModelScorer(
                settings.path,
                max_tokens=settings.max_tokens,
                batch_tokens=settings.batch_tokens,
                template=settings.template,
                output=settings.output,
                label=None if settings.label < 0 else settings.label,
                dtype=self.dtype,
                mesh=self.groups.mesh("reward_model"),
            )

    def arrange(self, params: Params) -> Arranged:
        """Parameters in the training layout, brought to the generation layout; returns once they are there."""
        self.forget()
        return Arranged(jax.block_until_ready(self.hybrid_engine.to_generation(params)))

    def complete(
        self,
        params: Params | Arranged,
        examples: Sequence[Example],
        *,
        step: int,
        samples: int | None = None,
        temperature: float | None = None,
        draw: int = 0,
        timer: PhaseTimer | None = None,
        on_text: OnText | None = None,
        keep: bool = False,
    ) -> list[list[Completion]]:
        """Completions of each prompt.

        Args:
          params: in the training layout, or what `arrange` made of such; kept; nothing of them is held when this
            returns, but where ``keep`` says so.
          step: with the seed, the prompt, the sample and the position, it fixes the randomness.
          samples, temperature: in place of the configured ones (evaluation).
          draw: another number draws other samples.
          on_text: see `Engine.generate`.
          keep: whether the parameters in the generation layout and the cache stay, for the next call with the very same
            ``params`` and ``keep``: its prompts that go on where these sequences end compute only what is new. Must be
            let go (`forget`) before ``params`` are donated, as both layouts may share buffers.

        Raises:
          Interrupted: see `interrupt`.
        """
        timer = timer or PhaseTimer()
        rollout = self.config.rollout
        samples = rollout.samples_per_prompt if samples is None else samples
        sampling = SamplingParams(
            temperature=rollout.temperature if temperature is None else temperature,
            top_k=rollout.top_k if temperature is None else 0,
            top_p=rollout.top_p if temperature is None else 1.0,
            min_p=rollout.min_p if temperature is None else 0.0,
            max_tokens=rollout.max_new_tokens,
            min_tokens=rollout.min_new_tokens,
            stop=rollout.stop,
            ignore_eos=rollout.ignore_eos,
        )
        requests = [
            Request(
                example.prompt_ids,
                sampling,
                sample_seeds(self.config.seed, step, _prompt_key(example, draw), samples),
            )
            for example in examples
        ]
        if isinstance(params, Arranged):
            generation_params = params.params
        else:
            with timer("layout"):
                generation_params = self._generation_params(params, keep)
        with timer("generation"):
            completions = self.engine.generate(
                generation_params, requests, reuse=keep, on_text=on_text, progress=self._reached
            )
            if self.config.hybrid_engine.kv_cache_policy == "dynamic" and not keep:
                self.engine.release()
        return completions

    def _generation_params(self, params: Params, keep: bool) -> Params:
        if keep and self._kept is not None and self._kept.is_of(params):
            return self._kept.generation
        self.forget()
        made = self.hybrid_engine.to_generation(params)
        if keep:
            self._kept = HeldParams.of(params, made)
        return made

    def forget(self) -> None:
        """Lets go of what `complete` was asked to keep."""
        if self._kept is not None:
            self._kept = None
            if self.config.hybrid_engine.kv_cache_policy == "dynamic":
                self.engine.release()

    def rollouts(
        self,
        params: Params | Arranged,
        examples: Sequence[Example],
        *,
        step: int,
        samples: int | None = None,
        temperature: float | None = None,
        draw: int = 0,
        timer: PhaseTimer | None = None,
    ) -> Rollouts:
        """Completions with their rewards; arguments as in `complete`."""
        timer = timer or PhaseTimer()
        before = timer.seconds.get("generation", 0.0)  # of earlier calls in the same step
        groups = self.complete(
            params, examples, step=step, samples=samples, temperature=temperature, draw=draw, timer=timer
        )
        group = np.repeat(np.arange(len(examples), dtype=np.int32), [len(one) for one in groups])
        completions = [completion for one in groups for completion in one]
        texts = [completion.text for completion in completions]
        owners = [examples[index] for index in group.tolist()]
        with timer("reward"):
            scored = self._score(owners, texts)
        lengths = np.array([len(completion.token_ids) for completion in completions])
        seconds = max(timer.seconds.get("generation", 0.0) - before, 1e-9)
        metrics = {
            **_reward_metrics(scored.total, scored.components),
            **self._reward_model_metrics(),
            "reward/failures": float(scored.failures),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/truncated_fraction": float(
                np.mean([completion.finish_reason == "length" for completion in completions])
            ),
            "perf/generation_tokens_per_s": float(lengths.sum()) / seconds,
            "perf/host_fraction": self.engine.stats.host_fraction,
        }
        change = self.hybrid_engine.last
        if change is not None:
            metrics["layout/bytes"] = float(change.moved_bytes)
            metrics["layout/copied_bytes"] = float(change.copied_bytes)
            if change.gathered_bytes:
                metrics["layout/gathered_bytes"] = float(change.gathered_bytes)
        return Rollouts(
            examples=examples,
            group=group,
            responses=[completion.token_ids for completion in completions],
            sampler_logprobs=[completion.logprobs for completion in completions],
            texts=texts,
            finish_reasons=[completion.finish_reason for completion in completions],
            rewards=scored.total,
            components=scored.components,
            metrics=metrics,
        )

    def _score(self, owners: Sequence[Example], texts: Sequence[str]) -> RewardResult:
        """What the reward functions and the reward model say; a run without either has no scores (NaN)."""
        result = RewardResult(np.full(len(texts), np.nan, np.float32), {}, 0, [])
        runner = self.reward_runner if self.config.rewards else None
        if self._interrupted.is_set():  # asked after the runner is there: `interrupt` tells one that it finds
            raise Interrupted
        if runner is not None:
            result = runner.score(
                [owner.prompt for owner in owners],
                texts,
                [owner.answer for owner in owners],
                [dict(owner.metadata) for owner in owners],
            )
        settings = self.config.reward_model
        if not settings.path:
            return result
        scores = self.reward_model.score(
            [owner.prompt if owner.question is None else owner.question for owner in owners], texts
        )
        failed = np.isnan(scores)
        if len(scores) and failed.all() and self.config.reward_runner.on_all_failed == "stop":
            raise RunStopped(
                f"The reward model {settings.path!r} gave no finite score for any of the {len(scores)} samples, so "
                "nothing can be learned from it. Look at its weights, and in bfloat16 at dtype='float32'; "
                "reward_runner.on_all_failed = 'warn' goes on with reward_model.failure_score."
            )
        scores = np.where(failed, np.float32(settings.failure_score), scores)
        components = {**result.components, REWARD_MODEL: scores}
        total = weighted_sum(
            {"functions": result.total, REWARD_MODEL: scores}, {"functions": 1.0, REWARD_MODEL: settings.weight}
        )
        return RewardResult(total, components, result.failures + int(failed.sum()), result.failure_messages)

    def _reward_model_metrics(self) -> dict[str, float]:
        if not self.config.reward_model.path:
            return {}
        told = self.reward_model.metrics
        return {f"reward_model/{name}": told[name] for name in ("cut_prompts", "cut_completions", "failures")}

    def interrupt(self) -> None:
        """Makes what another thread asked for end soon, by an `Interrupted`: at the decoder's next dispatch, or within
        the time of a reward call. Nothing more can be asked for until `close`."""
        self._interrupted.set()
        runner = self.__dict__.get("reward_runner")
        if runner is not None:
            runner.interrupt()

    def _reached(self, finished: int, of: int) -> None:
        seen()
        if self._interrupted.is_set():
            raise Interrupted

    def close(self) -> None:
        """Ends the reward workers if there are any, and lets go of what `complete` kept; the next use starts again."""
        self.forget()
        self._interrupted.clear()
        runner = self.__dict__.pop("reward_runner", None)
        if runner is not None:
            runner.close()


def _prompt_key(example: Example, draw: int) -> int:
    """Tells apart the prompts of a run whose samples must differ; see `sample_seeds`."""
    return draw * 2**96 + example.sample * 2**64 + example.epoch * 2**32 + example.row


def _reward_metrics(total: np.ndarray, components: dict[str, np.ndarray]) -> dict[str, float]:
    """Means over the samples that a reward applies to; a reward that applies to none is left out."""
    metrics: dict[str, float] = {}
    scored = total[~np.isnan(total)]
    if len(scored):
        metrics |= {"reward/mean": float(scored.mean()), "reward/std": float(scored.std())}
    metrics["reward/unscored_fraction"] = 1.0 - len(scored) / max(len(total), 1)
    for name, values in components.items():
        applied = values[~np.isnan(values)]
        if len(applied):
            metrics[f"reward/{name}/mean"] = float(applied.mean())
    return metrics
