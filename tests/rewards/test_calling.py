"""How functions of different styles are found and called."""

from typing import Any

import pytest

from jaxrl_llm.rewards.calling import as_score, bind, find_function

ROW = {"level": 3, "prompt": "shadowed"}


def call(function: Any, **options: Any) -> Any:
    return bind(function, options)("the prompt", "the completion", "the answer", ROW)


def test_functions_get_what_they_name():
    assert call(lambda completion: completion) == "the completion"
    assert call(lambda answer, level: (answer, level)) == ("the answer", 3)
    assert call(lambda solution_str, ground_truth: (solution_str, ground_truth)) == ("the completion", "the answer")
    assert call(lambda completion, scale: scale, scale=2) == 2
    everything = call(lambda **given: given)
    assert everything == {"prompt": "the prompt", "completion": "the completion", "answer": "the answer", "level": 3}


def test_columns_never_set_the_options_of_a_builtin_reward():
    """Caught: a data set with a column ``correct`` or ``mode``, which took the place of the option of that name."""
    columns = {"correct": False, "wrong": 1.0, "mode": "train", "extract": "train"}
    for name in ("math", "exact_match"):
        assert bind(find_function(name), {})("2 + 3", "5", "5", columns) == 1.0
        assert bind(find_function(name), {"correct": 2.0})("2 + 3", "5", "5", columns) == 2.0


def test_functions_of_a_batch_get_one_sample():
    def trl_style(prompts, completions, **columns):
        return [len(prompts) + len(completions) + columns["level"][0]]

    assert call(trl_style) == 5
    with pytest.raises(TypeError, match="one score each"):
        call(lambda completions: 1.0)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="no option scala"):
        bind(lambda completion, scale=1: scale, {"scala": 2})
    with pytest.raises(ValueError, match="pattern"):
        bind(find_function("format"), {})
    with pytest.raises(LookupError, match="exact_match"):
        find_function("exact_mtch")


def test_scores():
    """Seen to catch: summing `score` with the parts beside it."""
    assert as_score(None) == (None, {})
    assert as_score(True) == (1.0, {})
    assert as_score({"a": 1, "b": None, "c": 0.5}) == (1.5, {"a": 1.0, "c": 0.5})
    assert as_score({"a": None}) == (None, {})
    assert as_score({"score": 1, "accuracy": 0}) == (1.0, {"accuracy": 0.0})
    with pytest.raises(TypeError, match="str"):
        as_score("1.0")
