"""Metrics and samples on disk: appended, resumable, readable by any JSON parser."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import resource

import numpy as np
import pytest

from jaxrl_llm.errors import RunStopped
from jaxrl_llm.observability.metrics import METRICS_FILE, TENSORBOARD_FOLDER, MetricsLog, read_metrics
from jaxrl_llm.observability.run_log import RunLog
from jaxrl_llm.observability.samples import SAMPLES_FILE, SamplesLog, read_samples
from jaxrl_llm.types import Example, Rollouts


def rollouts() -> Rollouts:
    example = Example(uid="3@0", prompt="7+8=", prompt_ids=np.array([1, 2], np.int32), answer={"value": 15})
    return Rollouts(
        examples=[example],
        group=np.zeros(2, np.int32),
        responses=[np.array([4, 2], np.int32), np.array([5], np.int32)],
        sampler_logprobs=None,
        texts=["15", "é"],
        finish_reasons=["stop", "length"],
        rewards=np.array([1.0, np.nan], np.float32),
        components={"exact": np.array([1.0, np.nan], np.float32)},
    )


def test_a_resumed_run_appends_and_its_later_lines_win(tmp_path: pathlib.Path):
    """Caught: the file opened with "w"; the first line of a step kept."""
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"reward/mean": step / 10, "eval/accuracy": 0.5})
    with MetricsLog(tmp_path, first_step=3) as log:
        log.write(3, {"reward/mean": 9.0})
        log.write(4, {"reward/mean": np.float32(0.5)})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["reward/mean"] for row in rows] == [0.1, 0.2, 9.0, 0.5]
    assert "eval/accuracy" not in rows[2]
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 5
    assert list((tmp_path / TENSORBOARD_FOLDER).glob("events.out.tfevents.*"))


def test_every_line_is_strict_json(tmp_path: pathlib.Path):
    """Caught: NaN written as JSON does not know it."""
    with MetricsLog(tmp_path) as log:
        log.write(1, {"reward/mean": math.nan, "a": math.inf, "b": 2})

    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    line = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=refuse)
    assert line == {"step": 1, "reward/mean": None, "a": None, "b": 2.0}
    assert math.isnan(read_metrics(tmp_path)[0]["reward/mean"])


def test_a_line_that_a_crash_cut_off_costs_only_itself(tmp_path: pathlib.Path):
    """Caught: the next line appended to the torn one, which lost both."""
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2')
    with MetricsLog(tmp_path) as log:
        log.write(2, {"a": 3.0})
    assert [row["a"] for row in read_metrics(tmp_path)] == [1.0, 3.0]


def test_a_reader_sees_each_line_at_once(tmp_path: pathlib.Path):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"a": 1.0})
        assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0}]


def test_samples_are_written_with_their_rewards(tmp_path: pathlib.Path):
    with SamplesLog(tmp_path) as log:
        log.write(5, rollouts())
    first, second = read_samples(tmp_path)
    assert first["step"] == 5 and first["prompt"] == "7+8=" and first["completion"] == "15"
    assert first["reward"] == 1.0 and first["rewards"] == {"exact": 1.0} and first["answer"] == {"value": 15}
    assert second["reward"] is None and second["rewards"] == {"exact": None} and second["completion"] == "é"
    assert (second["finish_reason"], second["response_tokens"]) == ("length", 1)


def test_an_answer_that_is_no_number_is_null(tmp_path: pathlib.Path):
    """As tables have it for none. Caught: the error of a strict writer, after the step and in place of its metrics."""
    given = rollouts()
    example = dataclasses.replace(given.examples[0], answer={"value": math.nan, "least": -math.inf, "text": "NaN é"})
    with SamplesLog(tmp_path) as log:
        log.write(1, dataclasses.replace(given, examples=[example]))
    assert read_samples(tmp_path)[0]["answer"] == {"value": None, "least": None, "text": "NaN é"}
    assert "Infinity" not in (tmp_path / "samples.jsonl").read_text()


def test_the_number_of_samples_is_bounded(tmp_path: pathlib.Path):
    with SamplesLog(tmp_path, samples_per_step=1) as log:
        log.write(1, rollouts())
    assert len(read_samples(tmp_path)) == 1


def test_the_log_of_a_run_leaves_its_files(tmp_path: pathlib.Path, capsys):
    log = RunLog(tmp_path)
    with log.progress(2):
        log.write(0, {"eval/accuracy": 0.3})
        log.write(1, {"reward/mean": 0.1, **log.machine_metrics()}, rollouts())
        log.write(2, {"reward/mean": 0.4, "eval/accuracy": 0.9}, rollouts())
    log.close()
    log.summary(2)
    assert {path.name for path in tmp_path.iterdir()} == {
        METRICS_FILE,
        "samples.jsonl",
        TENSORBOARD_FOLDER,
        "learning_curve.png",
    }
    shown = capsys.readouterr().err
    assert "0.300 → 0.900" in shown and "2 of 2" in shown
    assert read_metrics(tmp_path)[1]["memory/peak_bytes"] > 10**6


def test_a_run_without_a_folder_writes_nothing(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = RunLog(None)
    log.write(1, {"reward/mean": 0.1}, rollouts())
    log.summary(1)
    log.close()
    assert not list(tmp_path.iterdir())


def test_only_the_first_process_writes(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    log = RunLog(tmp_path)
    with log.progress(1):
        log.write(1, {"reward/mean": 0.1}, rollouts())
    log.summary(1)
    log.close()
    assert not list(tmp_path.iterdir())


def test_garbled_lines_cost_only_themselves(tmp_path: pathlib.Path):
    """What a crash of the machine or an editor leaves. Caught: bytes that are no UTF-8, a line that is no object."""
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1, "a": 1.0}\n\x00\x00\n\xff\xfe\n3\n{}\n{"step": 2, "a": 2.0}\n')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_any_text_comes_back(tmp_path: pathlib.Path):
    """Caught: a text cut at U+2028 or U+0085, which JSON does not escape; half a surrogate pair, which a data file may
    hold and UTF-8 has no bytes for."""
    text = "a\u2028b\u0085c\u000cd\n\ud800"
    with SamplesLog(tmp_path) as log:
        log.write(1, dataclasses.replace(rollouts(), texts=[text, "b"]))
    assert [sample["completion"] for sample in read_samples(tmp_path)] == [text, "b"]


def test_a_folder_that_cannot_be_written_to_stops_the_run(tmp_path: pathlib.Path):
    """Caught: the bare OSError."""
    (tmp_path / METRICS_FILE).mkdir()
    log = RunLog(tmp_path)
    with pytest.raises(RunStopped, match=r"The metrics of step 3 can't be written to .*: Is a directory"):
        log.write(3, {"reward/mean": 0.1})
    log.close()


def test_a_disk_that_is_full_for_the_events_alone_stops_the_run(tmp_path: pathlib.Path):
    """The file with the events is the longer one, and no file may grow beyond some size here."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = RunLog(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, allowed[1]))
    try:
        with pytest.raises(RunStopped, match=r"can't be written to .*: File too large"):
            for step in range(100):
                log.write(step, {"a": 0.1, "b": 0.2, "c": 0.3})
        assert (tmp_path / METRICS_FILE).stat().st_size < 1900
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    log.close()


@pytest.mark.parametrize("file", [METRICS_FILE, SAMPLES_FILE])
def test_a_full_disk_is_told_of_once(file: str, tmp_path: pathlib.Path):
    """The disk is full to the end. Caught: the bare error of a file that tries again where it is closed, in place of
    the one that says what to do; one at the close that nothing has told of taken for told."""
    (tmp_path / file).symlink_to("/dev/full")
    log = RunLog(tmp_path)
    with pytest.raises(RunStopped, match=r"The metrics of step 3 can't be written to .*: No space left on device"):
        log.write(3, {"reward/mean": 0.1}, rollouts())
    log.close()
    log = RunLog(tmp_path)
    late = log._files.enter_context(pathlib.Path("/dev/full").open("w"))  # noqa: SIM115
    late.write("kept until it is closed")
    with pytest.raises(RunStopped, match=r"The metrics of the last steps can't be written to"):
        log.close()


def test_a_picture_that_can_not_be_written_ends_no_run(tmp_path: pathlib.Path, capsys, caplog):
    """Caught: the error of a disk that is full after the last save, in place of the summary."""
    log = RunLog(tmp_path)
    log.write(1, {"reward/mean": 0.1, "eval/accuracy": 0.9})
    log.close()
    (tmp_path / "learning_curve.png").symlink_to("/dev/full")
    log.summary(1)
    assert "0.900" in capsys.readouterr().err and "learning curve can't be written" in caplog.text
