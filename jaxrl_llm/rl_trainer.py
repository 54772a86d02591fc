"""`RLTrainer`: a trainer for notebooks and scripts that bring their own prompts and rows."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm import config as configs
from jaxrl_llm import processes
from jaxrl_llm.arguments import checked
from jaxrl_llm.conversation import Chat
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.loading import load_config
from jaxrl_llm.options import set_by_path
from jaxrl_llm.trainer import Trainer
from jaxrl_llm.types import Rollouts

DEFAULT_PROMPT_TOKENS = 512


class RLTrainer:
    """Trains a model step by step, by any algorithm. One that generates takes prompts, and a reward::

        trainer = RLTrainer(
            "builtin:tiny_addition",
            algo="grpo",
            reward=lambda prompt, completion, answer: float(completion == answer),
            rollout_len=8,
            options={"optimizer.learning_rate": 1e-4},
        )
        metrics, rollouts = trainer.step(["37+58=", "4+9="], answers=["95", "13"])

    ``sft`` takes rows with completions, prompt and completion apart or as chats (``messages``)::

        trainer = RLTrainer(
            "builtin:tiny_addition", algo="sft", rollout_len=8, options={"optimizer.learning_rate": 1e-4}
        )
        examples = [{"prompt": "37+58=", "completion": "95"}, {"prompt": "4+9=", "completion": "13"}]
        metrics, _ = trainer.step(examples)

    ``dpo`` and ``reward_model`` take preferences::

        trainer = RLTrainer(
            "builtin:tiny_addition", algo="dpo", rollout_len=8, options={"optimizer.learning_rate": 1e-4}
        )
        examples = [
            {"prompt": "37+58=", "chosen": "95", "rejected": "85"},
            {"prompt": "4+9=", "chosen": "13", "rejected": "3"},
        ]
        metrics, _ = trainer.step(examples)

    ``kto`` takes completions with a label, true where it is desirable::

        trainer = RLTrainer(
            "builtin:tiny_addition", algo="kto", rollout_len=8, options={"optimizer.learning_rate": 1e-4}
        )
        examples = [
            {"prompt": "37+58=", "completion": "95", "label": True},
            {"prompt": "4+9=", "completion": "3", "label": False},
        ]
        metrics, _ = trainer.step(examples)

    Args:
      model: Hugging Face folder, hub id, ``.gguf`` file, ``package:NAME`` or ``builtin:NAME``.
      tokenizer: a path like `model`'s, or a tokenizer; None takes the model's own.
      algo: a name in `jaxrl_llm.algorithms.ALGORITHMS`, or ``path.py:its_name`` of an algorithm of your own.
      reward: ``f(prompt, completion, answer, **metadata) -> float`` per sample, TRL's batched form
        ``f(prompts, completions, **columns) -> list``, a dict of such functions by name (summed),
        or a name of a built-in one. It runs in worker processes, which bounds its time; what it prints or changes
        stays there. Needed by every algorithm that generates and learns from scores.
      train_batch_size: prompts or rows of one optimizer update; a call of `step` may have any number (``kto``: at most
        so many).
      rollout_len: longest completion, in tokens, the end of sequence included.
      workdir: folder for checkpoints and metrics; None keeps nothing.
      options: any other option by its full name, such as ``{"optimizer.learning_rate": 3e-4}``.

    Raises:
      UserError: an option is wrong; nothing has run then.
    """

    @checked
    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        algo: str = "grpo",
        reward: str | Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        *,
        train_batch_size: int = 8,
        rollout_len: int = 64,
        workdir: str | pathlib.Path | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        config = configs.default_config(algo)
        model = os.fspath(model)
        config.model.path = model
        config.tokenizer.path = os.fspath(tokenizer) if isinstance(tokenizer, str | os.PathLike) else ""
        config.train_batch_size = train_batch_size
        config.rollout.max_new_tokens = rollout_len
        context = load_config(model).max_position
        if not 1 <= rollout_len < context:
            raise UserError(
                f"rollout_len={rollout_len}: a completion and at least one prompt token must fit the context of "
                f"{model!r}, {context} tokens. Give 1 to {context - 1}."
            )
        config.data.max_prompt_tokens = max(1, min(DEFAULT_PROMPT_TOKENS, context - rollout_len))
        config.num_steps = 1_000_000  # steps come from the caller; a constant schedule does not look at it
        plain = config.to_dict()
        functions: dict[str, Callable[..., Any]] = {}
        if isinstance(reward, str):
            plain["rewards"] = {reward: {"function": reward}}
        elif reward is not None:
            functions = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
            plain["rewards"] = {name: {} for name in functions}
        for name, value in (options or {}).items():
            set_by_path(plain, name, value)
        resolved = configs.resolve(plain)
        if resolved.placement.staleness:
            raise UserError(
                "placement.staleness = 1 samples the prompts of the next step, and RLTrainer is given them when it "
                "comes. Leave it at 0, or run `python -m jaxrl_llm.main` with data.train."
            )
        self.trainer = Trainer(
            resolved,
            workdir,
            rewards=functions or None,
            tokenizer=tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None,
        )
        self._closed = False
        try:
            self.trainer.restore()
        except BaseException:
            self.trainer.close()  # a notebook goes on after the error, and the folder with it
            raise

    @checked
    def step(self, prompts: Sequence[Any], answers: Sequence[Any] | None = None) -> tuple[dict[str, float], Rollouts]:
        """Learns from `prompts`, once: generates and scores them first, where the algorithm does.

        Args:
          prompts: text or chat messages; for ``sft``, ``dpo``, ``kto`` and ``reward_model`` rows, dicts by TRL's
            columns: see the class.
          answers: one for each prompt, for the reward.

        Returns:
          The step's metrics by name and its rollouts (texts, token ids, rewards, components).

        Raises:
          UserError: a prompt is empty or too long, a row lacks a column, the trainer is closed.
          RunStopped: the step computed something that is not finite, or decoder and trainer disagree.
        """
        self._refuse_if_closed()
        algorithm = self.trainer.algorithm
        if algorithm.data == "prompt":
            examples = self.trainer.examples(prompts, answers)
        elif answers is None:
            examples = self.trainer.examples_of_rows(prompts)
        else:
            raise UserError(f"answers go with prompts, and {algorithm.name} learns from rows: leave answers out.")
        metrics, rollouts = self.trainer.step(examples)
        with processes.agreement():
            self.trainer.log.write(self.trainer.step_index, metrics, rollouts)
        return metrics, rollouts

    @checked
    def generate(self, prompts: Sequence[Any]) -> list[list[str]]:
        """`rollout.samples_per_prompt` completions of each prompt (never rows) under the current parameters."""
        return self.trainer.generate(prompts)

    def chat(self) -> Chat:
        """A conversation with the current policy; after a `step` it goes on with the new one."""
        return Chat(self.trainer)

    def save(self) -> None:
        """Saves a checkpoint into `workdir`; the same `RLTrainer` call continues from it.

        Raises:
          UserError: there is no `workdir`, or the trainer is closed.
        """
        self._refuse_if_closed()
        if self.trainer.workdir is None:
            raise UserError(
                "There is no folder to save into: give RLTrainer workdir=FOLDER. export(FOLDER) writes the model alone."
            )
        self.trainer.save({})

    @checked
    def export(self, folder: str | pathlib.Path, *, role: str = "", overwrite: bool = False) -> None:
        """Writes the current model as a Hugging Face folder, a reward model as a classifier; `role`: an agent of
        ``ippo`` other than the first, such as ``policy_1``."""
        self.trainer.export(folder, role=role, overwrite=overwrite)

    def close(self) -> None:
        """Waits for saves and ends the reward workers."""
        self._closed = True
        self.trainer.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UserError("This trainer is closed. Make another; with its workdir that goes on from what was saved.")

    def __enter__(self) -> RLTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
