"""The spine: prompts -> rollouts -> rewards -> batch -> state. `Trainer.train` is the loop; read it first.

The controller is ordinary host Python and runs identically on every process: what steers device work is
computed from values that all processes share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import math
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clu import parameter_overview
from jax.experimental import multihost_utils
from transformers import PreTrainedTokenizerBase

from jaxrl_llm import config as configs
from jaxrl_llm import evaluate, optimizer, packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import RunConfig
from jaxrl_llm.data.dataset import PromptData
from jaxrl_llm.data.examples import load_examples
from jaxrl_llm.data.prompts import encode_all
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.decoding.engine import OnText
from jaxrl_llm.errors import Preempted, RunStopped, UserError
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.loading import init_model, load_config, load_model
from jaxrl_llm.models.registry import config_from_hf
from jaxrl_llm.observability.run_log import RunLog
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.rewards.pool import RewardRunner
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.sharding import TRAINING, batch_shards, make_mesh
from jaxrl_llm.types import Completion, Example, Params, Rollouts
from jaxrl_llm.update import Forward, RoleState
from jaxrl_llm.workdir import Workdir

logger = logging.getLogger(__name__)

VOCABULARY_MULTIPLE = 8
"""The vocabulary's rows are padded to a multiple of it on any mesh, so that a checkpoint of one tensor size (1, 2, 4
or 8) fits another. Padded rows have probability 0 and are not exported."""


class Trainer:
    """One run: its model, its data, its state and its folder.

    Args:
      config: what `config.resolve` returns.
      workdir: the run's folder; one that holds a run already is resumed. None keeps nothing on disk.
      rewards: Python functions by reward name, in place of ``config.rewards`` entries' functions.
      tokenizer: in place of the one at `config.tokenizer.path`.
      read_only: only read checkpoints from `workdir`: nothing is written there, and options may differ from the
        run's (evaluation, generation, export).
      devices: all by default.
    """

    def __init__(
        self,
        config: RunConfig,
        workdir: pathlib.Path | str | None = None,
        *,
        rewards: dict[str, Callable[..., Any]] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        read_only: bool = False,
        devices: Sequence[Any] | None = None,
    ):
        self.mesh = make_mesh(config.mesh, devices)
        self.config = config = configs.with_mesh(config, self.mesh.size)
        self.read_only = read_only
        self.algorithm = ALGORITHMS[config.algorithm.name]
        self.options = config.algorithm.options

        # Before the tokenizer, whose library reads config.json too and says less of what is wrong in it.
        model = config.model
        shape = (
            config_from_hf(model.architecture, "model.architecture") if model.architecture else load_config(model.path)
        )
        self.tokenizer = load_tokenizer(config.tokenizer.path) if tokenizer is None else tokenizer
        self.data = self._open_data() if config.data.train and not read_only else None
        self.eval_examples = self._read_eval_examples() if config.data.eval else []
        self.total_steps = (
            configs.step_counts(config, self.data.num_rows).total_steps if self.data else config.num_steps
        )
        configs.check_against_model(config, shape, self.tokenizer)
        # Every check that needs no weights has passed: only now is the folder taken and memory used.
        self.workdir = None if workdir is None or read_only else Workdir(workdir, config)
        self._scorer = functools.partial(RewardRunner, config.rewards, config.reward_runner, extra=rewards)
        if self.algorithm.generates and not read_only:
            self._scorer().close()  # a reward that can't be found or started is an error now, not after a rollout
        self.decoder, params = self._load_model()
        logger.info("%s: %d parameters", model.path or "from scratch", parameter_overview.count_parameters(params))
        logger.debug(parameter_overview.get_parameter_overview(params))
        self.dtype = _compute_dtype(config.dtype, self.mesh)

        updates = _updates_per_step(config) * self.total_steps
        self.optimizer = optimizer.make_optimizer(config.optimizer, updates)
        self.roles, shardings = self._make_roles(params, read_only)
        self.memory = self.algorithm.init(self.options)
        self.step_index = 0

        self.row_shape = packing.RowShape.of(
            config.training.row_tokens, config.training.micro_batch_tokens, batch_shards(self.mesh)
        )
        forward = Forward(
            self.decoder,
            temperature=(config.rollout.temperature or 1.0) if self.algorithm.generates else 1.0,
            dtype=self.dtype,
            remat=config.model.remat,
            unroll={"auto": None, "loop": False, "unrolled": True}[config.model.layers],
            chunk_tokens=config.training.logprob_chunk_tokens * batch_shards(self.mesh),
        )
        self._update = update.make_update(
            forward,
            self.algorithm,
            self.options,
            self.optimizer,
            config.optimizer.clip_norm,
            shardings,
            self.mesh,
        )
        self._logprobs = update.make_logprobs(forward, self.mesh)
        self.rollout = Rollout(config, self.decoder, self.mesh, self.dtype, self.tokenizer, self._scorer)
        self.checkpoints = None
        if workdir is not None and (not read_only or pathlib.Path(workdir, "checkpoints").is_dir()):
            self.checkpoints = Checkpoints(pathlib.Path(workdir), config.checkpoint, read_only=read_only)
        self.log = RunLog(None if self.workdir is None else self.workdir.path)
        self._preempted = threading.Event()

    # --- the loop ---------------------------------------------------------------------------------------------

    def train(self) -> dict[str, float]:
        """Runs from the newest checkpoint to the last step; returns the last metrics.

        Raises:
          RunStopped: a step failed its checks (`_check`); nothing of it was saved.
          Preempted: SIGTERM arrived; the run was saved after the step in progress.
        """
        if self.data is None:
            raise UserError(
                "data.train is empty: training needs a file of prompts (.jsonl, .parquet) or builtin:NAME/SPLIT."
            )
        if self.restore() and self.step_index >= self.total_steps:
            length = "num_steps" if self.config.num_steps else "data.num_epochs"
            raise UserError(
                f"{length}={self.config.num_steps or self.config.data.num_epochs}: the run in this --workdir has done "
                f"all its {self.step_index} steps already, so there is nothing to train. Raise {length} to go on, or "
                "choose another --workdir to start again."
            )
        metrics: dict[str, float] = {}
        with (
            self._sigterm(),  # outermost: closing waits for the last save
            contextlib.closing(self),
            self.log.progress(self.total_steps, self.step_index),
        ):
            if self.step_index == 0 and self.config.eval.before:
                self._evaluate(metrics)
                self.log.write(0, metrics)
            logger.info("the first step compiles its programs, which takes longer than the steps after it")
            while self.step_index < self.total_steps:
                examples = next(self.data)
                metrics, rollouts = self.step(examples)
                last = self.step_index == self.total_steps
                if _due(self.config.eval.every_steps, self.step_index) or (last and self.config.eval.after):
                    self._evaluate(metrics)
                self.log.write(self.step_index, metrics, rollouts)
                stop = self._agree(self._preempted.is_set())
                if (
                    stop
                    or _due(self.config.checkpoint.every_steps, self.step_index)
                    or (last and self.config.checkpoint.save_final)
                ):
                    self.save(metrics)
                if stop and not last:
                    raise Preempted(f"Saved after step {self.step_index} of {self.total_steps}.")
        self.log.summary(self.total_steps)
        return metrics

    def step(self, examples: Sequence[Example]) -> tuple[dict[str, float], Rollouts]:
        """One step on any number of prompts: generate, score, learn.

        Returns:
          The step's metrics by name and the scored rollouts.

        Raises:
          RunStopped: see `_check`.
        """
        timer = PhaseTimer()
        context = StepContext(self, timer)
        rollouts = self.algorithm.collect(context, examples)
        sequences = self.algorithm.prepare(context, rollouts)
        learned = self._learn(sequences, timer)
        self.memory = self.algorithm.after_step(self.options, self.memory, learned)
        self.step_index += 1
        metrics = {**rollouts.metrics, **sequences.metrics, **learned, **self.log.machine_metrics()}
        metrics |= timer.metrics()
        self._check(metrics, rollouts)
        return metrics, rollouts

    def _learn(self, sequences: Sequences, timer: PhaseTimer) -> dict[str, float]:
        """Every optimizer update of a step; metrics are means over the updates that had a trained token (one whose
        samples were all left out has none to tell of), maxima stay maxima."""
        found: list[dict[str, float]] = []
        empty: list[dict[str, float]] = []
        tokens = columns = 0
        batches = packing.mini_batches(sequences, self.config.training.mini_batch_size)
        for _ in range(self.config.training.epochs):
            for members in batches:
                part = packing.select(sequences, members)
                with timer("pack"):
                    batch, _ = self._pack(part)
                    rows = update.put_rows(batch, self.mesh)
                    tokens += int((batch.rows.segment_ids > 0).sum())
                    columns += batch.num_micro_batches * batch.rows.tokens[0].size
                with timer("update"):
                    self.roles["policy"], metrics = self._update(
                        self.roles["policy"],
                        rows,
                        jnp.int32(batch.num_micro_batches),
                        jnp.float32(batch.denominator),
                        old_is_actor=sequences.old_logprobs is None,
                    )
                    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                    (found if batch.num_micro_batches else empty).append(values)
        found = found or empty
        metrics = {name: (max if name.endswith("_max") else _mean)([one[name] for one in found]) for name in found[0]}
        metrics["perf/row_fill"] = tokens / max(columns, 1)
        metrics["perf/train_tokens_per_s"] = tokens / max(timer.seconds["update"], 1e-9)
        return metrics

    def _pack(self, sequences: Sequences) -> tuple[Any, packing.Placement]:
        """One shape for every batch of at most `mini_batch_size` prompts; twice, four times … as many micro-batches for
        one that needs more."""
        config = self.config
        usual = config.training.mini_batch_size * (config.rollout.samples_per_prompt if self.algorithm.generates else 1)
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        return packing.pack(
            sequences,
            self.row_shape,
            aggregation=self.algorithm.loss_aggregation(self.options),
            max_response_tokens=config.rollout.max_new_tokens,
            max_micro_batches=packing.micro_batches_for(usual, longest, self.row_shape),
            share_prompts=config.training.share_prompts,
        )

    def logprobs(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        """See `algorithms.interface.Context.logprobs`. Split like the updates, so that it runs in their shape."""
        out: list[np.ndarray] = [np.zeros(0)] * len(sequences.tokens)
        for members in packing.mini_batches(sequences, self.config.training.mini_batch_size):
            batch, placement = self._pack(packing.select(sequences, members))
            rows = update.put_rows(batch, self.mesh)
            values = np.asarray(self._logprobs(self.roles[role].params, rows, jnp.int32(batch.num_micro_batches)))
            lengths = [len(sequences.tokens[n]) for n in members]
            for n, one in zip(members, packing.unpack(values, placement, lengths), strict=True):
                out[n] = one
        return out

    # --- evaluation, generation, export -----------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Accuracy, mean reward and pass@k of the current policy on `data.eval`."""
        if not self.eval_examples:
            raise UserError("data.eval is empty: evaluation needs a held-out file of prompts with answers.")
        return evaluate.evaluate(self.rollout, self.roles["policy"].params, self.eval_examples, self.config)

    def _evaluate(self, metrics: dict[str, float]) -> None:
        """Adds the evaluation's metrics; if it fails, what was learned so far is saved before the error goes on."""
        if not self.eval_examples:
            return
        done = False
        logger.info("evaluating %d prompts", len(self.eval_examples))
        try:
            metrics |= self.evaluate()
            done = True
        finally:
            if not done and self.step_index:
                self.save(metrics)

    def complete(self, prompts: Sequence[Any], on_text: OnText | None = None) -> list[list[Completion]]:
        """`rollout.samples_per_prompt` completions of each prompt, by the rollout's sampling options.

        Args:
          on_text: called with (prompt, sample, new text) as the text grows.
        """
        examples = self.examples(prompts)
        return self.rollout.complete(self.roles["policy"].params, examples, step=self.step_index, on_text=on_text)

    def generate(self, prompts: Sequence[Any], on_text: OnText | None = None) -> list[list[str]]:
        """The texts of `complete`."""
        return [[completion.text for completion in group] for group in self.complete(prompts, on_text)]

    def examples(self, prompts: Sequence[Any], answers: Sequence[Any] | None = None) -> list[Example]:
        """Prompts (text or chat messages) encoded like the rows of a file.

        Args:
          answers: one for each prompt, for the rewards.

        Raises:
          UserError: there is no prompt, one is no text or chat or is longer than `data.max_prompt_tokens`, or the
            numbers differ.
        """
        data = self.config.data
        for name, values in (("prompts", prompts), ("answers", answers)):
            if isinstance(values, str):
                raise UserError(f"{name} = {values!r} is one text; give a list, for example [{values!r}].")
        if len(prompts) == 0:
            raise UserError("There is no prompt: give at least one.")
        if answers is not None and len(answers) != len(prompts):
            raise UserError(f"There are {len(prompts)} prompts but {len(answers)} answers; give one for each.")
        texts, encoded = encode_all(self.tokenizer, prompts, data)
        for index, ids in enumerate(encoded):
            if not 1 <= len(ids) <= data.max_prompt_tokens:
                raise UserError(
                    f"Prompt {index} has {len(ids)} tokens; a prompt has 1 to data.max_prompt_tokens = "
                    f"{data.max_prompt_tokens}. Shorten it or raise the limit."
                )
        epoch = self.step_index
        return [
            Example(
                uid=f"{row}@{epoch}",
                prompt=text,
                prompt_ids=ids,
                answer=None if answers is None else answers[row],
                row=row,
                epoch=epoch,
            )
            for row, (text, ids) in enumerate(zip(texts, encoded, strict=True))
        ]

    def export(self, folder: pathlib.Path | str, *, overwrite: bool = False) -> None:
        """Writes the policy as a Hugging Face folder; see `models.export.export_model`."""
        export_model(folder, self.decoder, self.roles["policy"].params, self.tokenizer, overwrite=overwrite)

    # --- saving and resuming ----------------------------------------------------------------------------------

    def save(self, metrics: dict[str, float]) -> None:
        """Starts saving everything that defines the next step."""
        if self.checkpoints is None:
            return
        host = {
            "data": self.data.state() if self.data else None,
            "memory": self.memory,
            "versions": {name: importlib.metadata.version(name) for name in ("jaxrl-llm", "jax", "flax", "optax")},
        }
        self.checkpoints.save(self.step_index, self.roles, host, metrics)

    def restore(self, step: int | None = None) -> bool:
        """Continues from a checkpoint of the work folder, the newest by default; False if there is none.

        Raises:
          UserError: the checkpoint is of another model, algorithm or data set, or is damaged.
        """
        if self.checkpoints is None or self.checkpoints.latest_step() is None:
            return False
        if self.read_only:
            params = self.roles["policy"].params
            self.step_index, params = self.checkpoints.restore_params("policy", params, step)
            self.roles = {"policy": RoleState(params)}
            logger.info("the checkpoint after step %d of %s", self.step_index, self.checkpoints.directory)
            return True
        restored = self.checkpoints.restore(self.roles, step)
        self.roles, self.memory, self.step_index = restored.state, restored.host["memory"], restored.step
        if self.data is not None and restored.host["data"] is not None:
            self.data.restore(restored.host["data"])
        logger.info("resumed from %s after step %d", self.checkpoints.directory, self.step_index)
        return True

    def close(self) -> None:
        """Waits for background saves and ends the reward workers."""
        with contextlib.ExitStack() as stack:  # each is closed whatever happens to the others
            if self.workdir is not None:
                stack.callback(self.workdir.close)
            stack.callback(self.log.close)
            stack.callback(self.rollout.close)
            if self.checkpoints is not None:
                stack.callback(self.checkpoints.close)
                self.checkpoints.wait()

    # --- setting up -------------------------------------------------------------------------------------------

    def _load_model(self) -> tuple[Any, Any]:
        """The decoder and its float32 master parameters in the training layout."""
        model, multiple = self.config.model, math.lcm(VOCABULARY_MULTIPLE, self.mesh.shape["tensor"])
        if model.architecture:
            key = jax.random.key(self.config.seed)
            return init_model(model.architecture, key, mesh=self.mesh, layout=TRAINING, vocab_multiple=multiple)
        return load_model(model.path, mesh=self.mesh, layout=TRAINING, dtype=jnp.float32, vocab_multiple=multiple)

    def _make_roles(self, params: Params, read_only: bool) -> tuple[dict[str, RoleState], RoleState]:
        """The roles that the run needs, and the shardings of the policy's."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
        if read_only:  # nothing will be trained: no optimizer state, no reference
            return {"policy": RoleState(params)}, RoleState(shardings)
        policy, policy_shardings = update.init_role(params, self.optimizer, shardings, self.mesh)
        roles = {"policy": policy}
        if "reference" in self.algorithm.roles(self.options):
            # A copy of its own: the policy's buffers are donated by the first update.
            copy = jax.tree.map(lambda leaf: jnp.array(leaf, self.dtype, copy=True), params)
            roles["reference"] = RoleState(copy)
        return roles, policy_shardings

    def _open_data(self) -> PromptData:
        """The training rows; every process holds the global batch, and the engine gives each replica its part."""
        return PromptData(
            self.config.data,
            self.tokenizer,
            batch_size=self.config.train_batch_size,
            seed=self.config.seed,
            max_response_tokens=None if self.algorithm.generates else self.config.rollout.max_new_tokens,
            kind="prompt" if self.algorithm.generates else "completion",
        )

    def _read_eval_examples(self) -> list[Example]:
        data = self.config.data
        examples, _ = load_examples(data, self.tokenizer, data.eval, max_prompt_tokens=data.max_prompt_tokens)
        return examples[: self.config.eval.max_rows] if self.config.eval.max_rows else examples

    def _agree(self, flag: bool) -> bool:
        """True on every process if it is on any: what steers device work must be the same everywhere."""
        if jax.process_count() == 1:
            return flag
        return bool(multihost_utils.process_allgather(np.array(flag)).any())

    @contextlib.contextmanager
    def _sigterm(self) -> Iterator[None]:
        """While training, SIGTERM asks for a save after the step in progress. Only the main thread can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            logger.info("SIGTERM: the step in progress is finished, then the run is saved")
            self._preempted.set()

        previous = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _check(self, metrics: dict[str, float], rollouts: Rollouts) -> None:
        """Stops a run that computes nonsense: before it is saved, but with its metrics and samples written.

        Raises:
          RunStopped: see the messages.
        """
        problem = self._problem(metrics)
        if problem:
            self.log.write(self.step_index, metrics, rollouts)
            raise RunStopped(f"Step {self.step_index}: {problem}")

    def _problem(self, metrics: dict[str, float]) -> str:
        """What is wrong with a step, and what to look at; empty if nothing is."""
        bad = [name for name in ("loss/total", "policy/grad_norm") if not np.isfinite(metrics.get(name, 0.0))]
        if bad:
            return (
                f"{bad[0]} is {metrics[bad[0]]}. Nothing of this step was saved; "
                "the last checkpoint is good. Look at the rewards of this step (samples.jsonl), "
                "at optimizer.learning_rate and optimizer.clip_norm, and in bfloat16 at dtype='float32'."
            )
        bounds = self.config.checks.bounds(str(np.dtype(self.dtype)), self.config.rollout.temperature)
        for name, bound in zip(("rollout/logprob_diff_mean", "rollout/logprob_diff_max"), bounds, strict=True):
            if metrics.get(name, 0.0) > bound:
                return (
                    f"{name} is {metrics[name]:.3g}, above its bound {bound:g}. The decoder "
                    "and the trainer disagree on the probability of the sampled tokens, so the loss is computed for "
                    "another policy than the one that wrote them. It was not saved. Look at rollout.attention, "
                    "dtype and jax_default_matmul_precision; checks.* sets the bounds if this size is known to be fine."
                )
        return ""


@dataclasses.dataclass
class StepContext:
    """What an algorithm may ask of the trainer within one step; see `algorithms.interface.Context`."""

    trainer: Trainer
    timer: PhaseTimer

    @property
    def config(self) -> RunConfig:
        return self.trainer.config

    @property
    def options(self) -> Any:
        return self.trainer.options

    @property
    def step(self) -> int:
        return self.trainer.step_index

    @property
    def memory(self) -> dict[str, Any]:
        return self.trainer.memory

    def rollouts(self, examples: Sequence[Example]) -> Rollouts:
        policy = self.trainer.roles["policy"].params
        return self.trainer.rollout.rollouts(policy, examples, step=self.step, timer=self.timer)

    def logprobs(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        with self.timer("logprobs"):
            return self.trainer.logprobs(role, sequences)


def _compute_dtype(name: str, mesh: jax.sharding.Mesh) -> Any:
    if name == "auto":
        name = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _updates_per_step(config: RunConfig) -> int:
    return -(-config.train_batch_size // config.training.mini_batch_size) * config.training.epochs


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _mean(values: list[float]) -> float:
    return float(np.mean(values))
