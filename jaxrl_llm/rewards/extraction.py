"""Finds the final answer in a text: a LaTeX box, a ``####`` line, the last number. No jax, standard library only."""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_LINE = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = r"[$€£]?\s?[-+−]?\s?[$€£]?\s?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?"
_LEADING_NUMBER = re.compile(_NUMBER)
# A sign belongs to the number only where nothing stands before it that it could subtract from.
_ANY_NUMBER = re.compile(r"(?:(?<![\w.)])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+")
_PLAIN = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_CONTINUES = "/^*+=\\(){}_<>:"  # after a leading number: the line is an expression, not a number and words


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}`` or ``\fbox{…}`` that is closed; braces nest, escaped ones are text.

    None where there is no such box or it is empty.
    """
    content = None
    position = 0
    while match := _BOX.search(text, position):
        end = _closing_brace(text, match.end())
        if end is None:
            position = match.end()  # never closed; a box inside it may be
            continue
        content, position = text[match.end() : end].strip(), end + 1
    return content or None


def _closing_brace(text: str, start: int) -> int | None:
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
        index += 1
    return None


def answer_line(text: str) -> str | None:
    """What the last ``#### …`` line says: its leading number without currency, else the line. None if empty."""
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    line = lines[-1].strip()
    number = _LEADING_NUMBER.match(line)
    if number and any(character.isdigit() for character in number[0]):
        rest = line[number.end() :].lstrip()
        if not rest or rest[0] not in _CONTINUES:
            return _bare(number[0])
    return line.rstrip(".").strip() or None


def last_number(text: str) -> str | None:
    """The last number in the text, thousands commas removed; None where there is none."""
    numbers = _ANY_NUMBER.findall(text)
    return _bare(numbers[-1]) if numbers else None


def _bare(number: str) -> str:
    return re.sub(r"[\s,$€£+]", "", number).replace("−", "-")


def explicit_answer(text: str) -> str | None:
    """The box or ``####`` line, whichever comes last in the text; None where it has no content."""
    boxes = [match.start() for match in _BOX.finditer(text)]
    lines = [match.start() for match in _ANSWER_LINE.finditer(text)]
    if lines and (not boxes or lines[-1] > boxes[-1]):
        return answer_line(text)
    return last_box(text)


def has_explicit_answer(text: str) -> bool:
    """Whether the text tries to mark its answer, be it an unclosed or empty box."""
    return bool(_BOX.search(text) or _ANSWER_LINE.search(text))


def as_number(text: str) -> Fraction | None:
    """The exact value of a plain decimal number (thousands commas, currency and a full stop allowed), else None."""
    bare = _bare(text.strip().rstrip(".")).strip()
    return Fraction(bare) if _PLAIN.fullmatch(bare) else None
