"""What a reward model reads: a prompt and a completion as its own tokenizer and template put them, within a limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.columns import Messages, check_prompt
from jaxrl_llm.data.prompts import encode_prompts, encode_text
from jaxrl_llm.errors import UserError

TEMPLATES = ("auto", "chat", "pair", "concat")


@dataclasses.dataclass(frozen=True)
class ScoreInput:
    """One text of a reward model.

    Attributes:
      token_ids: ``[t]`` int32, special tokens included, at most the limit.
      token_types: ``[t]`` int32; 1 in the second text of a pair.
      cut_prompt_tokens, cut_completion_tokens: how many were left out to keep the limit.
    """

    token_ids: np.ndarray
    token_types: np.ndarray
    cut_prompt_tokens: int = 0
    cut_completion_tokens: int = 0


def choose_template(tokenizer: PreTrainedTokenizerBase, template: str, *, is_encoder: bool) -> str:
    """``chat``, ``pair`` or ``concat``: what ``template`` means for this model.

    ``auto`` is ``chat`` where the tokenizer has a chat template, else ``pair`` for encoders and ``concat`` for
    decoders.

    Raises:
      UserError: it is unknown, or ``chat`` and the tokenizer has no template.
    """
    if template not in TEMPLATES:
        raise UserError(f"The reward model's template is {template!r}; allowed: {', '.join(map(repr, TEMPLATES))}.")
    if template == "chat" and not tokenizer.chat_template:
        raise UserError(
            "The reward model's template is 'chat', but its tokenizer has no chat template. Use 'pair' (a BERT-style "
            "pair of texts) or 'concat' (prompt and completion as one text)."
        )
    if template != "auto":
        return template
    if tokenizer.chat_template:
        return "chat"
    return "pair" if is_encoder else "concat"


def score_inputs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    completions: Sequence[str],
    *,
    template: str,
    max_tokens: int,
    end_token_id: int | None = None,
) -> list[ScoreInput]:
    """The token ids of each prompt with its completion.

    ``chat``: the chat with the completion as the assistant's turn (a plain prompt is one user turn), with the special
    tokens that the template writes and no others. ``pair``: two texts, as the tokenizer joins them. ``concat``: one
    text, the prompt and right after it the completion. In the last two a chat is the contents of its turns, a line
    each, and the tokenizer adds its special tokens.

    A model that was trained to score at an end token (``end_token_id``, not with ``pair``) reads what a policy's
    training reads: the prompt up to where the answer begins, the completion's tokens, and that token.

    A text that is too long loses the beginning of its prompt, and of its completion once the prompt is used up; the
    special tokens that the tokenizer adds, a leading BOS, and the end stay.

    Raises:
      UserError: a prompt is neither text nor chat; the template refuses a chat; the tokenizer has no token for a part
        of a text.
    """
    if not prompts:
        return []
    chats = [check_prompt(prompt, f"Prompt {index}") for index, prompt in enumerate(prompts)]
    if end_token_id is not None and template != "pair":
        return _ended(tokenizer, chats, completions, template == "chat", max_tokens, end_token_id)
    if template == "chat":
        texts = [_render(tokenizer, chat, text) for chat, text in zip(chats, completions, strict=True)]
        encoded = _encode(tokenizer, texts, add_special_tokens=False)
    elif template == "pair":
        texts = [_plain(chat) for chat in chats]
        encoded = _encode(tokenizer, texts, list(completions))
    else:
        texts = [_plain(chat) + text for chat, text in zip(chats, completions, strict=True)]
        encoded = _encode(tokenizer, texts)
    inputs = []
    for encoding, chat, text in zip(encoded, chats, texts, strict=True):
        ids, types = np.asarray(encoding.ids, np.int32), np.asarray(encoding.type_ids, np.int32)
        if len(ids) <= max_tokens:
            inputs.append(ScoreInput(ids, types))
            continue
        border = None
        if template == "chat":  # as far as the template lets one tell
            border = _common_prefix(text, _render(tokenizer, chat, None))
        elif template == "concat":
            border = len(_plain(chat))
        inputs.append(_cut(ids, types, _sides(encoding, border, _bos(tokenizer)), max_tokens))
    return inputs


def _ended(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[str | Messages],
    completions: Sequence[str],
    templated: bool,
    max_tokens: int,
    end_token_id: int,
) -> list[ScoreInput]:
    """Prompts and completions encoded apart, as the rows of a data set are, and the end token."""
    texts = [_render(tokenizer, chat, None) if templated else _plain(chat) for chat in chats]
    inputs = []
    encoded = encode_prompts(tokenizer, texts, [templated] * len(texts))
    for index, (prompt, text) in enumerate(zip(encoded, completions, strict=True)):
        completion = encode_text(tokenizer, text, f"Completion {index}")
        ids = np.asarray([*prompt, *completion, end_token_id], np.int32)
        sides = np.repeat([0, 1, -1], [len(prompt), len(completion), 1])
        if ids[0] == _bos(tokenizer):
            sides[0] = -1
        types = np.zeros(len(ids), np.int32)
        inputs.append(ScoreInput(ids, types) if len(ids) <= max_tokens else _cut(ids, types, sides, max_tokens))
    return inputs


def _common_prefix(one: str, two: str) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _render(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, completion: str | None) -> str:
    """The chat with the completion; without one, up to where the template begins the assistant's turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    turns = messages if completion is None else [*messages, {"role": "assistant", "content": completion}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=completion is None))
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise UserError(
            f"The chat template of the reward model's tokenizer refuses the chat that begins {str(messages)[:120]!r}: "
            f"{error}. Set template to 'concat', or change the prompts."
        ) from error


def _bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    return tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else None


def _plain(prompt: str | Messages) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content", "")) for message in prompt)


def _encode(tokenizer: PreTrainedTokenizerBase, *texts: list[str], **options: Any) -> list[Any]:
    """The ``tokenizers.Encoding`` of each text or pair; not cut, whatever the tokenizer's own limit."""
    try:
        encode: Any = tokenizer  # its signature names each text
        return list(encode(*texts, truncation=False, padding=False, verbose=False, **options).encodings or [])
    except Exception as error:  # of the tokenizers library: no unknown token, text that is no Unicode
        raise UserError(
            f"A text of {len(texts[0])} can't be encoded by the reward model's tokenizer: {error}. Remove the "
            "characters that it does not know."
        ) from error


def _sides(encoding: Any, border: int | None, bos_token_id: int | None) -> np.ndarray:
    """Per token: 0 of the prompt, 1 of the completion and what a template writes after it, -1 never cut.

    Where both are one text, ``border`` is the character at which the completion begins.
    """
    sides = np.array([-1 if side is None else side for side in encoding.sequence_ids], np.int32)
    if border is not None:
        ends = np.array([end for _, end in encoding.offsets], np.int64)
        sides = np.where(sides < 0, -1, (ends > border).astype(np.int32))
    if bos_token_id is not None and encoding.ids[:1] == [bos_token_id]:
        sides[0] = -1
    return sides


def _cut(ids: np.ndarray, types: np.ndarray, sides: np.ndarray, max_tokens: int) -> ScoreInput:
    excess = len(ids) - max_tokens
    prompt, completion = np.flatnonzero(sides == 0), np.flatnonzero(sides == 1)
    cut = np.concatenate([prompt, completion])[:excess]
    if len(cut) < excess:
        raise UserError(
            f"The reward model's max_tokens is {max_tokens}, too few for the "
            f"{len(ids) - len(prompt) - len(completion)} special tokens of a text. Raise it."
        )
    of_prompt = min(excess, len(prompt))
    return ScoreInput(np.delete(ids, cut), np.delete(types, cut), of_prompt, excess - of_prompt)
