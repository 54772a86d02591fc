"""Batches: order, position, shards, lengths."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.addition import write_tokenizer
from jaxrl_llm.data.dataset import PromptData
from jaxrl_llm.data.examples import load_examples
from jaxrl_llm.data.order import epoch_order, permutation
from jaxrl_llm.errors import UserError
from tests.cases import case
from tests.data.test_prompts import TEMPLATE, toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write(tmp_path: Path, prompts: list[Any], **columns: Any) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, **columns}) + "\n" for prompt in prompts))
    return str(file)


def numbered(tmp_path: Path, count: int) -> DataConfig:
    return DataConfig(train=write(tmp_path, [f"{i}+0=" for i in range(count)], answer="0"))


def rows(batch: list[Any]) -> list[int]:
    return [example.row for example in batch]


def in_file_order(data: PromptData) -> list[Any]:
    """One epoch of batches of one prompt each."""
    return sorted((data.batch(number)[0] for number in range(data.num_rows)), key=lambda example: example.row)


def test_order_and_position(tmp_path: Path, tokenizer: Any):
    """Case D05. Seen to catch: replaying the first epoch's order after a resume; batches across the border of
    epochs; a position that is one batch off."""
    given, expected = case("D05")["input"], case("D05")["expected"]
    config = numbered(tmp_path, given["rows"])

    def order(epoch: int) -> np.ndarray:
        return np.array([given["permutation_epoch0"], given["permutation_epoch1"]][epoch])

    def data() -> PromptData:
        return PromptData(config, tokenizer, batch_size=given["batch"], order=order)

    undisturbed = data()
    assert [rows(next(undisturbed)) for _ in range(6)] == expected["batches"]
    stopped = data()
    assert stopped.state()["epoch"] == stopped.state()["batch_in_epoch"] == 0
    for _ in range(given["stop_after_step"]):
        next(stopped)
    state = json.loads(json.dumps(stopped.state()))
    assert {name: state[name] for name in expected["state_after_4"]} == expected["state_after_4"]
    resumed = data()
    next(resumed)
    resumed.restore(state)
    assert resumed.state() == state
    assert rows(next(resumed)) == expected["next_batch"]


@pytest.mark.parametrize("steps", [3, 5, 6])
def test_resume_continues_the_same_run(tmp_path: Path, tokenizer: Any, steps: int):
    """In the middle of an epoch and at its border, with the real order."""

    def data() -> PromptData:
        return PromptData(numbered(tmp_path, 7), tokenizer, batch_size=2, seed=5)

    undisturbed, stopped, resumed = data(), data(), data()
    for _ in range(steps):
        next(undisturbed), next(stopped)
    resumed.restore(stopped.state())
    for _ in range(4):
        assert [e.uid for e in next(resumed)] == [e.uid for e in next(undisturbed)]


def test_a_position_of_other_data_is_refused(tmp_path: Path, tokenizer: Any):
    """Seen to catch: applying a position to a file that has changed."""
    state = PromptData(numbered(tmp_path, 7), tokenizer, batch_size=2).state()
    with pytest.raises(UserError, match=r"num_rows = 7, this run has 8"):
        PromptData(numbered(tmp_path, 8), tokenizer, batch_size=2).restore(state)
    with pytest.raises(UserError, match=r"batch_size = 2, this run has 3"):
        PromptData(numbered(tmp_path, 7), tokenizer, batch_size=3).restore(state)
    other = DataConfig(train=write(tmp_path, [f"{i}+1=" for i in range(7)], answer="0"))
    with pytest.raises(UserError, match="belongs to rows_checksum"):
        PromptData(other, tokenizer, batch_size=2).restore(state)


def test_each_epoch_has_its_own_order(tmp_path: Path, tokenizer: Any):
    """Seen to catch: one order for all epochs; an order that ignores the seed."""
    orders = [tuple(epoch_order(seed, epoch, 20)) for seed in range(2) for epoch in range(2)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert epoch_order(3, 1, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    config = DataConfig(train=numbered(tmp_path, 6).train, shuffle=False)
    data = PromptData(config, tokenizer, batch_size=2)
    assert [rows(next(data)) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_the_order_is_the_same_for_ever():
    """Written down from numpy 2.4; a resumed run must find it on any version. Seen to catch:
    `Generator.permutation`, whose stream numpy may change."""
    assert permutation(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


def test_shards_over_processes(tmp_path: Path, tokenizer: Any):
    """Case D11. Seen to catch: each process shuffling for itself; slices that overlap."""
    given, expected = case("D11")["input"], case("D11")["expected"]
    hosts, batch_size = given["hosts"], given["global_batch"]
    config = numbered(tmp_path, given["rows"])
    whole = PromptData(config, tokenizer, batch_size=batch_size, seed=1)
    shards = [
        PromptData(config, tokenizer, batch_size=batch_size, seed=1, process_index=i, process_count=hosts)
        for i in range(hosts)
    ]
    assert {shard.steps_per_epoch for shard in shards} == {expected["steps"]}
    used = []
    for _ in range(expected["steps"]):
        parts = [rows(next(shard)) for shard in shards]
        assert {len(part) for part in parts} == {expected["rows_per_host_per_step"]}
        assert list(itertools.chain(*parts)) == rows(next(whole))
        used += list(itertools.chain(*parts))
    assert len(used) == len(set(used)) == expected["rows_used_per_epoch"]
    assert all(shard.state() == whole.state() for shard in shards)
    with pytest.raises(UserError, match="train_batch_size = 4 does not divide over 3"):
        PromptData(config, tokenizer, batch_size=4, process_count=3)


def test_step_counts_and_the_last_batch(tmp_path: Path, tokenizer: Any):
    """Case G09. Seen to catch: rounding up; dropping the last rows in evaluation."""
    given = case("G09")["input"]
    config = numbered(tmp_path, given["rows"])
    data = PromptData(config, tokenizer, batch_size=given["train_batch"])
    assert data.steps_per_epoch == case("G09")["expected"]["steps_per_epoch"]
    evaluated, _ = load_examples(config, tokenizer, config.train, max_prompt_tokens=config.max_prompt_tokens)
    assert rows(evaluated) == list(range(given["rows"]))


def test_equal_rows_are_different_groups(tmp_path: Path, tokenizer: Any):
    """Case D09. Seen to catch: naming the group after the row's text or id, or after the row without its epoch."""
    config = DataConfig(train=write(tmp_path, ["1+1=", "1+1="], answer="2", id="q1"))
    data = PromptData(config, tokenizer, batch_size=2)
    examples = next(data) + next(data)
    assert {example.uid for example in examples} == {"0@0", "1@0", "0@1", "1@1"}
    assert {example.epoch for example in examples} == {0, 1}
    assert all(example.metadata == {"id": "q1"} and example.answer == "2" for example in examples)


def test_empty_data(tmp_path: Path, tokenizer: Any):
    """Case D03. Seen to catch: an epoch of no batches, which divides by zero."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl holds no rows"):
        PromptData(DataConfig(train=str(empty)), tokenizer, batch_size=4)
    config = DataConfig(train=write(tmp_path, ["11+11="] * 3), max_prompt_tokens=4)
    with pytest.raises(UserError, match=r"All 3 rows.*data.max_prompt_tokens = 4"):
        PromptData(config, tokenizer, batch_size=4)
    with pytest.raises(UserError, match="3 usable rows, fewer than train_batch_size = 4"):
        PromptData(numbered(tmp_path, 3), tokenizer, batch_size=4)


def test_overlong_prompts(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture):
    """Seen to catch: a warning for each row."""
    path = write(tmp_path, ["1+1=", "11+11=", "2+2=", "33+33="], answer="0")

    def data(rule: str) -> PromptData:
        caplog.clear()
        config = DataConfig(train=path, max_prompt_tokens=5, overlong_prompts=rule)
        return PromptData(config, tokenizer, batch_size=1)

    with caplog.at_level(logging.WARNING):
        filtered = data("filter")
        assert rows(in_file_order(filtered)) == [0, 2]
        assert filtered.counts == {"rows": 4, "kept": 2, "filtered": 2, "truncated": 0}
        (record,) = caplog.records
        assert "2 of 4 rows" in record.message and "row 1, 3" in record.message

        left = data("truncate_left")
        assert left.counts == {"rows": 4, "kept": 4, "filtered": 0, "truncated": 2}
        assert in_file_order(left)[1].prompt_ids.tolist() == [1, 13, 4, 4, 15]
        assert in_file_order(left)[1].prompt == "<bos>+11="
    with pytest.raises(UserError, match=r"2 of 4 rows.*row 1, 3"):
        data("error")


def test_right_truncation_is_never_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Case T13: the header of the assistant's turn is cut off. Seen to catch: cutting without a word."""
    chat = [{"role": "user", "content": "hi hi hi hi"}]
    path = write(tmp_path, [chat, chat])
    tokenizer = toy_tokenizer(TEMPLATE)
    assert DataConfig().overlong_prompts in ("filter", "error")
    with caplog.at_level(logging.WARNING):
        config = DataConfig(train=path, max_prompt_tokens=5, overlong_prompts="truncate_right")
        data = PromptData(config, tokenizer, batch_size=1)
    assert in_file_order(data)[0].prompt_ids.tolist() == [1, 3, 4, 4, 4]  # <bos> U: hi hi hi, and no A:
    (record,) = caplog.records
    assert "2 of 2" in record.message and "header of the assistant's turn" in record.message


def test_a_huge_row_does_not_stall(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture):
    """Case D07. Seen to catch: handing 5 MB to the tokenizer to find that they are more than 512 tokens."""
    path = write(tmp_path, ["1+1="] * 50 + ["1" * 5_000_000] + ["2+2="] * 49)
    for rule, kept in (("filter", 99), ("truncate_left", 100), ("truncate_right", 100)):
        longest = []
        original = type(tokenizer).__call__

        def spy(self: Any, texts: Any, _longest: list = longest, _call: Any = original, **options: Any) -> Any:
            _longest.append(max(map(len, texts)))
            return _call(self, texts, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(tokenizer), "__call__", spy)
            data = PromptData(DataConfig(train=path, overlong_prompts=rule), tokenizer, batch_size=1)
        assert data.num_rows == kept
        assert max(longest) < 20_000
    assert "row 50" in caplog.text


def test_completions_to_imitate(tmp_path: Path, tokenizer: Any):
    path = write(tmp_path, ["1+1=", "2+2="], completion="1234", answer="2")
    config = DataConfig(train=path)
    examples = in_file_order(PromptData(config, tokenizer, batch_size=1, kind="completion"))
    assert examples[0].response_ids.tolist() == [4, 5, 6, 7, 2]
    assert in_file_order(PromptData(config, tokenizer, batch_size=1))[0].response_ids is None
    with pytest.raises(UserError, match="All 2 rows"):
        write(tmp_path, ["1+1=", "2+2="], completion="1234")
        PromptData(config, tokenizer, batch_size=1, max_response_tokens=4, kind="completion")
    cut = DataConfig(train=path, overlong_prompts="truncate_left")
    (example, _) = in_file_order(PromptData(cut, tokenizer, batch_size=1, max_response_tokens=4, kind="completion"))
    assert example.response_ids.tolist() == [4, 5, 6, 7]
    assert example.prompt == "1+1="
