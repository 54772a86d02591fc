"""From a prompt to token ids: the chat template, exactly one BOS, and the limit on length."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.columns import Messages, check_prompt
from jaxrl_llm.errors import UserError


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    *,
    system_prompt: str = "",
    apply_chat_template: str = "auto",
    where: str = "The prompt",
) -> tuple[str, bool]:
    """``(text, templated)``: the prompt as the model is to see it.

    A chat always goes through the template; plain text does under ``always``, and under ``auto`` where the
    tokenizer has one, as one user turn. ``system_prompt`` becomes the first turn of a chat that has none.

    Raises:
      UserError: a template is needed and missing, or is not wanted and the prompt is a chat, or fails.
    """
    template = bool(tokenizer.chat_template)
    is_chat = not isinstance(prompt, str)
    if apply_chat_template == "never" or (not template and not is_chat and apply_chat_template == "auto"):
        if is_chat:
            raise UserError(f"{where} is a chat, but data.apply_chat_template = 'never'. Use 'auto', or text prompts.")
        if system_prompt:
            raise UserError(
                f"data.system_prompt = {system_prompt!r} is set, but no chat template is applied that could hold it. "
                "Leave it empty, or use a tokenizer with a chat template."
            )
        return prompt, False
    if not template:
        raise UserError(
            f"{where} needs a chat template (it is a chat, or data.apply_chat_template = 'always'), and the tokenizer "
            "has none. Use prompts that are plain text, or set tokenizer.path to an instruction-tuned model."
        )
    messages = list(prompt) if is_chat else [{"role": "user", "content": prompt}]
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # of a program that came with the tokenizer: whatever it does
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise UserError(f"{where}: the tokenizer's chat template refuses it: {kind}{error}.") from error
    return str(text), True


@functools.lru_cache(maxsize=8)
def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain text is encoded with a BOS in front (the post-processor knows, no flag can be trusted)."""
    return tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    templated: Sequence[bool],
    where: Sequence[str] | None = None,
) -> list[np.ndarray]:
    """Token ids ``[t]`` int32 of each text, with exactly one BOS where the tokenizer uses one.

    A templated text holds all its special tokens already, BOS included if the model wants one there, so nothing
    is added. Plain text gets the BOS that the encoder would add, unless it is written in the text; an EOS that
    the encoder would add is left out, since the text is to be continued. ``where`` names each text in errors.

    Raises:
      UserError: the tokenizer has no token for a part of a text.
    """
    if not texts:
        return []
    encoded = _encode(tokenizer, list(texts), where)
    bos = [tokenizer.bos_token_id] if _adds_bos(tokenizer) else []
    return [
        np.asarray(ids if is_templated or ids[:1] == bos else bos + ids, np.int32)
        for ids, is_templated in zip(encoded, templated, strict=True)
    ]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], where: Sequence[str] | None) -> list[list[int]]:
    try:
        return tokenizer(texts, add_special_tokens=False).input_ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of the tokenizers library: no unknown token, text that is no Unicode, a panic
        if len(texts) > 1:  # which one is it?
            return [
                _encode(tokenizer, [text], None if where is None else [where[index]])[0]
                for index, text in enumerate(texts)
            ]
        name = "The text" if where is None else f"{where[0]}: the text"
        raise UserError(
            f"{name} {texts[0][:80]!r} can't be encoded by the tokenizer: {error}. Remove the characters that it does "
            "not know, or set tokenizer.path to another tokenizer."
        ) from error


def encode_all(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], data: DataConfig
) -> tuple[list[str], list[np.ndarray]]:
    """The texts of prompts (text or chat messages) and their ids, encoded like the rows of a file.

    Raises:
      UserError: a prompt is neither, or has characters that the tokenizer does not know; or there is one text and no
        list.
    """
    if isinstance(prompts, str):
        raise UserError(f"prompts = {prompts!r} is one text; give a list, for example [{prompts!r}].")
    names = [f"Prompt {index}" for index in range(len(prompts))]
    rendered = [
        render_prompt(
            tokenizer,
            check_prompt(prompt, name),
            system_prompt=data.system_prompt,
            apply_chat_template=data.apply_chat_template,
            where=name,
        )
        for name, prompt in zip(names, prompts, strict=True)
    ]
    texts = [text for text, _ in rendered]
    return texts, encode_prompts(tokenizer, texts, [is_templated for _, is_templated in rendered], names)


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str, where: str = "A completion") -> np.ndarray:
    """Token ids ``[t]`` int32 of a completion to imitate, ended by EOS. ``where`` names it in errors.

    Raises:
      UserError: the tokenizer has no EOS token, or no token for a part of the text.
    """
    eos = require_eos(tokenizer)
    return np.asarray([*encode_text(tokenizer, text, where), eos], np.int32)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> list[int]:
    """Token ids of a text as it stands: nothing is added. ``where`` names it in errors."""
    return _encode(tokenizer, [text], [where])[0]


def require_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the token that ends every completion.

    Raises:
      UserError: the tokenizer has none.
    """
    if not isinstance(tokenizer.eos_token_id, int):
        raise UserError(
            "The tokenizer has no EOS token, so completions have no end. Set tokenizer.path to one with it."
        )
    return tokenizer.eos_token_id


def truncate(prompt_ids: np.ndarray, limit: int, side: str, bos_token_id: int | None) -> np.ndarray:
    """Cuts ids ``[t]`` to ``limit``: on the ``left`` (a leading BOS stays) or on the ``right``."""
    if len(prompt_ids) <= limit:
        return prompt_ids
    if side == "right":
        return prompt_ids[:limit]
    if bos_token_id is not None and prompt_ids[0] == bos_token_id and limit > 1:
        return np.concatenate([prompt_ids[:1], prompt_ids[len(prompt_ids) - limit + 1 :]])
    return prompt_ids[len(prompt_ids) - limit :]


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest vocabulary entry: no text of ``n`` tokens is longer than ``n`` times this."""
    return max(len(token) for token in tokenizer.get_vocab())
