"""The folder of a run: claimed by one process at a time, and never continued as another run by mistake."""

from __future__ import annotations

import fcntl
import os
import pathlib
import weakref
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.config import PlacementConfig, RunConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.options import to_dict

CONFIG_FILE = "config.json"

RESULTS = ("checkpoints/*", "metrics.jsonl", "samples.jsonl")
"""What a run leaves; a folder with none of them holds no run yet."""

FREE_TO_CHANGE = (
    "num_steps",
    "data.num_epochs",
    "log_level",
    "watchdog_s",
    "processes.",
    *(f"placement.{role}." for role in PlacementConfig.roles()),
    "profile_steps",
    "model.remat",
    "model.layers",
    "rollout.num_slots",
    "rollout.page_size",
    "rollout.num_pages",
    "rollout.tokens_per_dispatch",
    "rollout.prefill_tokens",
    "rollout.attention",
    "rollout.tensor",
    "training.micro_batch_tokens",
    "training.row_tokens",
    "training.logprob_chunk_tokens",
    "training.logprob_vocab_chunk",
    "training.pipeline_",
    "training.sequence_parallel",
    "reward_runner.num_workers",
    "mesh.",
    "hybrid_engine.",
    "checkpoint.",
    "eval.",
    "checks.",
    "data.eval",
)
"""Options that may differ when a run is continued: they change speed, memory or what is watched, not what is
learned (beyond rounding). A longer run (`num_steps`, `data.num_epochs`) also stretches a cosine or linear schedule."""


class Workdir:
    """A claimed folder. Holds a lock until `close`, so that two processes can't write into one run.

    Attributes:
      path: the folder.
      resumed: whether it held a run already.
    """

    def __init__(self, path: pathlib.Path | str, config: RunConfig):
        """Claims `path` for the run that `config` describes and saves the configuration there.

        Raises:
          UserError: the folder belongs to a different run, is in use, or holds files of something else.
        """
        if path == "":
            raise UserError("workdir is empty: name a folder for the run, or give None to keep nothing.")
        self.path = pathlib.Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--workdir={self.path} is a file; it must be a folder. Choose another --workdir.")
        saved = self.path / CONFIG_FILE
        results = [file for pattern in RESULTS for file in self.path.glob(pattern)]
        self.resumed = saved.exists() and bool(results)  # one that failed before its first step may be changed
        before = _saved(saved, self.path) if saved.exists() else None
        if self.resumed and before is not None:
            _refuse_another_run(before, config, self.path)
        elif results:
            raise UserError(
                f"--workdir={self.path} holds results but no {CONFIG_FILE}, so it cannot be continued, and it is not "
                "overwritten. Choose another --workdir, or move those files away."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise _not_writable(self.path, error) from error
        self._unlock = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise UserError(
                f"--workdir={self.path} is in use by another process. Wait for it, or choose another --workdir."
            ) from None
        partial = saved.with_suffix(".json.partial")
        try:
            configs.save(config, partial)
            partial.replace(saved)
        except OSError as error:
            self._unlock()
            raise _not_writable(self.path, error) from error

    def close(self) -> None:
        """Gives the folder free."""
        self._unlock()


def _not_writable(path: pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"--workdir={path} can't be written to: {error.strerror}. Choose a folder that you may write to, on a disk "
        "with free space."
    )


def _saved(file: pathlib.Path, path: pathlib.Path) -> RunConfig:
    """The configuration that a run has left in `path`. Another program's ``config.json`` (a model's folder has one) is
    not overwritten."""
    try:
        return configs.load(file)
    except UserError as error:
        raise UserError(
            f"--workdir={path} holds a {CONFIG_FILE} that no run of this version has written, so it is neither "
            f"continued nor overwritten ({error}) Choose another --workdir, or move that file away."
        ) from error


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        out |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return out


def _refuse_another_run(saved: RunConfig, config: RunConfig, path: pathlib.Path) -> None:
    before, now = _flat(to_dict(saved)), _flat(to_dict(config))
    changed = [
        f"{key} (was {before.get(key)!r}, is {now.get(key)!r})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(FREE_TO_CHANGE)
    ]
    if changed:
        raise UserError(
            f"--workdir={path} holds a run with other options: {'; '.join(changed[:6])}"
            f"{' …' if len(changed) > 6 else ''}. Continuing would mix two runs. Give the old values back, or choose "
            "another --workdir."
        )
