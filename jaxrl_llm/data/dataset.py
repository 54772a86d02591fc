"""Batches of prompts in a fixed order, with a position that is saved and restored exactly.

Rows are read, mapped, rendered and encoded once, at the start, because the length filter decides how many
batches an epoch has. After that a batch is a pure function of its number: the number gives the epoch and the
place in it, (seed, epoch) gives the order of rows, and every process takes its slice of the same global batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.columns import Kind
from jaxrl_llm.data.examples import fingerprint, load_examples
from jaxrl_llm.data.order import epoch_order
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Example

ENDLESS = 2**50  # batches; an epoch follows another for as long as the run lasts


class PromptData:
    """An endless iterator over this process's part of each training batch.

    Args:
      config: what is read and how; the file is ``config.train``.
      batch_size: prompts of the whole batch, over all processes.
      seed: fixes the order of every epoch.
      max_prompt_tokens: longest prompt; ``config.max_prompt_tokens`` unless given.
      max_response_tokens: longest completion, EOS included; rows with longer ones are treated like overlong
        prompts. None: no limit.
      kind: what the algorithm needs of a row, see `load_examples`.
      order: replaces ``epoch_order`` (called with the epoch), for tests.

    Attributes:
      counts: ``rows`` read, ``kept``, ``filtered``, ``truncated``, ``equal`` pairs; see `load_examples`.

    Raises:
      UserError: what `load_examples` refuses, or fewer rows than one batch.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        seed: int = 0,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        kind: Kind = "prompt",
        process_index: int = 0,
        process_count: int = 1,
        order: Callable[[int], np.ndarray] | None = None,
    ):
        self._path = config.train
        self._seed, self._batch_size, self._shuffle = seed, batch_size, config.shuffle
        self._process_index, self._process_count = process_index, process_count
        self._examples, self.counts = load_examples(
            config,
            tokenizer,
            self._path,
            max_prompt_tokens=max_prompt_tokens or config.max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            kind=kind,
        )
        self._order = order or (lambda epoch: epoch_order(seed, epoch, self.num_rows, shuffle=config.shuffle))
        self._order_cache: tuple[int, np.ndarray] | None = None
        if batch_size % process_count:
            raise UserError(
                f"train_batch_size = {batch_size} does not divide over {process_count} processes. Use a multiple."
            )
        if not self.steps_per_epoch:
            raise UserError(
                f"{self._path} has {self.num_rows} usable rows, fewer than train_batch_size = {batch_size}, so no "
                f"batch is full ({self.counts['filtered']} of {self.counts['rows']} rows were filtered as longer than "
                "data.max_prompt_tokens). Lower train_batch_size, raise the limit, or add rows."
            )
        # No prefetching threads: everything is encoded, and a batch is a list of references.
        batches = grain.MapDataset.range(ENDLESS).map(self.batch)
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    @property
    def num_rows(self) -> int:
        """Rows left after the filter."""
        return len(self._examples)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass; the rows left over wait for the next epoch's order."""
        return self.num_rows // self._batch_size

    def fingerprint(self) -> int:
        """Of the rows and their order in the file; the same where they are."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> int:
        return fingerprint(self._examples)

    def __iter__(self) -> PromptData:
        return self

    def __next__(self) -> list[Example]:
        return next(self._iterator)

    def batch(self, number: int) -> list[Example]:
        """This process's slice of batch ``number``, counted from 0 over all epochs."""
        epoch, batch_in_epoch = divmod(int(number), self.steps_per_epoch)
        if self._order_cache is None or self._order_cache[0] != epoch:
            self._order_cache = (epoch, self._order(epoch))
        share = self._batch_size // self._process_count
        start = batch_in_epoch * self._batch_size + self._process_index * share
        rows = self._order_cache[1][start : start + share]
        return [self._at_epoch(self._examples[row], epoch) for row in rows]

    def example(self, row: int, epoch: int) -> Example:
        """The row of that index in its file, as a batch of that epoch holds it."""
        return self._at_epoch(self._by_row[row], epoch)

    @functools.cached_property
    def _by_row(self) -> dict[int, Example]:
        return {example.row: example for example in self._examples}

    @staticmethod
    def _at_epoch(example: Example, epoch: int) -> Example:
        return dataclasses.replace(example, uid=f"{example.row}@{epoch}", epoch=epoch)

    def state(self) -> dict[str, Any]:
        """The position of the next batch as plain JSON, the same on all processes."""
        epoch, batch_in_epoch = divmod(self._iterator.get_state()["next_index"], self.steps_per_epoch)
        return {"epoch": epoch, "batch_in_epoch": batch_in_epoch, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues at a position that ``state`` gave, possibly on another number of processes.

        Raises:
          UserError: the position was saved for other data, another seed or batch size, so it names other rows.
        """
        for name, now in self._identity().items():
            if state.get(name, now) != now:  # an earlier version did not save all
                raise UserError(
                    f"The saved data position belongs to {name} = {state[name]!r}, this run has {now!r} "
                    f"(data.train = {self._path}): the order of rows would differ. Restore the old value, or start a "
                    "new run from the checkpoint's model in another workdir."
                )
        self._iterator.set_state({"next_index": state["epoch"] * self.steps_per_epoch + state["batch_in_epoch"]})

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows_checksum": self.fingerprint(),
        }
