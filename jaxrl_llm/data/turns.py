"""A chat with several turns of the assistant: its token ids, and which of them the assistant wrote.

Two ways, both exact. A template that marks the assistant's text (``{% generation %}``) says it itself. Any other is
rendered up to the beginning and up to the end of each of these turns: what is between is the assistant's, provided
that each rendering begins with the one before it. A template that writes a turn in another way once others follow
(as some do with reasoning) fails that test and is refused, since no mask would be right then.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.columns import Messages
from jaxrl_llm.data.prompts import encode_text, require_eos
from jaxrl_llm.errors import UserError

MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class EncodedTurns(NamedTuple):
    """A chat as ids ``[t]`` int32: what stands before the first turn of the assistant, and all that follows.

    Attributes:
      response_mask: bool, True where the assistant wrote the token of ``response_ids``; the first and the last are.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    response_mask: np.ndarray


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, system_prompt: str = "", where: str = "The chat"
) -> EncodedTurns:
    """Encodes a chat that ends with a turn of the assistant, all of whose turns are trained.

    A turn of the assistant counts from its first token to its EOS, where the template writes one; what follows that
    does not count, unless the template marks it. The last turn always ends in EOS, like every completion. Without
    ``{% generation %}`` each turn is encoded for itself, as it is when the model writes it, so that no token spans a
    border of the mask.

    Raises:
      UserError: the tokenizer has no template or no EOS; the template refuses the chat, or is of neither kind.
    """
    eos = require_eos(tokenizer)
    if not tokenizer.chat_template:
        raise UserError(
            f"{where} is a chat, and the tokenizer has no chat template. Use prompts that are plain text, or set "
            "tokenizer.path to an instruction-tuned model."
        )
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    encode = _marked if MARKS_GENERATION.search(str(tokenizer.chat_template)) else _by_prefixes
    ids, mask = encode(tokenizer, messages, eos, where)
    trained = np.flatnonzero(mask)
    if not len(trained) or not trained[0]:
        raise UserError(f"{where}: the chat template writes none of the assistant's turns, or nothing before them.")
    first, end = trained[0], trained[-1] + 1
    last_turn = np.flatnonzero(~mask[:end])[-1] + 1
    ended = np.flatnonzero(ids[last_turn:end] == eos)
    if len(ended):
        end = last_turn + ended[-1] + 1
    response, counted = ids[first:end], mask[first:end]
    if not len(ended):
        response, counted = np.append(response, np.int32(eos)), np.append(counted, True)
    return EncodedTurns(ids[:first], response, counted)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, where: str, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # of jinja2, of the template's own code, of the tokenizers library
        raise UserError(
            f"{where}: the tokenizer's chat template refuses it, or has text without tokens: {error}."
        ) from error


def _marked(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, eos: int, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """What the template marks, and the EOS behind it where the template's mark ends before that."""
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    encoded = _render(tokenizer, messages, where, **options)
    ids, mask = np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["assistant_masks"], bool)
    mask[1:] |= mask[:-1] & (ids[1:] == eos) & (ids[:-1] != eos)
    return ids, mask


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, eos: int, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """What the template writes between the header of each turn of the assistant and the next turn, up to EOS."""
    ids: list[int] = []
    mask: list[bool] = []
    done = ""
    for number, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before = str(_render(tokenizer, messages[:number], where, tokenize=False, add_generation_prompt=True))
        after = str(_render(tokenizer, messages[: number + 1], where, tokenize=False))
        for text, written in ((before, False), (after, True)):
            if not text.startswith(done):
                raise UserError(
                    f"{where}: the tokenizer's chat template writes the turns up to number {number} in another way "
                    "when the next one follows (or is about to), so that the assistant's tokens can't be told from "
                    "the others. Use a template that marks them with {% generation %}, or rows with one turn of the "
                    "assistant each (columns prompt and completion)."
                )
            added = encode_text(tokenizer, text[len(done) :], where)
            counted = added.index(eos) + 1 if eos in added else len(added)
            ids += added
            mask += [written and place < counted for place in range(len(added))]
            done = text
    return np.asarray(ids, np.int32), np.asarray(mask, bool)
