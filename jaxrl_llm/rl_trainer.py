"""`RLTrainer`: a trainer for notebooks and scripts that bring their own prompts."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import find_algorithm
from jaxrl_llm.conversation import Chat
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.loading import load_config
from jaxrl_llm.options import set_by_path
from jaxrl_llm.trainer import Trainer
from jaxrl_llm.types import Rollouts

DEFAULT_PROMPT_TOKENS = 512


class RLTrainer:
    """Trains a model on prompts given step by step::

        trainer = RLTrainer(model="builtin:tiny_addition", reward=lambda prompt, completion, answer: ...)
        metrics, rollouts = trainer.step(["37+58=", "4+9="], answers=["95", "13"])

    Args:
      model: Hugging Face folder, hub id, ``.gguf`` file, ``package:NAME`` or ``builtin:NAME``.
      tokenizer: a path like `model`'s, or a tokenizer; None takes the model's own.
      algo: a name in `jaxrl_llm.algorithms.ALGORITHMS` that generates.
      reward: ``f(prompt, completion, answer, **metadata) -> float`` per sample, TRL's batched form
        ``f(prompts, completions, **columns) -> list``, a dict of such functions by name (summed),
        or a name of a built-in one. It runs in worker processes, which bounds its time; what it prints or changes
        stays there. Needed by every algorithm that generates.
      train_batch_size: prompts of one optimizer update; a call of `step` may have any number of prompts.
      rollout_len: longest completion, in tokens.
      workdir: folder for checkpoints and metrics; None keeps nothing.
      options: any other option by its full name, such as ``{"optimizer.learning_rate": 3e-4}``.

    Raises:
      UserError: an option is wrong; nothing has run then.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        algo: str = "grpo",
        reward: str | Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        *,
        train_batch_size: int = 8,
        rollout_len: int = 64,
        workdir: str | pathlib.Path | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        config = configs.default_config(algo)
        config.model.path = model
        config.tokenizer.path = tokenizer if isinstance(tokenizer, str) else ""
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
        functions: dict[str, Callable[..., Any]] = {}
        if isinstance(reward, str):
            config.rewards = {reward: {"function": reward}}
        elif reward is not None:
            functions = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
            config.rewards = {name: {} for name in functions}
        plain = config.to_dict()
        for name, value in (options or {}).items():
            set_by_path(plain, name, value)
        resolved = configs.resolve(plain)
        if not find_algorithm(resolved.algorithm.name).generates:
            raise UserError(
                f"algo={algo!r} learns from completions that its data holds, and RLTrainer brings prompts alone: "
                "choose one that generates, such as 'grpo' or 'ppo', or run this one with `python -m jaxrl_llm.main` "
                f"and data.train (configs/tiny_{algo}.py shows how)."
            )
        self.trainer = Trainer(
            resolved,
            workdir,
            rewards=functions or None,
            tokenizer=None if tokenizer is None or isinstance(tokenizer, str) else tokenizer,
        )
        self.trainer.restore()

    def step(self, prompts: Sequence[Any], answers: Sequence[Any] | None = None) -> tuple[dict[str, float], Rollouts]:
        """Generates, scores and learns from `prompts` (text or chat messages), once.

        Returns:
          The step's metrics by name and its rollouts (texts, token ids, rewards, components).

        Raises:
          UserError: a prompt is empty or too long.
          RunStopped: the step computed something that is not finite, or decoder and trainer disagree.
        """
        metrics, rollouts = self.trainer.step(self.trainer.examples(prompts, answers))
        self.trainer.log.write(self.trainer.step_index, metrics, rollouts)
        return metrics, rollouts

    def generate(self, prompts: Sequence[Any]) -> list[list[str]]:
        """`rollout.samples_per_prompt` completions of each prompt under the current parameters."""
        return self.trainer.generate(prompts)

    def chat(self) -> Chat:
        """A conversation with the current policy; after a `step` it goes on with the new one."""
        return Chat(self.trainer)

    def save(self) -> None:
        """Saves a checkpoint into `workdir`; the same `RLTrainer` call continues from it."""
        self.trainer.save({})

    def export(self, folder: str | pathlib.Path, *, overwrite: bool = False) -> None:
        """Writes the current policy as a Hugging Face folder."""
        self.trainer.export(folder, overwrite=overwrite)

    def close(self) -> None:
        """Waits for saves and ends the reward workers."""
        self.trainer.close()

    def __enter__(self) -> RLTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
