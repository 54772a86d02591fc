"""The built-in rewards, called directly."""

import pytest

from jaxrl_llm.rewards.functions import exact_match, format, length, math
from tests.cases import case


def test_math_gives_no_score_to_unclosed_or_empty_boxes():
    """Case R03. Seen to catch: falling back to the last number after a box that was never closed."""
    texts, truth = case("R03")["input"]["texts"], case("R03")["input"]["truth"]
    assert [math(text, truth) for text in texts] == [0.0, 0.0, 0.0, 0.0]
    assert math(r"\boxed{\frac{1}{2}", "2") == 0.0  # the last number would be right by accident


@pytest.mark.parametrize("mode", ["strict", "flexible"])
def test_gsm8k_answer_lines(mode: str):
    """Case R05. Seen to catch: the first line winning, a comma or currency sign ending the number."""
    texts, truths = case("R05")["input"]["texts"], case("R05")["input"]["truth"]
    scores = [math(text, truth, mode=mode) for text, truth in zip(texts, truths, strict=True)]
    assert scores == case("R05")["expected"][mode]


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x + 1}", "1+x", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{0.3}", "1/3", 0.0),
        ("#### 18", 18, 1.0),
        ("#### 1/2", "0.5", 1.0),
        ("9007199254740993", "9007199254740992", 0.0),  # equal as 64-bit floats
    ],
)
def test_math_compares_values(completion: str, answer: object, score: float):
    """Seen to catch: comparing numbers as floats."""
    assert math(completion, answer) == score


def test_math_names_a_truth_that_is_none():
    assert math("1", None) is None
    with pytest.raises(ValueError, match="no mathematical answer"):
        math("1", "???")
    with pytest.raises(ValueError, match="'lenient'"):
        math("1", "1", mode="lenient")


def test_exact_match():
    assert exact_match(" 95\n", "95") == 1.0
    assert exact_match("095", "95") == 0.0
    assert exact_match("Paris", ["paris", "Paris, France"], ignore_case=True) == 1.0
    assert exact_match("so\nParis\n", "Paris", extract="last_line") == 1.0
    assert exact_match("3 then 4", 4, extract="last_number") == 1.0
    assert exact_match("x", None) is None
    with pytest.raises(ValueError, match="last_word"):
        exact_match("x", "x", extract="last_word")


def test_format_matches_the_whole_text():
    pattern = r"<think>.*</think>.*"
    assert format("<think>a\nb</think> 4", pattern=pattern) == 1.0
    assert format("well, <think>a</think> 4", pattern=pattern) == 0.0


def test_length():
    assert [length("a " * n, maximum=4) for n in (0, 4, 6, 8, 100)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert length("ab", maximum=9, minimum=4, unit="characters") == -0.5
    with pytest.raises(ValueError, match="tokens"):
        length("", maximum=1, unit="tokens")
