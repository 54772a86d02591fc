"""The built-in rewards. Each scores one sample and runs in a worker process, which bounds its time; no jax here.

A reward returns a number, or None where it does not apply (here: a row without an answer to compare with).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rewards.extraction import as_number, explicit_answer, has_explicit_answer, last_number


def math(
    completion: str,
    answer: Any,
    *,
    mode: str = "flexible",
    correct: float = 1.0,
    wrong: float = 0.0,
    no_answer: float = 0.0,
) -> float | None:
    r"""Whether the completion's final answer equals ``answer`` as mathematics (``1/2``, ``0.5``, ``\frac12``).

    The final answer is the last ``\boxed{…}`` or ``#### …``. Without such a mark, ``flexible`` takes the last
    number and ``strict`` finds none; a mark that is empty or never closed counts as no answer in both modes.
    Numbers compare exactly, expressions through math-verify.

    Raises:
      ValueError: the option ``mode`` is unknown, or ``answer`` is no mathematics.
    """
    if mode not in ("strict", "flexible"):
        raise ValueError(f"the option mode of the math reward is {mode!r}; allowed: 'strict', 'flexible'")
    if answer is None:
        return None
    extracted = explicit_answer(completion)
    if extracted is None and mode == "flexible" and not has_explicit_answer(completion):
        extracted = last_number(completion)
    if extracted is None:
        return no_answer
    return correct if math_equal(extracted, str(answer)) else wrong


def math_equal(extracted: str, truth: str) -> bool:
    """Whether two answers mean the same number, set, interval or expression.

    Raises:
      ValueError: ``truth`` can't be read as mathematics.
    """
    extracted, truth = extracted.strip(), truth.strip()
    if extracted == truth:
        return True
    number, true_number = as_number(extracted), as_number(truth)
    if number is not None and true_number is not None:
        return number == true_number
    gold = _parse(truth)
    if not gold:
        raise ValueError(f"the ground truth {truth!r} is no mathematical answer; use the reward exact_match")
    import math_verify

    # No time-out of its own: it would use signal.alarm, and the worker is killed when it takes too long.
    return bool(math_verify.verify(gold, _parse(extracted), timeout_seconds=0))


def _parse(expression: str) -> list[Any]:
    import math_verify  # takes a third of a second and brings sympy: only where an answer is no plain number

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that it has no time-out
    parsed = math_verify.parse(rf"\boxed{{{expression}}}", parsing_timeout=0)
    return [value for value in parsed if not isinstance(value, str)]  # it adds the text itself


def exact_match(
    completion: str,
    answer: Any,
    *,
    extract: str = "text",
    ignore_case: bool = False,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> float | None:
    """Whether the completion, spaces around it removed, is exactly the answer.

    ``extract`` says which part of the completion is compared: the whole ``text``, its ``last_line``, its
    ``last_number``, or the ``marked`` answer (box or ``####`` line). ``answer`` may be a list: any of it matches.

    Raises:
      ValueError: the option ``extract`` is unknown.
    """
    if extract not in _EXTRACTIONS:
        raise ValueError(f"the option extract of exact_match is {extract!r}; allowed: {', '.join(_EXTRACTIONS)}")
    if answer is None:
        return None
    found = _EXTRACTIONS[extract](completion)
    accepted = [str(item).strip() for item in (answer if isinstance(answer, list) else [answer])]
    if ignore_case:
        found, accepted = found and found.lower(), [item.lower() for item in accepted]
    return correct if found is not None and found.strip() in accepted else wrong


def _last_line(text: str) -> str | None:
    return next((line for line in reversed(text.splitlines()) if line.strip()), None)


_EXTRACTIONS: dict[str, Callable[[str], str | None]] = {
    "text": lambda text: text,
    "last_line": _last_line,
    "last_number": last_number,
    "marked": explicit_answer,
}


def format(completion: str, *, pattern: str, correct: float = 1.0, wrong: float = 0.0) -> float:
    """Whether the regular expression ``pattern`` matches the whole completion (``.`` also matches line ends).

    A pattern that backtracks without end is stopped like any reward that takes too long.
    """
    return correct if re.fullmatch(pattern, completion, re.DOTALL) else wrong


def length(completion: str, *, maximum: int, minimum: int = 0, unit: str = "words") -> float:
    """0 while the completion has ``minimum`` to ``maximum`` words or characters, then down to -1 in proportion.

    Too long: ``-(n - maximum) / maximum``; too short: ``-(minimum - n) / minimum``; never below -1.

    Raises:
      ValueError: the option ``unit`` or the range makes no sense.
    """
    if unit not in ("words", "characters") or not 0 <= minimum <= maximum or maximum == 0:
        raise ValueError(
            f"length has unit={unit!r}, minimum={minimum}, maximum={maximum}; "
            "needed: unit 'words' or 'characters', 0 <= minimum <= maximum, maximum > 0"
        )
    size = len(completion.split()) if unit == "words" else len(completion)
    if size < minimum:
        return -(minimum - size) / minimum
    return -min(1.0, max(0, size - maximum) / maximum)


BUILTIN: dict[str, Callable[..., float | None]] = {
    "math": math,
    "exact_match": exact_match,
    "format": format,
    "length": length,
}
