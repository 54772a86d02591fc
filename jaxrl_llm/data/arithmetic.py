"""Arithmetic questions in plain English for a small instruction-tuned model; the answer is one number.

One-step rows ask for a sum or a difference, two-step rows chain two of them. Rows are split by the unordered
pair of the first two operands, once and for all, so an evaluation question is never a training question in
another order or with another operation.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxrl_llm.data.order import permutation

SMALLEST_OPERAND, LARGEST_OPERAND = 2, 50
EVALUATION_PAIRS = 150
TWO_STEP_EVERY = 4  # one question in four has a second step

INSTRUCTION = "Answer with only the number."


@functools.cache
def _split() -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(training, evaluation) pairs ``(a, b)`` with ``a <= b``."""
    operands = range(SMALLEST_OPERAND, LARGEST_OPERAND + 1)
    unordered = [(a, b) for a in operands for b in operands if a <= b]
    shuffled = tuple(unordered[i] for i in permutation(len(unordered), 19_990_101))
    return shuffled[EVALUATION_PAIRS:], shuffled[:EVALUATION_PAIRS]


def _question(a: int, b: int, kind: int, two_steps: bool) -> tuple[str, int]:
    """The expression and its value; ``kind`` picks a + b, b + a or b - a (never negative)."""
    expression, value = ((f"{a} + {b}", a + b), (f"{b} + {a}", a + b), (f"{b} - {a}", b - a))[kind]
    if two_steps:
        third = (7 * a + 3 * b) % 9 + 1
        expression, value = f"{expression} + {third}", value + third
    return expression, value


def arithmetic_rows(split: str) -> list[dict[str, Any]]:
    """Rows of ``train`` or ``eval``: columns prompt (text), answer (digits), steps (1 or 2)."""
    train, evaluation = _split()
    rows = []
    for index, (a, b) in enumerate({"train": train, "eval": evaluation}[split]):
        two_steps = index % TWO_STEP_EVERY == TWO_STEP_EVERY - 1
        expression, value = _question(a, b, index % 3, two_steps)
        rows.append(
            {
                "prompt": f"What is {expression}? {INSTRUCTION}",
                "answer": str(value),
                "steps": 2 if two_steps else 1,
            }
        )
    return rows
