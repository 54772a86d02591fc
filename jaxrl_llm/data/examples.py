"""From a data file to tokenized examples: reads, maps, renders, encodes, and applies the limit on length."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.columns import Kind, Record, map_row
from jaxrl_llm.data.prompts import encode_prompts, encode_response, longest_token, render_prompt, truncate
from jaxrl_llm.data.sources import Row, iterate_rows
from jaxrl_llm.data.turns import encode_turns
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Example

log = logging.getLogger(__name__)

ENCODE_ROWS = 1000  # rows handed to the tokenizer at once
NAMED_ROWS = 5  # how many rows a message lists


def fingerprint(examples: Iterable[Example]) -> int:
    """A number that differs where the token ids of the rows or their order do."""
    found = 0
    for example in examples:
        for ids in (example.prompt_ids, example.response_ids, example.rejected_ids):
            found = zlib.crc32(b"-" if ids is None else ids.tobytes(), found)
    return found


@dataclasses.dataclass(frozen=True)
class LengthLimit:
    """What happens to rows that are too long.

    Attributes:
      max_prompt_tokens: longest prompt.
      max_response_tokens: longest completion, EOS included; None for no limit. A pair is too long where one of its
        two completions is.
      rule: ``filter``, ``truncate_left``, ``truncate_right`` (which side of the prompt is cut; a completion
        always loses its end) or ``error``.
    """

    max_prompt_tokens: int
    max_response_tokens: int | None
    rule: str

    @property
    def truncates(self) -> bool:
        return self.rule.startswith("truncate_")

    @property
    def told(self) -> str:
        """What a row beyond the limits is, for messages."""
        text = f"longer than data.max_prompt_tokens = {self.max_prompt_tokens}"
        if self.max_response_tokens is not None:
            text += f" (or the completion than rollout.max_new_tokens = {self.max_response_tokens})"
        return text

    def exceeded_by(self, example: Example) -> bool:
        responses, limit = (example.response_ids, example.rejected_ids), self.max_response_tokens
        long_response = limit is not None and any(ids is not None and len(ids) > limit for ids in responses)
        return len(example.prompt_ids) > self.max_prompt_tokens or long_response

    def cut(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> Example:
        """The example within the limits; its prompt text is what is left of it."""
        side = self.rule.removeprefix("truncate_")
        bos = tokenizer.bos_token_id if isinstance(tokenizer.bos_token_id, int) else None
        ids = truncate(example.prompt_ids, self.max_prompt_tokens, side, bos)
        text = example.prompt if len(ids) == len(example.prompt_ids) else tokenizer.decode(ids)
        values = {name: getattr(example, name) for name in ("response_ids", "response_mask", "rejected_ids")}
        values = {name: None if value is None else value[: self.max_response_tokens] for name, value in values.items()}
        return dataclasses.replace(example, prompt=text, prompt_ids=ids, **values)


def load_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    max_prompt_tokens: int,
    max_response_tokens: int | None = None,
    kind: Kind = "prompt",
) -> tuple[list[Example], dict[str, int]]:
    """Reads and encodes ``path`` and applies ``config.overlong_prompts``.

    ``kind`` is what the algorithm needs of a row (`columns.map_row`) and fixes which fields of the examples are there:
    ``prompt``: none; ``completion``: ``response_ids``, and ``response_mask`` for a chat with several turns of the
    assistant; ``preference``: ``response_ids`` (chosen) and ``rejected_ids``; ``label``: ``response_ids`` and
    ``label``.

    Returns the examples in file order, and the counts ``rows`` (read), ``kept``, ``filtered``, ``truncated`` and, of
    pairs, ``equal`` (whose completions are the same tokens, after the cut). One warning says how many rows were left
    out or cut, and names the first; one more does so for equal pairs.

    Raises:
      UserError: no row, none left after the filter, an overlong row under ``error``, a row of the wrong form, no pair
        whose completions differ.
    """
    limit = LengthLimit(max_prompt_tokens, max_response_tokens, config.overlong_prompts)
    rows = enumerate(iterate_rows(path))
    kept: list[Example] = []
    overlong: list[int] = []
    num_rows = 0
    while chunk := list(itertools.islice(rows, ENCODE_ROWS)):
        num_rows += len(chunk)
        where = [f"{path}, row {index}" for index, _ in chunk]
        for example in _encode(config, tokenizer, where, chunk, limit, kind):
            if limit.exceeded_by(example):
                overlong.append(example.row)
                if not limit.truncates:
                    continue
                example = limit.cut(example, tokenizer)
            kept.append(example)
    if not num_rows:
        raise UserError(f"The data file {path} holds no rows. Set data.train or data.eval to one that has some.")
    _report(path, limit, overlong, num_rows)
    if not kept:
        raise UserError(
            f"All {num_rows} rows of {path} are {limit.told}, and data.overlong_prompts = 'filter' leaves none. Raise "
            "the limit or choose 'truncate_left'."
        )
    equal = _report_equal(path, kept)
    truncated = len(overlong) if limit.truncates else 0
    counts = {"rows": num_rows, "kept": len(kept), "filtered": num_rows - len(kept), "truncated": truncated}
    return kept, {**counts, "equal": equal} if kind == "preference" else counts


def encode_rows(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_response_tokens: int | None = None,
    kind: Kind = "prompt",
) -> list[Example]:
    """Rows that a caller brings, encoded like those of a file; none is left out. ``kind`` as in `load_examples`.

    Raises:
      UserError: a row of the wrong form, or one that is too long where ``config.overlong_prompts`` doesn't cut it; no
        pair whose completions differ.
    """
    limit = LengthLimit(config.max_prompt_tokens, max_response_tokens, config.overlong_prompts)
    where = [f"Example {index}" for index in range(len(rows))]
    found = []
    for name, example in zip(where, _encode(config, tokenizer, where, list(enumerate(rows)), limit, kind), strict=True):
        if limit.exceeded_by(example):
            if not limit.truncates:
                raise UserError(f"{name} is {limit.told}. Shorten it, or raise the limit.")
            example = limit.cut(example, tokenizer)
        found.append(example)
    _report_equal("the examples", found)
    return found


def _encode(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    where: list[str],
    rows: list[tuple[int, Row]],
    limit: LengthLimit,
    kind: Kind,
) -> Iterable[Example]:
    records: list[Record] = []
    texts: list[str] = []
    templated: list[bool] = []
    # A text beyond this can't fit, whatever its tokens, and is cut before it can stall the tokenizer. The factor
    # leaves room for tokenizers that drop whitespace.
    longest_text = 2 * longest_token(tokenizer) * (limit.max_prompt_tokens + 1)
    for name, (_, row) in zip(where, rows, strict=True):
        record = map_row(row, name, prompt_column=config.prompt_column, answer_column=config.answer_column, kind=kind)
        text, is_templated = render_prompt(
            tokenizer,
            record.prompt,
            system_prompt=config.system_prompt,
            apply_chat_template=config.apply_chat_template,
            where=f"{name}: the prompt",
        )
        records.append(record)
        texts.append(text[-longest_text:] if limit.rule == "truncate_left" else text[:longest_text])
        templated.append(is_templated)
    encoded = encode_prompts(tokenizer, texts, templated, where)
    for name, (index, _), record, text, ids in zip(where, rows, records, texts, encoded, strict=True):
        example = Example(
            uid=f"{index}@0",
            prompt=text,
            prompt_ids=ids,
            answer=record.answer,
            metadata=record.metadata,
            question=record.prompt,
            row=index,
        )
        yield example if kind == "prompt" else _with_completions(example, record, tokenizer, config.system_prompt, name)


def _with_completions(
    example: Example, record: Record, tokenizer: PreTrainedTokenizerBase, system_prompt: str, where: str
) -> Example:
    """The example with what its row has beside a prompt."""
    if record.turns is not None:
        turns = encode_turns(tokenizer, record.turns, system_prompt=system_prompt, where=f"{where}: the chat")
        return dataclasses.replace(
            example,
            prompt_ids=turns.prompt_ids,
            response_ids=turns.response_ids,
            response_mask=turns.response_mask,
        )
    response, rejected = (
        None if text is None else encode_response(tokenizer, text, where)
        for text in (record.completion, record.rejected)
    )
    return dataclasses.replace(example, response_ids=response, rejected_ids=rejected, label=record.label)


def _report(path: str, limit: LengthLimit, overlong: list[int], num_rows: int) -> None:
    """One message for all rows; it is an error under the rule ``error``."""
    if not overlong:
        return
    text = f"{len(overlong)} of {num_rows} rows of {path} are {limit.told}: row {_named(overlong)}"
    if limit.rule == "error":
        raise UserError(f"{text}. data.overlong_prompts = 'error' refuses them; 'filter' leaves them out.")
    action = "They are left out" if limit.rule == "filter" else f"They are cut ({limit.rule})"
    if limit.rule == "truncate_right":
        action += ", so the end of the prompt is gone, the header of the assistant's turn included"
    log.warning("%s. %s.", text, action)


def _report_equal(source: str, examples: Sequence[Example]) -> int:
    """How many pairs prefer a completion to itself, in one message: an error where all do."""
    equal = [
        example.row
        for example in examples
        if example.rejected_ids is not None
        and example.response_ids is not None
        and np.array_equal(example.rejected_ids, example.response_ids)
    ]
    if not equal:
        return 0
    text = (
        f"chosen and rejected are the same tokens in {len(equal)} of {len(examples)} pairs of {source}: "
        f"row {_named(equal)}"
    )
    if len(equal) == len(examples):
        raise UserError(
            f"{text}. There is nothing to learn from them. Look at the two columns, and where completions are cut "
            "(data.overlong_prompts) at rollout.max_new_tokens."
        )
    log.warning("%s. Nothing is learned from these, but they count in the means of their batches.", text)
    return len(equal)


def _named(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:NAMED_ROWS])) + (", …" if len(rows) > NAMED_ROWS else "")
