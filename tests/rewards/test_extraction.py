"""Answers found in text."""

from fractions import Fraction

import pytest

from jaxrl_llm.rewards.extraction import answer_line, as_number, explicit_answer, last_box, last_number
from tests.cases import case


def test_boxes_with_nested_braces():
    """Case R01. Seen to catch: ending the box at its first closing brace."""
    texts = case("R01")["input"]["texts"]
    assert [last_box(text) for text in texts] == [r"\frac{1}{2}", "x^{2^{3}}+1", r"\{1,2\}", "7", "8"]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{1} and then \boxed{2", "1"),  # cut off by the length limit
        (r"\boxed{1} and then \boxed{}", None),
        (r"\boxed{a \\} b", r"a \\"),  # a line break, then the closing brace
        (r"\boxed{\text{if } \boxed{3}", "3"),
        (r"\mbox{5}", None),
    ],
)
def test_last_box(text: str, box: str | None):
    assert last_box(text) == box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 1,234.", "1234"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### 1/2", "1/2"),
        ("#### 3 apples", "3"),
        ("#### 3\n#### ", None),
        (r"#### \frac{1}{2}", r"\frac{1}{2}"),
        ("no line", None),
    ],
)
def test_answer_line(text: str, answer: str | None):
    assert answer_line(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 18.", "18"),
        ("17 - 26 = -9", "-9"),
        ("17-26", "26"),
        ("1,234,567 in all", "1234567"),
        ("(1,2)", "2"),
        ("0.5", "0.5"),
        ("none", None),
    ],
)
def test_last_number(text: str, number: str | None):
    assert last_number(text) == number


def test_the_later_mark_counts():
    assert explicit_answer("#### 5\n\\boxed{6}") == "6"
    assert explicit_answer("\\boxed{6}\n#### 5") == "5"


def test_numbers_are_exact():
    assert as_number("$1,000.10") == Fraction(100010, 100)
    assert as_number("0.1") == Fraction(1, 10)
    assert as_number("1/2") is None
