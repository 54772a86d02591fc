"""The spine: prompts -> rollouts -> rewards -> batch -> state. `Trainer.train` is the loop; read it first.

The controller is ordinary host Python and runs identically on every process: what steers device work is
computed from values that all processes share, and what only one of them may meet (a signal, a full disk, an error in
a reward) is exchanged first (`processes.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import logging
import pathlib
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxrl_llm import config as configs
from jaxrl_llm import evaluate, packing, processes, turns, update
from jaxrl_llm.algorithms import find_algorithm
from jaxrl_llm.algorithms.interface import Sequences, by_role
from jaxrl_llm.algorithms.returned import check_losses, check_sequences, checked_memory
from jaxrl_llm.apart_teacher import ApartTeacher
from jaxrl_llm.checkpoint import Checkpoints, holds_checkpoints
from jaxrl_llm.config import PlacementConfig, RunConfig
from jaxrl_llm.data.columns import WANTED
from jaxrl_llm.data.dataset import PromptData
from jaxrl_llm.data.examples import encode_rows, fingerprint, load_examples
from jaxrl_llm.data.prompts import encode_all, require_eos
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.decoding.engine import OnText
from jaxrl_llm.determinism import require_deterministic
from jaxrl_llm.device_groups import DeviceGroups
from jaxrl_llm.errors import Preempted, RunStopped, UserError
from jaxrl_llm.launch.ending import left_to_training
from jaxrl_llm.models.classifier import export_classifier
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.loading import load_config
from jaxrl_llm.models.registry import config_from_hf
from jaxrl_llm.observability.profile import step_profile
from jaxrl_llm.observability.run_log import RunLog
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.observability.watchdog import seen
from jaxrl_llm.options import to_dict
from jaxrl_llm.residence import Residence, to_device
from jaxrl_llm.rewards.pool import RewardRunner
from jaxrl_llm.roles import RoleBuilder, mean_or_max, pack_lengths
from jaxrl_llm.rollout import EVALUATION_STREAM, Rollout
from jaxrl_llm.sharding import batch_shards
from jaxrl_llm.staleness import SampleAhead, told_apart
from jaxrl_llm.types import Completion, Example, Params, Rollouts
from jaxrl_llm.update import RoleState, TeacherReading
from jaxrl_llm.workdir import CONFIG_FILE, Workdir

logger = logging.getLogger(__name__)

SPARSE = 0.2
"""Rows that are less full are told of: most of what an update computes is padding then."""


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
        if config.deterministic:
            require_deterministic()  # before the devices start
        devices = jax.devices() if devices is None else list(devices)
        fit = _for_reading if read_only else configs.with_mesh
        self.config = config = fit(config, len(devices))
        self.groups = DeviceGroups.of(config, devices)
        self.mesh = self.groups.policy
        self.read_only = read_only
        with contextlib.ExitStack() as opened:  # closed if anything below fails: a notebook goes on after the error
            self._set_up(workdir, rewards, tokenizer, opened)
            opened.pop_all()

    def _set_up(
        self,
        workdir: pathlib.Path | str | None,
        rewards: dict[str, Callable[..., Any]] | None,
        tokenizer: PreTrainedTokenizerBase | None,
        opened: contextlib.ExitStack,
    ) -> None:
        """All that `__init__` makes; what must be closed is in `opened` as soon as it is there."""
        config, read_only = self.config, self.read_only
        with processes.agreement():
            self._read_inputs(workdir, rewards, tokenizer, opened)
        if processes.count() > 1:
            processes.require_equal(self._identity())
            with processes.agreement():
                self._require_shared(workdir)
        self.dtype = _compute_dtype(config.dtype, self.mesh)
        self.checkpoints = None
        if workdir is not None and (not read_only or holds_checkpoints(workdir)):
            self.checkpoints = Checkpoints(pathlib.Path(workdir), config.checkpoint, read_only=read_only)
            opened.callback(self.checkpoints.close)
        before = self.checkpoints.read_host() if self.checkpoints is not None and not read_only else {}
        roles = {role.name: role for role in self.algorithm.roles(self.options)}
        self.residence = Residence(config.hybrid_engine, roles, self.mesh)
        builder = RoleBuilder(
            config,
            self.algorithm,
            self.groups,
            self.dtype,
            self.total_steps,
            read_only=read_only,
            rest=self.residence.rest,
            sources=before.get("sources"),
        )
        self.models, self.roles = builder.build()
        self.sources = builder.sources
        self.main = self.algorithm.main_role(self.options).name
        self.decoder = self.models[self.main].decoder
        self.memory = checked_memory(self.algorithm, "init", self.algorithm.init(self.options))
        self.step_index = 0
        self._problem_found = ""  # of a step; what it left is never saved
        self._told_of_empty_rows = False
        self.row_shapes = {
            model.mesh: packing.RowShape.of(
                config.training.row_tokens,
                config.training.micro_batch_tokens,
                batch_shards(model.mesh),
                model.forward.schedule,
            )
            for model in self.models.values()
        }
        self.teacher = self._apart_teacher()
        self.rollout = Rollout(config, self.decoder, self.groups, self.dtype, self.tokenizer, self._scorer)
        opened.callback(self.rollout.close)
        if config.reward_model.path and not read_only:
            _ = self.rollout.reward_model  # one that can't be read is an error now, not after a rollout
        self.ahead = SampleAhead(self)
        self.log = RunLog(None if self.workdir is None else self.workdir.path)
        opened.callback(self.log.close)
        self._preempted = threading.Event()

    def _read_inputs(
        self,
        workdir: pathlib.Path | str | None,
        rewards: dict[str, Callable[..., Any]] | None,
        tokenizer: PreTrainedTokenizerBase | None,
        opened: contextlib.ExitStack,
    ) -> None:
        """Everything that needs no weights and no device: reads and checks it, then claims the folder."""
        config, read_only = self.config, self.read_only
        self.algorithm = find_algorithm(config.algorithm.name)
        self.options = config.algorithm.options
        if ":" in config.algorithm.name and not read_only:  # a user's own
            checked_memory(self.algorithm, "init", self.algorithm.init(self.options))
            check_losses(self.algorithm, self.options)

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
        if config.profile_steps and workdir is None and not read_only:
            raise UserError(
                f"profile_steps = {config.profile_steps}: profiles are written to the run's folder, and there is none. "
                "Give a --workdir (workdir=… in Python), or leave profile_steps empty."
            )
        # Every check that needs no weights has passed: only now is the folder taken and memory used.
        self.workdir = None
        if workdir is not None and not read_only and processes.is_first():
            self.workdir = Workdir(workdir, config)
            opened.callback(self.workdir.close)
        self._scorer = functools.partial(RewardRunner, config.rewards, config.reward_runner, extra=rewards)
        if config.rewards and self.algorithm.generates and not read_only:
            self._scorer().close()  # a reward that can't be found or started is an error now, not after a rollout

    # --- the loop ---------------------------------------------------------------------------------------------

    def train(self, *, then_ends: bool = False) -> dict[str, float]:
        """Runs from the newest checkpoint to the last step; returns the last metrics.

        Args:
          then_ends: the program does nothing after it but end. Each of several processes then ignores SIGTERM from
            there on: the others wait for it at the end, and nothing is left to save.

        Raises:
          RunStopped: a step failed its checks (`_check`); nothing of it was saved.
          Preempted: SIGTERM arrived; the run was saved after the step in progress. Where it came before the first one
            nothing was saved. (The command line ends at once then, see `launch.ending`.)
        """
        if self.data is None:
            raise UserError(
                "data.train is empty: training needs a file of prompts (.jsonl, .parquet) or builtin:NAME/SPLIT."
            )
        metrics: dict[str, float] = {}
        with (
            self._sigterm(then_ends),  # outermost: closing waits for the last save
            contextlib.closing(self),
            contextlib.ExitStack() as shown,
        ):
            self._go_on()
            shown.enter_context(self.log.progress(self.total_steps, self.step_index))
            if self.step_index == 0 and self.config.eval.before:
                self._evaluate(metrics)
                with processes.agreement():
                    self.log.write(0, metrics)
            left_to_training.set()  # `_sigterm` takes it back
            if any(processes.exchange(self._preempted.is_set)):
                raise Preempted(f"Before step {self.step_index + 1}: there was nothing to save.")
            logger.info("the first step compiles its programs, which takes longer than the steps after it")
            while self.step_index < self.total_steps:
                metrics, rollouts = self._next_step(self.data)
                last = self.step_index == self.total_steps
                if _due(self.config.eval.every_steps, self.step_index) or (last and self.config.eval.after):
                    self._evaluate(metrics, rollouts)
                stop = self._write_and_ask(metrics, rollouts)
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

    def _go_on(self) -> None:
        """Restores the newest checkpoint, if there is one.

        Raises:
          UserError: all steps are done.
        """
        if self.restore() and self.step_index >= self.total_steps:
            length = "num_steps" if self.config.num_steps else "data.num_epochs"
            raise UserError(
                f"{length}={self.config.num_steps or self.config.data.num_epochs}: the run in this --workdir has done "
                f"all its {self.step_index} steps already, so there is nothing to train. Raise {length} to go on, or "
                "choose another --workdir to start again."
            )

    def _write_and_ask(self, metrics: dict[str, float], rollouts: Rollouts) -> bool:
        """Writes the step's lines; whether any process was asked to end."""

        def tell() -> bool:
            self.log.write(self.step_index, metrics, rollouts)
            return self._preempted.is_set()

        return any(processes.exchange(tell))

    def _next_step(self, data: PromptData) -> tuple[dict[str, float], Rollouts]:
        """`step` on the next training rows; with `placement.staleness`, on samples that the step before has begun."""
        if self.config.placement.staleness:
            return self._step(self.ahead.collect)
        return self.step(next(data))

    def step(self, examples: Sequence[Example]) -> tuple[dict[str, float], Rollouts]:
        """One step on any number of prompts: generate with the current parameters, score, learn.

        Returns:
          The step's metrics by name and the scored rollouts.

        Raises:
          RunStopped: see `_check`.
        """
        return self._step(lambda context, timer: self.algorithm.collect(context, examples))

    def _step(self, collect: Callable[[StepContext, PhaseTimer], Rollouts]) -> tuple[dict[str, float], Rollouts]:
        self.rollout.forget()  # what a conversation kept may share buffers with parameters that an update donates
        timer = PhaseTimer()
        context = StepContext(self, timer)
        with step_profile(self.step_index + 1, self._profile_folder(self.step_index + 1)):
            rollouts = collect(context, timer)
            trained = self.algorithm.trained_roles(self.options)
            prepared = by_role(self.algorithm.prepare(context, rollouts), trained)
            check_sequences(self.algorithm, prepared, trained)
            learned = told_apart(rollouts, self._learn(prepared, timer))
            told = {name: value for sequences in prepared.values() for name, value in sequences.metrics.items()}
            metrics = {**rollouts.metrics, **told, **learned, "rollout/samples": float(len(rollouts))}
            memory = self.algorithm.after_step(self.options, self.memory, metrics)
            self.memory = checked_memory(self.algorithm, "after_step", memory)
        self.step_index += 1
        metrics |= self.log.machine_metrics() | timer.metrics()
        self._check(metrics, rollouts)
        return metrics, rollouts

    def _profile_folder(self, step: int) -> pathlib.Path | None:
        if self.workdir is None or step not in self.config.profile_steps:
            return None
        return self.workdir.path / "profile" / f"step_{step}"

    def _learn(self, prepared: dict[str, Sequences], timer: PhaseTimer) -> dict[str, float]:
        """Every optimizer update of a step, role by role within a mini-batch; metrics are means over the updates that
        had a trained token (one whose samples were all left out has none to tell of), maxima stay maxima.

        Roles on blocks of their own are updated at the same time: one waits for the update before it on its block."""
        found: dict[str, list[dict[str, float]]] = {}
        empty: dict[str, list[dict[str, float]]] = {}
        running: dict[Mesh, tuple[str, bool, Any]] = {}

        def finish(mesh: Mesh) -> None:
            if mesh in running:
                name, had_rows, metrics = running.pop(mesh)
                with turns.waiting():
                    values = {metric: float(value) for metric, value in jax.device_get(metrics).items()}
                (found if had_rows else empty).setdefault(name, []).append(values)

        tokens = columns = fullest = 0
        shared = {id(sequences): sequences for sequences in prepared.values()}
        roles = {key: [name for name, sequences in prepared.items() if id(sequences) == key] for key in shared}
        size = self.config.training.mini_batch_size
        divergence = self.algorithm.divergence(self.options)
        batches = [
            (key, members) for key, sequences in shared.items() for members in packing.mini_batches(sequences, size)
        ]
        for _ in range(self.config.training.epochs):
            for key, members in batches:
                part = packing.select(shared[key], members)
                packed: dict[Mesh, tuple[Any, Any]] = {}
                for name in roles[key]:
                    mesh, program = self.models[name].mesh, self.models[name].update
                    assert program is not None, f"{name} is not trained"
                    if mesh not in packed:
                        with timer("pack"):
                            batch, _ = self._pack(part, mesh)
                            packed[mesh] = batch, update.put_rows(batch, mesh)
                    batch, rows = packed[mesh]
                    count = int((batch.rows.segment_ids > 0).sum())
                    tokens, fullest = tokens + count, max(fullest, count)
                    columns += batch.num_micro_batches * batch.rows.tokens[0].size
                    with timer("update"):
                        finish(mesh)
                        teacher: Params | TeacherReading | None = None
                        if divergence is not None:
                            teacher = self.residence.params(self.roles[divergence.role])
                            teacher = teacher if self.teacher is None else self.teacher.read(teacher, batch)
                        self.roles[name] = self.residence.use(self.roles[name])
                        state, metrics = program(
                            self.roles[name],
                            rows,
                            np.int32(batch.num_micro_batches),  # of the host: no other block's work stands before it
                            np.float32(batch.denominator),
                            old_is_actor=part.old_logprobs is None,
                            teacher=teacher,
                        )
                        self.roles[name] = self.residence.rest(name, state)
                        del state, teacher  # what rests in the host's memory is free on the devices from here
                        running[mesh] = name, batch.num_micro_batches > 0, metrics
                        if not self.groups.apart:
                            finish(mesh)
        with timer("update"):
            for mesh in list(running):
                finish(mesh)
        metrics: dict[str, float] = {}
        for name in prepared:
            metrics |= mean_or_max(found.get(name) or empty.get(name, []))
        metrics["perf/row_fill"] = tokens / max(columns, 1)
        self._tell_of_empty_rows(metrics["perf/row_fill"], fullest)
        metrics["perf/train_tokens_per_s"] = tokens / max(timer.seconds.get("update", 0.0), 1e-9)
        return metrics

    def _tell_of_empty_rows(self, fill: float, tokens: int) -> None:
        """Once, where updates of so many tokens compute mostly padding."""
        length = self.config.training.row_tokens
        enough = max(configs.longest_block(self.config), -(-tokens // batch_shards(self.mesh)))
        if fill < SPARSE and 2 * enough <= length and not self._told_of_empty_rows:
            self._told_of_empty_rows = True
            logger.warning(
                "rows of %d tokens are %.1f %% full: training.micro_batch_tokens = %d would hold an update like this "
                "one in less time, with the same result",
                length,
                100 * fill,
                enough,
            )

    def _apart_teacher(self) -> ApartTeacher | None:
        """None where the update of the policy reads the teacher's parameters itself."""
        divergence = self.algorithm.divergence(self.options)
        if divergence is None or divergence.role not in self.models or not self.models[self.main].update:
            return None
        teacher = self.models[divergence.role]
        if teacher.mesh is self.mesh:
            return None
        return ApartTeacher(teacher.forward, divergence, teacher.mesh, self.mesh)

    def _pack(self, sequences: Sequences, mesh: Mesh | None = None) -> tuple[Any, packing.Placement]:
        """One shape, on a mesh, for every batch of at most `mini_batch_size` prompts; twice, four times … as many
        micro-batches for one that needs more."""
        row_shape = self.row_shapes[mesh or self.mesh]
        usual, longest = pack_lengths(self.config, self.algorithm)
        wanted = set(self.algorithm.extras(self.options))
        return packing.pack(
            dataclasses.replace(
                sequences, extras={name: values for name, values in sequences.extras.items() if name in wanted}
            ),
            row_shape,
            aggregation=self.algorithm.loss_aggregation(self.options),
            max_response_tokens=self.config.rollout.max_new_tokens,
            max_micro_batches=packing.micro_batches_for(usual, longest, row_shape),
            share_prompts=self.config.training.share_prompts,
        )

    def per_token(self, role: str, sequences: Sequences, kind: str, params: Params | None = None) -> list[np.ndarray]:
        """``logprobs`` or ``values`` of each token's column, ``[t]`` by sequence, or ``both``, ``[t, 2]``, of a role
        with a head of both; zeros for one that is not packed. Split like the updates, so that it runs in their shape.
        Other parameters than the role's own may be given."""
        out: list[np.ndarray] = [np.zeros(0)] * len(sequences.tokens)
        sequences = dataclasses.replace(sequences, extras={}, partner=None)
        program, mesh = getattr(self.models[role], kind), self.models[role].mesh
        with self._params(role) if params is None else contextlib.nullcontext(params) as params:
            for members in packing.mini_batches(sequences, self.config.training.mini_batch_size):
                batch, placement = self._pack(packing.select(sequences, members), mesh)
                rows = update.put_rows(batch, mesh)
                said = program(params, rows, np.int32(batch.num_micro_batches))
                with turns.waiting():
                    values = np.asarray(said)
                lengths = [len(sequences.tokens[n]) for n in members]
                for n, one in zip(members, packing.unpack(values, placement, lengths), strict=True):
                    out[n] = one
        return out

    @contextlib.contextmanager
    def _params(self, role: str) -> Iterator[Params]:
        """All parameters of a role, on the devices."""
        if not self.residence.splits(role):
            yield self.residence.params(self.roles[role])
            return
        # What rests on the devices is let go first: joined with the rest it is there once more.
        self.roles[role] = dataclasses.replace(self.roles[role], params=to_device(self.roles[role].params))
        try:
            yield self.roles[role].whole
        finally:
            self.roles[role] = self.residence.rest(role, self.roles[role])

    # --- evaluation, generation, export -----------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Accuracy, mean reward and pass@k of the current policy on `data.eval`."""
        if not self.eval_examples:
            raise UserError("data.eval is empty: evaluation needs a held-out file of prompts with answers.")
        context = StepContext(self, PhaseTimer())
        if self.algorithm.evaluate is not None:
            return self.algorithm.evaluate(context, self.eval_examples)
        settings = self.config.eval
        context.stream = EVALUATION_STREAM
        answer = self.algorithm.answer or evaluate.answer
        rollouts = answer(context, self.eval_examples, settings.samples_per_prompt, settings.temperature)
        return evaluate.figures(rollouts, settings)

    def _evaluate(self, metrics: dict[str, float], rollouts: Rollouts | None = None) -> None:
        """Adds the evaluation's metrics; if it fails, the step is saved and written before the error goes on."""
        if not self.eval_examples:
            return
        logger.info("evaluating %d prompts", len(self.eval_examples))
        try:
            metrics |= self.evaluate()
        except BaseException as error:
            # Of several processes all must save; an error of another kind may have come to this one alone.
            if self.step_index and (processes.count() == 1 or isinstance(error, UserError | RunStopped)):
                self.save(metrics)
                with processes.agreement():
                    self.log.write(self.step_index, metrics, rollouts)
            raise

    def complete(self, prompts: Sequence[Any], on_text: OnText | None = None) -> list[list[Completion]]:
        """`rollout.samples_per_prompt` completions of each prompt, by the rollout's sampling options.

        Args:
          on_text: called with (prompt, sample, new text) as the text grows.

        Raises:
          UserError: a prompt is empty or too long, or the run's model writes no text.
        """
        self.algorithm.require_writer(self.options)
        self.ahead.settle()
        examples = self.examples(prompts)
        return self.rollout.complete(self.roles[self.main].whole, examples, step=self.step_index, on_text=on_text)

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
        if isinstance(answers, str):
            raise UserError(f"answers = {answers!r} is one text; give a list, for example [{answers!r}].")
        if len(prompts) == 0:
            raise UserError("There is no prompt: give at least one.")
        texts, encoded = encode_all(self.tokenizer, prompts, data)
        # By their order: a shuffled table's column finds its items by labels.
        prompts, answers = list(prompts), None if answers is None else list(answers)
        if answers is not None and len(answers) != len(prompts):
            raise UserError(f"There are {len(prompts)} prompts but {len(answers)} answers; give one for each.")
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
                question=prompts[row],
                answer=None if answers is None else answers[row],
                row=row,
                epoch=epoch,
            )
            for row, (text, ids) in enumerate(zip(texts, encoded, strict=True))
        ]

    def examples_of_rows(self, rows: Sequence[Any]) -> list[Example]:
        """Rows of an algorithm that learns from completions (`Algorithm.data`), encoded like those of a file.

        Args:
          rows: dicts with the columns that a file would have.

        Raises:
          UserError: there is no row, one is no dict, lacks a column, or is too long.
        """
        name, wanted = self.algorithm.name, WANTED[self.algorithm.data]
        if isinstance(rows, str | Mapping) or len(rows) == 0:
            raise UserError(f"The examples are {rows!r:.80}; give a list of rows, dicts with {wanted}.")
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"Example {index} is {row!r:.80}; {name} learns from rows, dicts with {wanted}.")
        examples = encode_rows(
            self.config.data,
            self.tokenizer,
            [dict(row) for row in rows],
            max_response_tokens=None if self.algorithm.generates else self.config.rollout.max_new_tokens,
            kind=self.algorithm.data,
        )
        epoch = self.step_index
        return [dataclasses.replace(one, uid=f"{one.row}@{epoch}", epoch=epoch) for one in examples]

    def export(self, folder: pathlib.Path | str, *, role: str = "", overwrite: bool = False) -> None:
        """Writes the policy as a Hugging Face folder, a reward model as a classifier: `models.export.export_model`,
        `models.classifier.export_classifier`.

        Args:
          role: another that writes text, where there are several (`ippo`: ``policy``, ``policy_1`` …).

        Raises:
          UserError: there is no such role, or it writes none.
        """
        role = self.algorithm.exported_role(self.options, role)
        write = export_model
        if self.models[role].role.head == "values":
            write = functools.partial(export_classifier, end_token_id=require_eos(self.tokenizer))
        with self._params(role) as params:
            write(folder, self.decoder, params, self.tokenizer, overwrite=overwrite)

    # --- saving and resuming ----------------------------------------------------------------------------------

    def save(self, metrics: dict[str, float]) -> None:
        """Starts saving everything that defines the next step, the samples that were begun for it included.

        Raises:
          UserError: a check has stopped a step (`_check`).
          Exception: what went wrong with those samples; the rest is saved.
        """
        if self.checkpoints is None:
            return
        if self._problem_found:
            raise UserError(
                f"A step of this trainer was stopped, so what it left is not saved: {self._problem_found} To go on "
                "from the last checkpoint, close this trainer and make another with its workdir."
            )
        try:
            self.ahead.settle()
        except Exception:
            self._save(metrics)
            raise
        self._save(metrics)

    def _save(self, metrics: dict[str, float]) -> None:
        assert self.checkpoints is not None
        seen("checkpoint")
        host = {
            **self.ahead.state(),
            "memory": self.memory,
            "sources": self.sources,
            "versions": {name: importlib.metadata.version(name) for name in ("jaxrl-llm", "jax", "flax", "optax")},
        }
        self.checkpoints.save(self.step_index, self._saved(), host, metrics)

    def _saved(self) -> dict[str, RoleState]:
        """What a checkpoint holds of the roles: not the base under adapters, nor a role read from its source again.
        Nothing is copied to the devices for it."""
        return {name: self.residence.saved(state) for name, state in self.roles.items() if self.models[name].saved}

    def restore(self, step: int | None = None) -> bool:
        """Continues from a checkpoint of the work folder, the newest by default; False if there is none.

        Every array is read into the memory where it rests. Those that were there are let go first, so that there is
        room; after a checkpoint that could not be read the roles hold nothing.

        Raises:
          UserError: the checkpoint is of another model, algorithm or data set, or is damaged.
        """
        newest = None if self.checkpoints is None else self.checkpoints.newest()
        if self.checkpoints is None or newest is None:
            return False
        self.rollout.forget()
        step = self.checkpoints.complete(newest if step is None else step)
        if self.read_only:
            for name in self.roles:
                template = self._let_go(name).params
                self.step_index, params = self.checkpoints.restore_params(name, template, step)
                self._take(name, RoleState(params))
            logger.info("the checkpoint after step %d of %s", self.step_index, self.checkpoints.directory)
            return True
        saved = [name for name, model in self.models.items() if model.saved]
        restored = self.checkpoints.restore({name: self._let_go(name) for name in saved}, step)
        for name in saved:
            self._take(name, restored.state.pop(name))
        self.memory, self.step_index, self._problem_found = restored.host["memory"], restored.step, ""
        if self.data is not None and restored.host["data"] is not None:
            self.data.restore(restored.host["data"])
        self.ahead.restore(restored.host)
        logger.info("resumed from %s after step %d", self.checkpoints.directory, self.step_index)
        return True

    def _let_go(self, name: str) -> RoleState:
        """Frees what a checkpoint holds of a role; returns the shapes and places to read it into."""
        template = self.residence.template(self.roles[name])
        self.roles[name] = RoleState({}, base=self.roles[name].base)
        return template

    def _take(self, name: str, state: RoleState) -> None:
        """A role as a checkpoint gave it."""
        self.roles[name] = self.residence.rest(name, dataclasses.replace(state, base=self.roles[name].base))

    def close(self) -> None:
        """Waits for background saves and ends the reward workers, and what samples ahead."""
        with contextlib.ExitStack() as stack:  # each is closed whatever happens to the others
            if self.workdir is not None:
                stack.callback(self.workdir.close)
            stack.callback(self.log.close)
            stack.callback(self.rollout.close)
            if self.checkpoints is not None:
                stack.callback(self.checkpoints.close)
                stack.callback(self.checkpoints.wait)
            self.ahead.close()

    # --- setting up -------------------------------------------------------------------------------------------

    def _open_data(self) -> PromptData:
        """The training rows; every process holds the global batch, and the engine gives each replica its part."""
        return PromptData(
            self.config.data,
            self.tokenizer,
            batch_size=self.config.train_batch_size,
            seed=self.config.seed,
            max_response_tokens=None if self.algorithm.generates else self.config.rollout.max_new_tokens,
            kind=self.algorithm.data,
        )

    def _read_eval_examples(self) -> list[Example]:
        data = self.config.data
        examples, _ = load_examples(
            data,
            self.tokenizer,
            data.eval,
            max_prompt_tokens=data.max_prompt_tokens,
            kind="prompt" if self.algorithm.evaluate is None else self.algorithm.data,
        )
        return examples[: self.config.eval.max_rows] if self.config.eval.max_rows else examples

    def _require_shared(self, workdir: pathlib.Path | str | None) -> None:
        if workdir is not None and not self.read_only and not pathlib.Path(workdir, CONFIG_FILE).exists():
            raise UserError(
                f"--workdir={workdir}: process 0 has written {CONFIG_FILE} there, and this process does not see it. "
                "Checkpoints are written by all processes of a run: choose a folder on a file system that they share."
            )

    def _identity(self) -> dict[str, Any]:
        """What must be the same on all processes of a run."""
        config = json.dumps(to_dict(self.config), sort_keys=True, default=str)
        return {
            "the configuration": zlib.crc32(config.encode()),
            "the rows of data.train": self.data.fingerprint() if self.data else 0,
            "the rows of data.eval": fingerprint(self.eval_examples),
            "the versions of jaxrl_llm and jax": [importlib.metadata.version(name) for name in ("jaxrl-llm", "jax")],
        }

    @contextlib.contextmanager
    def _sigterm(self, then_ends: bool) -> Iterator[None]:
        """While training, SIGTERM asks for a save after the step in progress, and before it for an end. Only the main
        thread can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(*_: Any) -> None:
            if left_to_training.is_set():
                logger.info("SIGTERM: the step in progress is finished, then the run is saved")
            self._preempted.set()

        previous = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:  # without a moment in between, in which one process would end and leave the others waiting
            signal.signal(signal.SIGTERM, signal.SIG_IGN if then_ends and processes.count() > 1 else previous)
            left_to_training.clear()

    def _check(self, metrics: dict[str, float], rollouts: Rollouts) -> None:
        """Stops a run that computes nonsense: before it is saved, but with its metrics and samples written.

        Raises:
          RunStopped: see the messages.
        """
        problem = self._problem(metrics)
        if problem:
            self._problem_found = problem
            self.log.write(self.step_index, metrics, rollouts)
            raise RunStopped(f"Step {self.step_index}: {problem}")

    def _problem(self, metrics: dict[str, float]) -> str:
        """What is wrong with a step, and what to look at; empty if nothing is."""
        bad = [
            name
            for name, value in metrics.items()
            if (name.startswith("loss/") or name.endswith("/grad_norm")) and not np.isfinite(value)
        ]
        if bad:
            return (
                f"{bad[0]} is {metrics[bad[0]]}. Nothing of this step was saved; "
                "the last checkpoint is good. Look at the rewards of this step (samples.jsonl), "
                "at optimizer.learning_rate and optimizer.clip_norm, and in bfloat16 at dtype='float32'."
            )
        rollout = self.config.rollout
        bounds = self.config.checks.bounds(str(np.dtype(self.dtype)), rollout.temperature, rollout.weight_dtype)
        for name, value in metrics.items():
            if not name.startswith("rollout/logprob_diff_"):  # of each policy, where there are several
                continue
            bound = bounds[1] if name.endswith("_max") else bounds[0]
            if value > bound:
                return (
                    f"{name} is {value:.3g}, above its bound {bound:g}. The decoder "
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
    stream: int | None = None  # stands in for the step in the seeds of samples
    came_along: dict[str, tuple[Sequences, Params, list[np.ndarray]]] = dataclasses.field(default_factory=dict)
    """By role the values that came with its log-probs, and of what they are."""

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

    def rollouts(
        self,
        examples: Sequence[Example],
        *,
        role: str = "policy",
        samples: int | None = None,
        temperature: float | None = None,
        draw: int = 0,
    ) -> Rollouts:
        self.trainer.ahead.settle(self.timer)  # one thread at a time has the decoder
        return self.trainer.rollout.rollouts(
            self.trainer.roles[role].whole,
            examples,
            step=self.step if self.stream is None else self.stream,
            samples=samples,
            temperature=temperature,
            draw=draw,
            timer=self.timer,
        )

    def more_examples(self) -> Sequence[Example]:
        if self.trainer.data is None:
            raise UserError(
                f"{self.config.algorithm.name} asks for more prompts than this step was given, and data.train is "
                "empty: give RLTrainer's step more prompts, or switch the drawing of more of them off."
            )
        return next(self.trainer.data)

    def logprobs(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        with self.timer("logprobs"):
            if self.trainer.models[role].role.head != "both":
                return self.trainer.per_token(role, sequences, "logprobs")
            both = self.trainer.per_token(role, sequences, "both")
            self.came_along[role] = sequences, self.trainer.roles[role].params, [one[:, 1] for one in both]
            return [one[:, 0] for one in both]

    def values(self, role: str, sequences: Sequences) -> list[np.ndarray]:
        with self.timer("values"):
            of, params, after = self.came_along.pop(role, (None, None, []))
            same = of is not None and of.tokens is sequences.tokens and params is self.trainer.roles[role].params
            if of is None or not (same and all(map(np.array_equal, of.loss_mask, sequences.loss_mask))):
                after = self.trainer.per_token(role, sequences, "values")
        # The value before token t is the one after token t - 1.
        return [np.concatenate([[0.0], one]).astype(np.float32) for one in after]


def _for_reading(config: RunConfig, device_count: int) -> RunConfig:
    """`configs.with_mesh`; where the devices are not those of the training, roles have no blocks of their own: a model
    that is only used is the same on any."""
    blocks = config.placement.blocks()
    try:
        if not blocks or processes.count() == 1:
            return configs.with_mesh(config, device_count)
    except UserError:
        if not blocks:
            raise
    logger.warning("placement (%s) does not fit these %d devices and is left out", ", ".join(blocks), device_count)
    return configs.with_mesh(dataclasses.replace(config, placement=PlacementConfig()), device_count)


def _compute_dtype(name: str, mesh: jax.sharding.Mesh) -> Any:
    if name == "auto":
        device = mesh.devices.flat[0]
        before_ampere = str(getattr(device, "compute_capability", "")).split(".")[0] in ("5", "6", "7")
        name = "float32" if device.platform == "cpu" or before_ampere else "bfloat16"
    return jnp.dtype(name)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
