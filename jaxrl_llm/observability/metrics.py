"""``metrics.jsonl`` and TensorBoard events: one line per step, appended, never rewritten."""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricsLog:
    """Appends the metrics of each step to a work folder; a resumed run goes on in the same files.

    Only one process of a run may have one. A step that was done again is written again; ``read_metrics`` then takes
    the later line, and TensorBoard hides the earlier points by the purge step of the resumed run.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, first_step: int = 0):
        """Opens the files, and makes the folder where needed.

        Args:
          first_step: the next step to be written: TensorBoard drops what a killed run wrote from there on.
        """
        folder = pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open_for_lines(folder / METRICS_FILE)
        events = folder / TENSORBOARD_FOLDER
        events.mkdir(exist_ok=True)
        # Not its `SummaryWriter`: that one's thread dies of a full disk, and the run would wait for it forever.
        self._events = EventsWriter(str(events / "events"))
        if first_step:
            self._write_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line; a value that is not finite is written as null, since JSON has no other word for it."""
        values = {name: float(value) for name, value in metrics.items()}
        write_line(self._file, {"step": step, **{name: _finite(value) for name, value in values.items()}})
        for name, value in values.items():
            if math.isfinite(value):
                self._write_event(Event(step=step, summary=scalar(name, value)))
        self._events.flush()

    def _write_event(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)

    def close(self) -> None:
        """Writes out what is buffered."""
        try:
            self._file.close()
        finally:
            self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The steps of a run in order, each with its ``step`` and metrics; null comes back as NaN.

    Of several lines for one step (a step done again after a resume) the last one counts. A line cut off by a crash is
    left out.
    """
    path = pathlib.Path(workdir) / METRICS_FILE
    rows: dict[int, dict[str, float]] = {}
    for row in read_lines(path):
        rows[row["step"]] = {name: math.nan if value is None else value for name, value in row.items()}
    return [rows[step] for step in sorted(rows)]


def open_for_lines(path: pathlib.Path) -> Any:
    """Opens a file to append JSON lines, after ending a line that a crash cut off."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    # Line-buffered: a reader sees whole lines at once. Half a surrogate pair (from a data file) is written as its JSON
    # escape, since UTF-8 has no bytes for it.
    file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    if torn:
        file.write("\n")
    return file


def write_line(file: Any, record: Mapping[str, Any]) -> None:
    """Appends one JSON object; values that JSON doesn't know (an answer of any type) become their text, and numbers
    that it doesn't know (an answer again: NaN stands for none in many a table) null."""
    text = json.dumps(record, ensure_ascii=False, default=str)
    if any(word in text for word in ("NaN", "Infinity")):  # or a text says so
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False, allow_nan=False)
    file.write(text + "\n")


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Every complete JSON line of a file that names a step."""
    rows = []
    for line in path.read_bytes().split(b"\n"):  # not `splitlines`: a text may hold other separators, such as U+2028
        try:
            row = json.loads(line)
        except ValueError:  # cut off or garbled by a crash: `open_for_lines` ended it, and its step was done again
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
