"""Scores samples in a pool of worker processes, each call within its time, in an order that never varies."""

from __future__ import annotations

import base64
import datetime
import logging
import os
import pickle
import selectors
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from jaxrl_llm import processes, turns
from jaxrl_llm.config import RewardConfig, RewardRunnerConfig
from jaxrl_llm.errors import Interrupted, RunStopped, UserError
from jaxrl_llm.rewards.combine import RewardResult, weighted_sum
from jaxrl_llm.rewards.process import WorkerProcess
from jaxrl_llm.rewards.protocol import encode

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # imports of a user's module included
MAX_BATCH = 32  # samples in one message to a worker
MAX_MESSAGES = 10  # kinds of failures that are told


class RewardRunner:
    """Computes the rewards of completions; starts its workers at once, so that a bad function is found early.

    Args:
      rewards: by name, what to compute and its weight. A config without ``function`` gives the weight and
        options of the callable of that name in ``extra``.
      settings: workers, their time-out and memory, failure score, and what an all-failed batch does.
      extra: callables of this process, by name (weight 1 where ``rewards`` doesn't say); a function defined in a
        notebook works.

    Raises:
      UserError: no reward; a function that can't be found, loaded, sent to a worker, or lacks an option.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        settings: RewardRunnerConfig,
        *,
        extra: Mapping[str, Callable[..., Any]] | None = None,
    ):
        configs = {**{name: RewardConfig() for name in extra or {}}, **rewards}
        if not configs:
            raise UserError("No reward is configured. Set rewards = {'name': {'function': 'math'}}, or pass reward=.")
        self._settings = settings
        self.weights = {name: config.weight for name, config in configs.items()}
        setup = {
            "parent": os.getpid(),
            "memory_bytes": settings.memory_bytes,
            "alarm_s": 2.0 * settings.timeout_s + 5.0,  # only if this process is no longer there to kill
            "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
            "rewards": [
                {"name": name, "options": config.options, **_source(name, config, (extra or {}).get(name))}
                for name, config in configs.items()
            ],
        }
        self._setup = encode(setup, _plain)
        self._workers: list[WorkerProcess] = []
        self._lock = threading.Lock()
        self._interrupted = threading.Event()
        self._close = weakref.finalize(self, _kill_all, self._workers, os.getpid())
        try:
            for _ in range(settings.num_workers):
                self._workers.append(WorkerProcess(self._setup))
            self._wait_until_started()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every worker. The runner can't be used afterwards."""
        self._close()

    def interrupt(self) -> None:
        """Makes a call of `score` on another thread end within ``timeout_s``, by an `Interrupted`; so do later ones."""
        self._interrupted.set()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[Any],
        metadata: Sequence[Mapping[str, Any]],
    ) -> RewardResult:
        """Scores N samples. Takes at most ``timeout_s`` for each call that hangs, divided among the workers.

        In a run of several processes each must make the same call: each scores its part, and all get all scores.

        Raises:
          RunStopped: every score of every reward failed, or none applied, under ``on_all_failed = 'stop'``.
          Interrupted: see `interrupt`.
          UserError: a row's metadata can't be sent to a worker.
        """
        if not self._close.alive:
            raise RuntimeError("This RewardRunner has been closed.")
        tasks = [
            [index, 0, *fields]
            for index, fields in enumerate(zip(prompts, completions, answers, metadata, strict=True))
        ]
        found = processes.exchange(lambda: self._score_share(tasks).plain())
        batch = _Batch.joined([_Batch.of(list(self.weights), one) for one in found])
        components = batch.components(self._settings.failure_score)
        result = RewardResult(
            weighted_sum(components, self.weights), components, int(batch.failed.sum()), list(batch.messages)
        )
        self._check(batch, result)
        return result

    def _score_share(self, tasks: list[list[Any]]) -> _Batch:
        """The scores of this process's part of the samples; the others have none."""
        batch = _Batch(list(self.weights), len(tasks))
        with self._lock:
            try:
                with turns.waiting():
                    self._run([tasks[sample] for sample in processes.share(len(tasks))], batch)
            finally:  # after an error or an interrupt, what a worker still says must not reach the next batch
                for worker in [w for w in self._workers if w.tasks]:
                    self._restart(worker)
        return batch

    def _run(self, tasks: list[list[Any]], batch: _Batch) -> None:
        queue = deque(tasks)
        pending = {task[0] for task in tasks}
        while pending:
            if self._interrupted.is_set():
                raise Interrupted
            for worker in self._workers:
                if worker.ready and not worker.tasks and queue:
                    size = min(MAX_BATCH, max(1, len(queue) // (2 * len(self._workers))))
                    share = [queue.popleft() for _ in range(size)]
                    worker.assign(share, _encode_tasks(share))
            for worker in self._listen():
                messages = worker.receive()
                if messages is None:
                    self._replace(worker, queue, pending, batch, "ended its process (exit code {code})")
                for message in messages or ():
                    self._take(worker, message, pending, batch)
            for worker in [w for w in self._workers if self._is_late(w)]:
                reason = f"took longer than reward_runner.timeout_s = {self._settings.timeout_s:g} s"
                self._replace(worker, queue, pending, batch, reason)

    def _listen(self) -> list[WorkerProcess]:
        """Workers with something to read; waits for one until the next call is due."""
        now = time.monotonic()
        due = [worker.since + self._limit(worker) - now for worker in self._workers if self._is_busy(worker)]
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker, selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select(max(0.0, min(due)) if due else None)]

    @staticmethod
    def _is_busy(worker: WorkerProcess) -> bool:
        return bool(worker.tasks) or not worker.ready

    def _limit(self, worker: WorkerProcess) -> float:
        return self._settings.timeout_s if worker.ready else START_TIMEOUT_S

    def _is_late(self, worker: WorkerProcess) -> bool:
        return self._is_busy(worker) and time.monotonic() > worker.since + self._limit(worker)

    def _take(self, worker: WorkerProcess, message: Any, pending: set[int], batch: _Batch) -> None:
        if isinstance(message, dict):
            if "error" in message:
                raise UserError(f"The reward function can't be used: {message['error']}.")
            worker.ready = True
            return
        sample, reward, score, parts, failure = message
        batch.record(sample, reward, score, parts, failure)
        worker.next_reward = reward + 1
        if worker.next_reward == len(self.weights):
            pending.discard(sample)
            worker.tasks.pop(0)
            worker.next_reward = worker.tasks[0][1] if worker.tasks else 0

    def _replace(
        self, worker: WorkerProcess, queue: deque[list[Any]], pending: set[int], batch: _Batch, reason: str
    ) -> None:
        """Kills a worker, marks the call it was in as failed, and queues what else it had for a new one."""
        code = self._restart(worker)
        if not worker.ready:
            raise UserError(
                f"A reward worker did not start (exit code {code}). Its messages are above; a module that it imports "
                f"may have failed, needs more than {START_TIMEOUT_S:g} s, or more memory than the "
                f"{self._settings.memory_bytes} bytes of reward_runner.memory_bytes."
            )
        if worker.tasks:
            stuck, *rest = worker.tasks
            sample, reward = stuck[0], worker.next_reward
            batch.record(sample, reward, None, {}, reason.format(code=code))
            if reward + 1 < len(self.weights):
                rest.insert(0, [sample, reward + 1, *stuck[2:]])
            else:
                pending.discard(sample)
            queue.extendleft(reversed(rest))

    def _restart(self, worker: WorkerProcess) -> int:
        """Puts a new process in the place of ``worker``; returns the old one's exit code."""
        self._workers.remove(worker)
        code = worker.kill()
        self._workers.append(WorkerProcess(self._setup))
        return code

    def _wait_until_started(self) -> None:
        while not all(worker.ready for worker in self._workers):
            for worker in self._listen():
                messages = worker.receive()
                if messages is None:
                    self._replace(worker, deque(), set(), _Batch([], 0), "")
                for message in messages or ():
                    self._take(worker, message, set(), _Batch([], 0))
            for worker in [w for w in self._workers if self._is_late(w)]:
                self._replace(worker, deque(), set(), _Batch([], 0), "")

    def _check(self, batch: _Batch, result: RewardResult) -> None:
        if not len(result.total):
            return
        text = ""
        applied = ~np.isnan(batch.scores) | batch.failed
        scored = applied & ~batch.failed
        if result.failures and not scored.any():
            text = (
                f"Every score of this batch failed ({result.failures} calls of {', '.join(self.weights)}), so nothing "
                f"can be learned from it. First failures: {'; '.join(result.failure_messages[:3])}."
            )
        elif not applied.any():
            text = (
                f"No reward ({', '.join(self.weights)}) applied to any of the {len(result.total)} samples: each "
                "returned None. Built-in rewards do so where a row has no answer; see data.answer_column."
            )
        elif result.failures:
            log.warning("%d reward calls failed: %s", result.failures, "; ".join(result.failure_messages[:3]))
            for index, name in enumerate(self.weights):
                calls = int(applied[:, index].sum())
                if calls > 1 and not scored[:, index].any():
                    log.warning("The reward %s failed on all %d samples that it applied to.", name, calls)
        if text and self._settings.on_all_failed == "stop":
            raise RunStopped(f"{text} Set reward_runner.on_all_failed = 'warn' to go on nevertheless.")
        if text:
            log.warning("%s", text)


class _Batch:
    """Scores as they come in, at places that don't depend on when."""

    def __init__(self, names: list[str], num_samples: int):
        self.names = names
        self.scores = np.full((num_samples, len(names)), np.nan, np.float32)
        self.failed = np.zeros((num_samples, len(names)), bool)
        self.parts: dict[str, np.ndarray] = {}
        self.messages: dict[str, None] = {}
        self._kinds: set[tuple[int, str]] = set()

    def record(
        self, sample: int, reward: int, score: float | None, parts: Mapping[str, float], failure: str | None
    ) -> None:
        if failure is not None:
            self.failed[sample, reward] = True
            kind = (reward, failure)
            if kind not in self._kinds and len(self._kinds) < MAX_MESSAGES:
                self._kinds.add(kind)
                self.messages[f"{self.names[reward]}, sample {sample}: {failure}"] = None
        if score is not None:
            self.scores[sample, reward] = score
        for part, value in parts.items():
            name = f"{self.names[reward]}/{part}"
            column = self.parts.setdefault(name, np.full(len(self.scores), np.nan, np.float32))
            column[sample] = value

    def plain(self) -> dict[str, Any]:
        """For other processes: plain values, each float32 exactly as it is."""
        return {
            "scores": self.scores.tolist(),
            "failed": self.failed.tolist(),
            "parts": {name: column.tolist() for name, column in self.parts.items()},
            "messages": list(self.messages),
        }

    @classmethod
    def of(cls, names: list[str], told: Mapping[str, Any]) -> _Batch:
        """What `plain` has told of."""
        batch = cls(names, len(told["scores"]))
        batch.scores[:], batch.failed[:] = told["scores"], told["failed"]
        batch.parts = {name: np.array(column, np.float32) for name, column in told["parts"].items()}
        batch.messages = dict.fromkeys(told["messages"])
        return batch

    @classmethod
    def joined(cls, batches: Sequence[_Batch]) -> _Batch:
        """Batches of which each has scores of other samples, as one."""
        first, *others = batches
        for other in others:
            first.failed |= other.failed
            first.scores = np.where(np.isnan(first.scores), other.scores, first.scores)
            for name, column in other.parts.items():
                known = first.parts.get(name, column)
                first.parts[name] = np.where(np.isnan(known), column, known)
            first.messages |= dict.fromkeys(list(other.messages)[: max(MAX_MESSAGES - len(first.messages), 0)])
        return first

    def components(self, failure_score: float) -> dict[str, np.ndarray]:
        scores = np.where(self.failed, np.float32(failure_score), self.scores)
        by_reward = {name: scores[:, index] for index, name in enumerate(self.names)}
        return {**by_reward, **dict(sorted(self.parts.items()))}


def _source(name: str, config: RewardConfig, function: Callable[..., Any] | None) -> dict[str, str | None]:
    """How a worker gets the function: by its name, or, for a callable of this process only, pickled."""
    if config.function:
        source, separator, attribute = config.function.rpartition(":")
        if separator and source.endswith(".py"):  # a worker must not depend on the current folder
            return {"target": f"{Path(os.path.expanduser(source)).absolute()}:{attribute}", "pickle": None}
        return {"target": config.function, "pickle": None}
    if function is None:
        raise UserError(
            f"rewards.{name}.function is empty. Set a built-in name, 'module:function' or 'path.py:function'."
        )
    try:
        return {"target": None, "pickle": base64.b64encode(cloudpickle.dumps(function)).decode("ascii")}
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        raise UserError(
            f"The reward function {name!r} can't be sent to a worker process ({error}). It may use only what can be "
            "pickled: no locks, open files or generators; open such things inside the function."
        ) from error


def _encode_tasks(tasks: list[list[Any]]) -> bytes:
    try:
        return encode(tasks, _plain)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"A column of the data can't be given to a reward ({error}). Allowed are texts, numbers, lists, dicts, "
            "dates and numpy arrays; drop or convert the column."
        ) from error


def _plain(value: Any) -> Any:
    """JSON for what data sets hold beside JSON's own types."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no plain value")


def _kill_all(workers: list[WorkerProcess], owner: int) -> None:
    while workers and os.getpid() == owner:  # a fork of the owner must leave its workers alone
        workers.pop().kill()
