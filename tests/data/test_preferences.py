"""Rows for preference, label and chat learning: which columns, which ids, which of them are trained."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.algorithms import sft
from jaxrl_llm.config import DataConfig, RunConfig
from jaxrl_llm.data.columns import map_row
from jaxrl_llm.data.dataset import PromptData
from jaxrl_llm.data.examples import encode_rows, load_examples
from jaxrl_llm.data.turns import encode_turns
from jaxrl_llm.errors import UserError
from tests.algorithms.test_grpo import FakeContext

WORDS = ["<pad>", "<bos>", "<eos>", "S:", "U:", "A:", "|", "a", "b", "c", "d", "e", "f"]
ID = {word: number for number, word in enumerate(WORDS)}
HEADERS = "{{ bos_token }}{% for m in messages %}{{ m.role[0] | upper }}: "
GENERATION_PROMPT = "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
ENDING = "{{ m.content }} {{ eos_token }} | " + GENERATION_PROMPT  # every turn ends in EOS and a line of its own
PLAIN = HEADERS + ENDING
MARKED = HEADERS + (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %} {{ eos_token }} | "
    "{% else %}{{ m.content }} | {% endif %}" + GENERATION_PROMPT
)
WITHOUT_EOS = HEADERS + "{{ m.content }} | " + GENERATION_PROMPT
FORGETFUL = HEADERS + "{% if loop.last %}{{ m.content }} {% endif %}| " + GENERATION_PROMPT


def tokenizer_of(template: str | None) -> Any:
    backend = Tokenizer(models.WordLevel(ID))
    backend.add_special_tokens(WORDS[:6])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=template
    )


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def words(ids: Any) -> str | None:
    return None if ids is None else " ".join(WORDS[number] for number in ids)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: str, kind: str, *, template: str | None = PLAIN, **options: Any) -> list[Any]:
    limits = {name: options.pop(name) for name in ("max_prompt_tokens", "max_response_tokens") if name in options}
    config = DataConfig(train=path, **options)
    return load_examples(config, tokenizer_of(template), path, kind=kind, **{"max_prompt_tokens": 99, **limits})[0]


# -- Preferences -------------------------------------------------------------------------------------------------

TEXTS = {"prompt": "a b", "chosen": "c d", "rejected": "e"}
CHATS = {"prompt": [user("a b")], "chosen": [assistant("c d")], "rejected": [assistant("e")]}
IMPLICIT = {"chosen": [user("a b"), assistant("c d")], "rejected": [user("a b"), assistant("e")]}
ULTRAFEEDBACK = {"prompt": "a b", **IMPLICIT}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("row", [TEXTS, CHATS, IMPLICIT, ULTRAFEEDBACK], ids=["texts", "chats", "implicit", "both"])
def test_forms_of_a_preference(tmp_path: Path, row: dict[str, Any], suffix: str):
    """Caught: chosen and rejected exchanged; a prompt that is a text taken beside chats
    that hold it; an empty cell as the margin; the two completions left in the metadata."""
    path = write(
        tmp_path / f"pairs{suffix}", [{**row, "margin": 2, "source": "s"}, {**row, "margin": None, "source": "t"}]
    )
    first, second = load(path, "preference")
    assert words(first.prompt_ids) == "<bos> U: a b <eos> | A:"
    assert (words(first.response_ids), words(first.rejected_ids)) == ("c d <eos>", "e <eos>")
    assert (first.response_mask, first.label, first.answer) == (None, None, None)
    assert first.metadata == {"margin": 2.0, "source": "s"} and isinstance(first.metadata["margin"], float)
    assert second.metadata == {"source": "t"}


def test_a_longer_shared_beginning():
    """Two turns of the assistant are shared; the last ones differ. Caught: only the first turn taken as shared; one
    turn too few."""
    shared = [user("a"), assistant("b"), user("c")]
    record = map_row(
        {"chosen": [*shared, assistant("d")], "rejected": [*shared, assistant("e")]}, "row 0", kind="preference"
    )
    assert (record.prompt, record.completion, record.rejected) == (shared, "d", "e")


def test_reference_numbers_stay_with_the_pair():
    numbers = {"ref_chosen_logps": -3, "ref_rejected_logps": -4.5}
    record = map_row({**TEXTS, **numbers, "answer": "x"}, "row 0", kind="preference")
    assert record.metadata == numbers and record.answer == "x"
    named = map_row({"ask": "a", "chosen": "b", "rejected": "c"}, "row 0", prompt_column="ask", kind="preference")
    assert (named.prompt, named.metadata) == ("a", {})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            r"row 3 has the columns prompt, completion; .* prompt, chosen and rejected",
        ),
        ({"chosen": "a b", "rejected": "a c"}, "no prompt. Without one, chosen and rejected must both be chats"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]}, "share their first 0 turns"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c"), user("d"), assistant("e")]},
            "share their first 1 turns, behind which they have 1 and 3",
        ),
        ({**TEXTS, "chosen": None}, "the chosen or the rejected completion is empty"),
        ({**TEXTS, "rejected": 3}, "row 3: the rejected completion is a int"),
        ({**CHATS, "chosen": [assistant("b"), user("c"), assistant("d")]}, "the chosen completion is a list"),
        ({**TEXTS, "margin": "much"}, "the column 'margin' is 'much'; a finite number"),
        ({**TEXTS, "margin": 10**400}, "a finite number"),
        ({**TEXTS, "ref_chosen_logps": float("nan")}, "the column 'ref_chosen_logps' is nan"),
    ],
)
def test_rows_that_are_no_preferences(row: dict, message: str):
    """Caught: several turns behind the shared ones; numbers that are none, or infinite."""
    with pytest.raises(UserError, match=message):
        map_row(row, "row 3", kind="preference")


def test_pairs_without_a_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Counted and told of once, refused where all are so; of a file, and of rows that a caller brings. As texts, as
    chats that are the same to their end, and as what a cut leaves.

    Caught: no count; texts compared in place of what the cut leaves; a warning for each row; the last turn of equal
    chats taken for a part of the prompt; none of the checks for a caller's rows.
    """
    same = [
        {**TEXTS, "rejected": TEXTS["chosen"]},
        {"chosen": IMPLICIT["chosen"], "rejected": IMPLICIT["chosen"]},
        {**TEXTS, "chosen": "c d e", "rejected": "c d f"},
    ]
    path = write(tmp_path / "pairs.jsonl", [same[0], TEXTS, *same[1:]])
    config, tokenizer = DataConfig(train=path, overlong_prompts="truncate_left"), tokenizer_of(PLAIN)
    limits: dict[str, Any] = {"max_response_tokens": 2, "kind": "preference"}
    kept, counts = load_examples(config, tokenizer, path, max_prompt_tokens=99, **limits)
    assert counts == {"rows": 4, "kept": 4, "filtered": 0, "truncated": 4, "equal": 3}
    assert [words(one.prompt_ids) for one in kept] == ["<bos> U: a b <eos> | A:"] * 4
    assert [words(one.rejected_ids) for one in kept] == ["c d", "e <eos>", "c d", "c d"]
    (told,) = [line for line in caplog.messages if "the same tokens" in line]
    assert f"in 3 of 4 pairs of {path}: row 0, 2, 3." in told
    assert load_examples(config, tokenizer, path, max_prompt_tokens=99, kind="preference")[1]["equal"] == 2
    caplog.clear()
    encode_rows(config, tokenizer, [TEXTS, same[1]], **limits)
    assert [line for line in caplog.messages if "in 1 of 2 pairs of the examples: row 1." in line]
    with pytest.raises(UserError, match=r"in 3 of 3 pairs of the examples: row 0, 1, 2\. There is nothing to learn"):
        encode_rows(config, tokenizer, same, **limits)


# -- Labels and completions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_labelled_completions(tmp_path: Path, suffix: str):
    """Caught: the label inverted, not passed on, or left in the metadata."""
    rows = [
        {"prompt": "a", "completion": "b c", "label": True},
        {"prompt": "a", "completion": "d", "label": False},
    ]
    good, bad = load(write(tmp_path / f"labels{suffix}", rows), "label")
    assert (words(good.prompt_ids), words(good.response_ids)) == ("<bos> U: a <eos> | A:", "b c <eos>")
    assert (good.label, bad.label) == (True, False) and isinstance(bad.label, bool)
    assert (good.metadata, good.rejected_ids, words(bad.response_ids)) == ({}, None, "d <eos>")
    chat = {"prompt": [user("a")], "completion": [assistant("b")], "label": 0, "topic": "t"}
    record = map_row(chat, "row 0", kind="label")
    assert (record.completion, record.label, record.metadata) == ("b", False, {"topic": "t"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            "row 3 has the columns prompt, completion; .*prompt, completion and label",
        ),
        ({"prompt": "a", "label": True}, "row 3 has the columns prompt, label; .*prompt, completion and label"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "the label is 'good'; true"),
        ({"prompt": "a", "completion": "b", "label": 2}, "the label is 2"),
        ({"prompt": "a", "completion": "b", "label": None}, "the label is None"),
    ],
)
def test_rows_without_a_label(row: dict, message: str):
    with pytest.raises(UserError, match=message):
        map_row(row, "row 3", kind="label")


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("completion", "prompt and completion, or messages"),
        ("preference", "prompt, chosen and rejected, or"),
        ("label", "prompt, completion and label"),
    ],
)
def test_the_file_the_columns_and_the_wanted_ones_are_named(tmp_path: Path, kind: str, columns: str):
    """Caught: a row without a completion taken for SFT."""
    path = write(tmp_path / "other.jsonl", [{"prompt": "a", "text": "b"}])
    with pytest.raises(UserError, match=rf"{re.escape(path)}, row 0 has the columns prompt, text; .* {columns}"):
        load(path, kind)
    path = write(tmp_path / "other.jsonl", [{"text": "b"}])
    with pytest.raises(UserError, match=rf"{re.escape(path)}, row 0 has the columns text; .*{columns}"):
        load(path, kind)


def test_what_is_read_follows_from_the_kind(tmp_path: Path):
    """One file, three algorithms. Caught: completions encoded where only prompts are wanted; the kind not passed on."""
    row = {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d", "label": True}
    path = write(tmp_path / "all.jsonl", [row])
    found = {kind: load(path, kind)[0] for kind in ("prompt", "completion", "preference", "label")}
    fields = {
        kind: (words(example.response_ids), words(example.rejected_ids), example.label)
        for kind, example in found.items()
    }
    assert fields == {
        "prompt": (None, None, None),
        "completion": ("b <eos>", None, None),
        "preference": ("c <eos>", "d <eos>", None),
        "label": ("b <eos>", None, True),
    }
    assert found["prompt"].metadata == {"chosen": "c", "rejected": "d", "label": True}
    (example,) = next(PromptData(DataConfig(train=path), tokenizer_of(PLAIN), batch_size=1, kind="preference"))
    assert words(example.rejected_ids) == "d <eos>"


def test_either_completion_may_be_too_long(tmp_path: Path):
    """Caught: the length of one of the two ignored; only the chosen one cut."""
    rows = [TEXTS, {**TEXTS, "chosen": "c d e"}, {**TEXTS, "rejected": "c d e"}]
    path = write(tmp_path / "pairs.jsonl", rows)
    assert [e.row for e in load(path, "preference", max_response_tokens=3)] == [0]
    cut = load(path, "preference", max_response_tokens=3, overlong_prompts="truncate_left")
    assert [words(e.response_ids) for e in cut] == ["c d <eos>", "c d e", "c d <eos>"]
    assert [words(e.rejected_ids) for e in cut] == ["e <eos>", "e <eos>", "c d e"]
    with pytest.raises(UserError, match="All 3 rows"):
        load(path, "preference", max_prompt_tokens=3)


# -- Chats with several turns of the assistant -------------------------------------------------------------------

CHAT = [user("a"), assistant("b c"), user("d"), assistant("e"), user("f"), assistant("a")]


def shown(turns: Any) -> tuple[str | None, str]:
    """The prompt, and the response with what is not trained in brackets."""
    response = [
        WORDS[number] if counts else f"({WORDS[number]})"
        for number, counts in zip(turns.response_ids, turns.response_mask, strict=True)
    ]
    return words(turns.prompt_ids), " ".join(response)


@pytest.mark.parametrize(
    ("template", "prompt", "response"),
    [
        (
            PLAIN,
            "<bos> U: a <eos> | A:",
            "b c <eos> (|) (U:) (d) (<eos>) (|) (A:) e <eos> (|) (U:) (f) (<eos>) (|) (A:) a <eos>",
        ),
        (
            MARKED,
            "<bos> U: a | A:",
            "b c <eos> (|) (U:) (d) (|) (A:) e <eos> (|) (U:) (f) (|) (A:) a <eos>",
        ),
        (
            WITHOUT_EOS,
            "<bos> U: a | A:",
            "b c | (U:) (d) (|) (A:) e | (U:) (f) (|) (A:) a | <eos>",
        ),
    ],
    ids=["by prefixes", "marked", "without EOS"],
)
def test_the_assistants_turns_are_trained(template: str, prompt: str, response: str):
    """Caught: headers trained; no generation prompt before a turn; what follows EOS trained; EOS
    of a turn not trained, in either way of masking; no EOS at the end."""
    tokenizer = tokenizer_of(template)
    turns = encode_turns(tokenizer, CHAT)
    assert shown(turns) == (prompt, response)
    whole = tokenizer.apply_chat_template(CHAT).input_ids
    ids = [*turns.prompt_ids, *turns.response_ids]
    assert ids[:-1] == whole[: len(ids) - 1]
    assert turns.response_ids.dtype == turns.prompt_ids.dtype == np.int32


def test_a_mark_may_hold_more_than_the_text():
    """The template's own mark decides between the turns, and EOS ends the last one. Caught: the template's marks
    ignored."""
    template = MARKED.replace("{% endgeneration %} {{ eos_token }} | ", " {{ eos_token }} | {% endgeneration %}")
    assert shown(encode_turns(tokenizer_of(template), CHAT[:4])) == (
        "<bos> U: a | A:",
        "b c <eos> | (U:) (d) (|) (A:) e <eos>",
    )


def test_a_template_that_rewrites_earlier_turns_is_refused():
    """As templates do that drop reasoning. Caught: the renderings not compared."""
    with pytest.raises(UserError, match=r"row 2: .* turns up to number 1 in another way.*{% generation %}"):
        encode_turns(tokenizer_of(FORGETFUL), CHAT, where="row 2")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('never') }}", "refuses it.*never"),
        ("{{ bos_token }}a", "writes none"),
    ],
)
def test_templates_that_can_not_write_the_chat(template: str | None, message: str):
    with pytest.raises(UserError, match=message):
        encode_turns(tokenizer_of(template), CHAT)


def test_a_chat_of_several_turns_in_a_file(tmp_path: Path):
    """Loaded, cut with its mask, and given to SFT. Caught: only the last turn trained; the mask lost, not cut, or
    ignored by SFT; the system prompt lost."""
    path = write(tmp_path / "chats.parquet", [{"messages": CHAT}, {"messages": CHAT[:2]}])
    many, one = load(path, "completion")
    assert many.prompt == "<bos>U: a <eos> | A: " and words(many.prompt_ids) == "<bos> U: a <eos> | A:"
    assert shown(many)[1].startswith("b c <eos> (|) (U:)") and shown(many)[1].endswith("(A:) a <eos>")
    assert (words(one.response_ids), one.response_mask) == ("b c <eos>", None)
    (system, _) = load(path, "completion", system_prompt="f")
    assert words(system.prompt_ids) == "<bos> S: f <eos> | U: a <eos> | A:"

    (short, _) = load(path, "completion", max_response_tokens=5, overlong_prompts="truncate_left")
    assert shown(short)[1] == "b c <eos> (|) (U:)"

    context = FakeContext(sft.SFTOptions(), RunConfig())
    sequences = sft.prepare(context, sft.collect(context, [many, one]))
    trained = [words(tokens[mask]) for tokens, mask in zip(sequences.tokens, sequences.loss_mask, strict=True)]
    assert trained == ["b c <eos> e <eos> a <eos>", "b c <eos>"]

    prompt = load(path, "prompt")[0]
    assert words(prompt.prompt_ids) == "<bos> U: a <eos> | A: b c <eos> | U: d <eos> | A: e <eos> | U: f <eos> | A:"
    assert prompt.answer == "a" and prompt.response_ids is None


def test_a_chat_that_begins_with_the_assistant():
    with pytest.raises(UserError, match="no turn before the assistant's"):
        map_row({"messages": CHAT[1:4]}, "row 0", kind="completion")
    with pytest.raises(UserError, match=r"row 0 has the columns messages; .*end with the assistant's turn"):
        map_row({"messages": CHAT[:3]}, "row 0", kind="completion")
