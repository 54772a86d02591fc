"""Which column of a row is what: one mapping for verl's, TRL's, GSM8K's and plain files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError

Messages = list[dict[str, Any]]

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target")
RESERVED = ("prompt", "completion", "answer")  # names that reward functions get from elsewhere


@dataclasses.dataclass(frozen=True)
class Record:
    """A row before tokenization.

    Attributes:
      prompt: text, or the chat so far as a list of ``{"role", "content"}``.
      answer: what rewards compare with; None where the row has none.
      completion: text to imitate; None where the row has none.
      metadata: the other columns, for rewards; the names prompt, completion and answer never appear.
    """

    prompt: str | Messages
    answer: Any
    completion: str | None
    metadata: dict[str, Any]


def final_answer(text: str) -> str:
    """GSM8K's answer: what follows the last ``####``, thousands commas removed."""
    return text.rpartition("####")[2].strip().replace(",", "")


def map_row(row: Mapping[str, Any], where: str, *, prompt_column: str = "", answer_column: str = "") -> Record:
    """Reads one row. ``where`` names it in errors (file and index).

    The prompt is ``prompt_column``, or the first of ``PROMPT_COLUMNS`` that the row has; the answer is
    ``answer_column``, else ``reward_model.ground_truth`` (verl), else the first of ``ANSWER_COLUMNS``. A chat
    that ends in an assistant's turn gives that turn as the completion; so does a column ``completion``. A
    ``question`` whose answer has a ``####`` line (GSM8K) is answered by what follows it, the whole solution being
    the completion. Every other column is metadata.

    Raises:
      UserError: no prompt, or one of the wrong form.
    """
    name = prompt_column or next((column for column in PROMPT_COLUMNS if column in row), "")
    if name not in row:
        wanted = f"the column data.prompt_column = {name!r}" if name else f"one of {', '.join(PROMPT_COLUMNS)}"
        raise UserError(f"{where} has the columns {', '.join(row)}; {wanted} is needed for the prompt.")
    prompt, completion = check_prompt(row[name], f"{where}: the prompt in column {name!r}"), row.get("completion")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        completion = prompt[-1]["content"] if completion is None else completion
        prompt = prompt[:-1]
        if not prompt:
            raise UserError(f"{where}: the chat in column {name!r} has no turn before the assistant's.")
    completion = _completion_text(completion, where)

    answer, used = _answer(row, where, answer_column)
    if used != "reward_model" and isinstance(answer, str) and name == "question" and "####" in answer:
        completion = answer if completion is None else completion
        answer = final_answer(answer)
    if answer is None and used is None:
        answer = completion
    metadata = {k: v for k, v in row.items() if k not in (name, *RESERVED) and (k != used or k == "reward_model")}
    return Record(prompt, answer, completion, metadata)


def _answer(row: Mapping[str, Any], where: str, column: str) -> tuple[Any, str | None]:
    """The answer and the column that it came from."""
    if column:
        if column not in row:
            raise UserError(f"{where} has no column data.answer_column = {column!r}, only {', '.join(row)}.")
        return row[column], column
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"], "reward_model"
    used = next((name for name in ANSWER_COLUMNS if name in row), None)
    return (row[used], used) if used else (None, None)


def check_prompt(value: Any, where: str) -> str | Messages:
    """``value`` if it is a prompt.

    Raises:
      UserError: it is neither a text nor messages. ``where`` is the message's subject.
    """
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        # Parquet fills absent fields of a struct with None; templates ask whether a key is there.
        return [{k: v for k, v in turn.items() if v is not None} for turn in value]
    shown = repr(value)
    raise UserError(
        f"{where} is {shown[:80]}{'…' if len(shown) > 80 else ''}; a non-empty "
        "text or a list of messages {'role': …, 'content': …} is needed."
    )


def _completion_text(value: Any, where: str) -> str | None:
    """TRL also writes a completion as a chat of one assistant turn."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content")
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"{where}: the completion is a {type(value).__name__}; a text or one assistant turn is needed.")
