"""Arithmetic questions in plain English for a small instruction-tuned model; the answer is one number.

One-step rows ask for a sum or a difference of numbers up to 20, two-step rows add a third. Rows are split by
the unordered pair of the first two numbers, once and for all, so an evaluation question is never a training question
in another order or with another operation.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxrl_llm.data.order import permutation

LARGEST_OPERAND = 20
EVALUATION_PAIRS = 40
TWO_STEP_EVERY = 4  # one question in four has a second step


@functools.cache
def _split() -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(training, evaluation) pairs ``(a, b)`` with ``a <= b``."""
    unordered = [(a, b) for a in range(1, LARGEST_OPERAND + 1) for b in range(a, LARGEST_OPERAND + 1)]
    shuffled = tuple(unordered[i] for i in permutation(len(unordered), 19_990_101))
    return shuffled[EVALUATION_PAIRS:], shuffled[:EVALUATION_PAIRS]


def arithmetic_rows(split: str) -> list[dict[str, Any]]:
    """Rows of ``train`` or ``eval``: columns prompt (text), answer (digits), steps (1 or 2)."""
    train, evaluation = _split()
    rows = []
    for a, b in {"train": train, "eval": evaluation}[split]:
        for expression, value in ((f"{a} + {b}", a + b), (f"{b} + {a}", b + a), (f"{b} - {a}", b - a)):
            two_steps = len(rows) % TWO_STEP_EVERY == TWO_STEP_EVERY - 1
            if two_steps:
                third = (7 * a + 3 * b) % 9 + 1
                expression, value = f"{expression} + {third}", value + third
            prompt = f"Calculate {expression} and reply with the result only."
            rows.append({"prompt": prompt, "answer": str(value), "steps": 2 if two_steps else 1})
    return rows
