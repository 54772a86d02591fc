"""Completions from a model in one call, by the engine that training uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm import config as configs
from jaxrl_llm.arguments import checked
from jaxrl_llm.conversation import Chat
from jaxrl_llm.data.prompts import encode_all
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.loading import load_config
from jaxrl_llm.options import set_by_path
from jaxrl_llm.trainer import Trainer
from jaxrl_llm.types import Completion

DEFAULT_NEW_TOKENS = 256
DEFAULT_CONTEXT = 4096
"""Most tokens of a conversation, where the model has room for so many."""


@checked
def generate(
    model: str | os.PathLike[str],
    prompts: Sequence[Any],
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    max_new_tokens: int | None = None,
    samples_per_prompt: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    on_text: Callable[[int, int, str], None] | None = None,
) -> list[list[Completion]]:
    """Loads a model and completes prompts with continuous batching, on all devices.

    One call loads the model anew: give it all prompts at once, or use `RLTrainer.generate`.

    Args:
      model: Hugging Face folder, hub id, ``.gguf`` file, ``package:NAME`` or ``builtin:NAME``.
      prompts: texts, or chats as lists of ``{"role": …, "content": …}``.
      tokenizer: where it is, or one that is loaded; None is the model's.
      max_new_tokens: longest completion, the end-of-sequence token included; None is 256, or what the model's context
        leaves behind the longest prompt.
      temperature: 0 is greedy.
      options: any other option by its full name, such as ``{"rollout.top_p": 0.9, "rollout.num_slots": 16}``.
      on_text: called with (prompt, sample, new text) as completions grow.

    Returns:
      For each prompt its completions: text, token ids, their log-probabilities, and why each ended.

    Raises:
      UserError: an option is wrong, or a prompt does not fit.

    Example::

        for (completion,) in jaxrl_llm.generate("builtin:tiny_addition", ["37+58=", "4+9="], temperature=0.0):
            print(completion.text)
    """
    model = os.fspath(model)
    if len(prompts) == 0:
        raise UserError("There is no prompt: give at least one.")
    plain = _options(
        model,
        tokenizer,
        1 if max_new_tokens is None else max_new_tokens,
        samples_per_prompt,
        temperature,
        seed,
        options,
    )
    resolved = configs.resolve(plain, training=False)
    given = _given(tokenizer)
    loaded = load_tokenizer(resolved.tokenizer.path) if given is None else given
    # The cache is made for the longest prompt, and for as many sequences as there are.
    _, encoded = encode_all(loaded, prompts, resolved.data)
    longest, rollout = max(map(len, encoded)), resolved.rollout
    context = load_config(model).max_position
    if longest + rollout.max_new_tokens > context:
        raise UserError(
            f"The longest prompt has {longest} tokens, which with max_new_tokens={rollout.max_new_tokens} is more than "
            f"the context of {model!r}, {context} tokens. Shorten one of them."
        )
    if max_new_tokens is None and "rollout.max_new_tokens" not in (options or {}):
        plain["rollout"]["max_new_tokens"] = min(DEFAULT_NEW_TOKENS, context - longest)
    if "data.max_prompt_tokens" not in (options or {}):
        plain["data"]["max_prompt_tokens"] = max(longest, 1)
    plain["rollout"]["num_slots"] = min(rollout.num_slots, max(1, len(prompts) * rollout.samples_per_prompt))
    trainer = Trainer(configs.resolve(plain, training=False), read_only=True, tokenizer=loaded)
    with contextlib.closing(trainer):
        return trainer.complete(prompts, on_text)


@checked
def chat(
    model: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Chat:
    """Loads a model and begins a conversation with it, of which each turn computes only what is new.

    Args:
      model, tokenizer, temperature: as in `generate`.
      max_new_tokens: of one answer; None is 256, or a quarter of the conversation if that is less.
      options: as in `generate`. ``data.max_prompt_tokens`` bounds the conversation; by default it has, with the last
        answer, 4,096 tokens or the model's context.

    Raises:
      UserError: an option is wrong.

    Example::

        with jaxrl_llm.chat("HuggingFaceTB/SmolLM2-135M-Instruct") as chat:
            print(chat.say("Name a river.").text)
            print(chat.say("Where does it end?").text)
    """
    model = os.fspath(model)
    count = 1 if max_new_tokens is None else max_new_tokens
    plain = _options(model, tokenizer, count, 1, temperature, seed, options)
    given = configs.resolve(plain, training=False).rollout  # before anything is computed from a wrong option
    context = min(load_config(model).max_position, DEFAULT_CONTEXT)
    count = given.max_new_tokens
    if max_new_tokens is None and "rollout.max_new_tokens" not in (options or {}):
        count = min(DEFAULT_NEW_TOKENS, max(1, context // 4))
    plain["rollout"] |= {"samples_per_prompt": 1, "max_new_tokens": count}
    if "rollout.num_slots" not in (options or {}):
        plain["rollout"]["num_slots"] = 1
    if "data.max_prompt_tokens" not in (options or {}):
        plain["data"]["max_prompt_tokens"] = max(context - count, 1)
    resolved = configs.resolve(plain, training=False)
    return Chat(Trainer(resolved, read_only=True, tokenizer=_given(tokenizer)), own=True)


def _given(tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer itself, where it is not named by its path."""
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def _options(
    model: str,
    tokenizer: Any,
    max_new_tokens: int,
    samples_per_prompt: int,
    temperature: float,
    seed: int,
    options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A configuration to be resolved; ``options`` by name come last."""
    config = configs.default_config("grpo")
    config.model.path = model
    config.tokenizer.path = os.fspath(tokenizer) if isinstance(tokenizer, str | os.PathLike) else ""
    config.seed = seed
    config.rollout.max_new_tokens = max_new_tokens
    config.rollout.samples_per_prompt = samples_per_prompt
    config.rollout.temperature = temperature
    plain = config.to_dict()
    for name, value in (options or {}).items():
        set_by_path(plain, name, value)
    return plain
