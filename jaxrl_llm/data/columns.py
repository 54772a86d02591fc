"""Which column of a row is what: one mapping for verl's, TRL's, GSM8K's and plain files."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, Literal, cast

from jaxrl_llm.errors import UserError

Messages = list[dict[str, Any]]

Kind = Literal["prompt", "completion", "preference", "label"]
"""What an algorithm needs of a row: see `map_row`."""

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target")
RESERVED = ("prompt", "completion", "answer")  # names that reward functions get from elsewhere
SIDES = ("chosen", "rejected")
NUMBERS = ("margin", "ref_chosen_logps", "ref_rejected_logps", "ref_logps")
"""Columns that losses may use: by how much a completion is better, and sums of log-probs under the reference."""

FIELDS: dict[Kind, tuple[str, ...]] = {
    "prompt": (),
    "completion": (),
    "preference": (*SIDES, *NUMBERS),
    "label": ("label", *NUMBERS),
}
"""Columns that are no metadata as they stand in the row."""

WANTED: dict[Kind, str] = {
    "completion": "prompt and completion, or messages that end with the assistant's turn",
    "preference": "prompt, chosen and rejected, or chosen and rejected as chats that begin with the same turns",
    "label": "prompt, completion and label (true where the completion is desirable)",
}


@dataclasses.dataclass(frozen=True)
class Record:
    """A row before tokenization.

    Attributes:
      prompt: text, or the chat so far as a list of ``{"role", "content"}``.
      answer: what rewards compare with; None where the row has none.
      completion: text to imitate, or that is preferred or labelled; None where the row has none.
      metadata: the other columns, for rewards and losses; none of those that have a field here.
      rejected: text that ``completion`` is preferred to.
      label: whether ``completion`` is desirable.
      turns: the whole chat where several turns of it are the assistant's: all of them are completions.
    """

    prompt: str | Messages
    answer: Any
    completion: str | None
    metadata: dict[str, Any]
    rejected: str | None = None
    label: bool | None = None
    turns: Messages | None = None


def final_answer(text: str) -> str:
    """GSM8K's answer: what follows the last ``####``, thousands commas removed."""
    return text.rpartition("####")[2].strip().replace(",", "")


def map_row(
    row: Mapping[str, Any], where: str, *, prompt_column: str = "", answer_column: str = "", kind: Kind = "prompt"
) -> Record:
    """Reads one row. ``where`` names it in errors (file and index).

    The prompt is ``prompt_column``, or the first of ``PROMPT_COLUMNS`` that the row has; the answer is
    ``answer_column``, else ``reward_model.ground_truth`` (verl), else the first of ``ANSWER_COLUMNS``. A chat
    that ends in an assistant's turn gives that turn as the completion; so does a column ``completion``. A
    ``question`` whose answer has a ``####`` line (GSM8K) is answered by what follows it, the whole solution being
    the completion. Every other column is metadata.

    ``kind`` says what is needed, under TRL's names: nothing but the ``prompt``; a ``completion`` as well; a
    ``preference`` (columns ``chosen`` and ``rejected``, with ``prompt``, or as chats that begin alike); a ``label``
    (``completion`` and a boolean ``label``). Numbers that a loss may use (``NUMBERS``) are checked and stay metadata.

    Raises:
      UserError: a column is missing or of the wrong form.
    """
    if kind == "preference":
        row = _explicit_prompt(row, where, prompt_column)
    name = prompt_column or next((column for column in PROMPT_COLUMNS if column in row), "")
    if name not in row:
        if kind != "prompt" and not name:
            raise UserError(_missing(row, where, kind))
        wanted = f"the column data.prompt_column = {name!r}" if name else f"one of {', '.join(PROMPT_COLUMNS)}"
        raise UserError(f"{where} has the columns {', '.join(row)}; {wanted} is needed for the prompt.")
    prompt, completion = check_prompt(row[name], f"{where}: the prompt in column {name!r}"), row.get("completion")
    turns = None
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        if completion is None and sum(turn["role"] == "assistant" for turn in prompt) > 1:
            turns = prompt
        completion = prompt[-1].get("content") if completion is None else completion
        prompt = prompt[:-1]
        if not prompt:
            raise UserError(f"{where}: the chat in column {name!r} has no turn before the assistant's.")
    completion = _completion_text(completion, f"{where}: the completion")

    answer, used = _answer(row, where, answer_column)
    if used != "reward_model" and isinstance(answer, str) and name == "question" and "####" in answer:
        completion = answer if completion is None else completion
        answer = final_answer(answer)
    if answer is None and used is None:
        answer = completion
    hidden = {name, *RESERVED, *FIELDS[kind]}
    metadata = {k: v for k, v in row.items() if k not in hidden and (k != used or k == "reward_model")}
    record = Record(prompt, answer, completion, metadata)
    if kind == "prompt":
        return record
    if kind == "completion":
        if completion is None and turns is None:
            raise UserError(_missing(row, where, kind))
        return record if turns is None else _with_turns(record, turns, f"{where}: the chat in column {name!r}")
    metadata |= _numbers(row, where)
    if kind == "label":
        if completion is None or "label" not in row:
            raise UserError(_missing(row, where, kind))
        return dataclasses.replace(record, label=_label(row["label"], where))
    chosen, rejected = (_completion_text(row[side], f"{where}: the {side} completion") for side in SIDES)
    if chosen is None or rejected is None:
        raise UserError(f"{where}: the chosen or the rejected completion is empty; both are needed.")
    return dataclasses.replace(record, completion=chosen, rejected=rejected)


def _with_turns(record: Record, turns: Messages, where: str) -> Record:
    """The record of a chat in which every turn of the assistant is a completion; the first one ends the prompt."""
    first = next(number for number, turn in enumerate(turns) if turn["role"] == "assistant")
    if not first:
        raise UserError(f"{where} has no turn before the assistant's.")
    return dataclasses.replace(record, prompt=turns[:first], turns=turns)


def _missing(row: Mapping[str, Any], where: str, kind: Kind) -> str:
    return f"{where} has the columns {', '.join(row)}; the algorithm learns from rows with {WANTED[kind]}."


def _explicit_prompt(row: Mapping[str, Any], where: str, prompt_column: str) -> Mapping[str, Any]:
    """The row with a column for its prompt: where chosen and rejected are chats that hold it, the turns they share.

    Beside a prompt that is a text, such chats hold that prompt as well (UltraFeedback); the chat's is taken.
    """
    if any(side not in row for side in SIDES):
        raise UserError(_missing(row, where, "preference"))
    name = prompt_column or next((column for column in PROMPT_COLUMNS if column in row), "")
    values = [row[side] for side in SIDES]
    hold_prompt = all(isinstance(value, list) and len(value) > 1 for value in values)
    if name and not (hold_prompt and isinstance(row.get(name), str)):
        return row
    if not hold_prompt:
        raise UserError(
            f"{where} has the columns {', '.join(row)} and no prompt. Without one, chosen and rejected must both be "
            "chats (lists of messages) that begin with the same turns and end with one turn of the assistant."
        )
    chats = [
        cast(Messages, check_prompt(value, f"{where}: the {side} completion"))
        for side, value in zip(SIDES, values, strict=True)
    ]
    # The last turn is what is compared, where it is the same in both as well.
    shared, most = 0, min(map(len, chats)) - 1
    while shared < most and chats[0][shared] == chats[1][shared]:
        shared += 1
    rest = [chat[shared:] for chat in chats]
    if any(len(turns) != 1 or turns[0]["role"] != "assistant" for turns in rest):
        raise UserError(
            f"{where}: chosen and rejected share their first {shared} turns, behind which they have {len(rest[0])} and "
            f"{len(rest[1])}. They must begin with the same turns and end with one turn of the assistant each."
        )
    return {**row, name or "prompt": chats[0][:shared], **dict(zip(SIDES, rest, strict=True))}


def _numbers(row: Mapping[str, Any], where: str) -> dict[str, float]:
    """Those of ``NUMBERS`` that the row has, as floats; an empty cell is as good as none."""
    found = {}
    for name in NUMBERS:
        value = row.get(name)
        if value is None:
            continue
        # The bound refuses NaN too, and whole numbers that no float holds.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise UserError(f"{where}: the column {name!r} is {value!r}; a finite number is needed.")
        found[name] = float(value)
    return found


def _label(value: Any, where: str) -> bool:
    if value not in (False, True):
        raise UserError(f"{where}: the label is {value!r}; true (desirable) or false is needed.")
    return bool(value)


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
    if (
        isinstance(value, list)
        and value
        and all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in value)
    ):
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
    raise UserError(f"{where} is a {type(value).__name__}; a text or one assistant turn is needed.")
