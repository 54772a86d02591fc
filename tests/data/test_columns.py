"""Which column is what."""

import pytest

from jaxrl_llm.data.columns import final_answer, map_row
from jaxrl_llm.errors import UserError

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def test_verl_rows():
    row = {
        "data_source": "d",
        "prompt": [{**USER, "name": None}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "answer": "other"},
    }
    record = map_row(row, "row 0")
    assert record.prompt == [USER]  # parquet's empty fields are gone
    assert (record.answer, record.completion) == ("4", None)
    assert set(record.metadata) == {"data_source", "reward_model", "extra_info"}


def test_gsm8k_rows():
    """Seen to catch: the whole solution as the answer."""
    solution = "16 - 3 = <<16-3=13>>13\n#### 1,234"
    record = map_row({"question": "How many?", "answer": solution}, "row 0")
    assert (record.prompt, record.answer, record.completion) == ("How many?", "1234", solution)
    assert final_answer("#### 3\n#### -4 ") == "-4"


def test_chats_that_end_with_the_assistant():
    record = map_row({"messages": [USER, ASSISTANT]}, "row 0")
    assert (record.prompt, record.answer, record.completion) == ([USER], "hello", "hello")
    record = map_row({"messages": [USER], "solution": "7", "level": 2}, "row 0")
    assert (record.prompt, record.answer, record.completion, record.metadata) == ([USER], "7", None, {"level": 2})


def test_prompt_and_completion():
    record = map_row({"prompt": "a", "completion": [ASSISTANT], "answer": 3}, "row 0")
    assert (record.prompt, record.answer, record.completion, record.metadata) == ("a", 3, "hello", {})
    assert map_row({"prompt": "a", "completion": "b"}, "row 0").answer == "b"
    assert map_row({"prompt": "a"}, "row 0").answer is None


def test_named_columns():
    row = {"prompt": "no", "text": "yes", "label": 0, "answer": "no"}
    record = map_row(row, "row 0", prompt_column="text", answer_column="label")
    assert (record.prompt, record.answer, record.metadata) == ("yes", 0, {})


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "a"}, {}, r"row 7 has the columns text; one of prompt"),
        ({"prompt": "a"}, {"prompt_column": "text"}, "data.prompt_column = 'text'"),
        ({"prompt": "a"}, {"answer_column": "label"}, "data.answer_column = 'label'"),
        ({"prompt": ""}, {}, "non-empty"),
        ({"prompt": ["a"]}, {}, "list of messages"),
        ({"prompt": [{"role": None, "content": "a"}]}, {}, "list of messages"),
        ({"prompt": "a", "completion": 3}, {}, "completion is a int"),
        ({"messages": [ASSISTANT]}, {}, "no turn before"),
    ],
)
def test_bad_rows(row: dict, options: dict, message: str):
    with pytest.raises(UserError, match=message):
        map_row(row, "row 7", **options)
