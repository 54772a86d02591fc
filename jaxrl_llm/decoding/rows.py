"""The one array that goes to the device per dispatch, and the one that comes back.

All of a dispatch's inputs are columns of a single int32 matrix (floats and unsigned words keep their bits), so
that a dispatch costs one transfer whatever it holds. Both directions of the layout live here. Where rows ended stays on
the device as well, so that a dispatch can be queued before the tokens of the one before it are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.decoding.pages import pages_for
from jaxrl_llm.decoding.sample import Sample
from jaxrl_llm.decoding.sampling import SamplingRows
from jaxrl_llm.decoding.scheduler import Prefill

MAX_STOP_IDS = 16
"""Most ids that may end one response; a fixed width, so that no number of them compiles anew."""

_PROGRESS_COLUMNS = ("active", "token", "position", "generated")
_COUNT_COLUMNS = (*_PROGRESS_COLUMNS, "max_tokens", "min_tokens", "top_k", "source")
_FLOAT_COLUMNS = ("temperature", "top_p", "min_p")
_COLUMNS = (*_COUNT_COLUMNS, *_FLOAT_COLUMNS, "seed_0", "seed_1")
_WIDTH = len(_COLUMNS) + MAX_STOP_IDS


@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode dispatch on the device; see `scheduler.Sample`. ``sampling.generated`` is at its start."""

    active: Bool[Array, " B"]
    token: Int[Array, " B"]
    position: Int[Array, " B"]
    max_tokens: Int[Array, " B"]
    sampling: SamplingRows
    page_table: Int[Array, "B M"]


PROGRESS_WIDTH = len(_PROGRESS_COLUMNS)
"""Columns of what a dispatch leaves on the device for the one after it, a row per slot; see `pack_progress`."""


def decode_width(num_columns: int) -> int:
    """Columns of the packed matrix for a page table of ``num_columns``."""
    return _WIDTH + num_columns


def pack_decode(
    samples: Sequence[Sample | None],
    num_rows: int,
    num_columns: int,
    before: Sequence[Sample | None] | None = None,
) -> np.ndarray:
    """``int32 [num_rows, width]``: a row per sample; None and the rows behind the last are idle (greedy, so that they
    ask for nothing).

    ``before``: the rows of the dispatch before, not read yet: a sample that is among them goes on where its row there
    will end, which only the device knows. All others go on from where they are here.
    """
    source = {} if before is None else {sample: row for row, sample in enumerate(before, start=1)}
    packed = np.zeros((num_rows, decode_width(num_columns)), np.int32)
    packed[:, _COLUMNS.index("top_p")] = np.float32(1.0).view(np.int32)
    packed[:, len(_COLUMNS) : _WIDTH] = -1
    for row, sample in zip(packed, samples, strict=False):
        if sample is None:
            continue
        options = sample.sampling
        counts = [sample.last_token, sample.position, len(sample.tokens), sample.max_tokens, options.min_tokens]
        floats = np.array([options.temperature, options.top_p, options.min_p], np.float32)
        row[:8] = [1, *counts, options.top_k, source.get(sample, 0)]
        row[8:11] = floats.view(np.int32)
        row[11:13] = np.asarray(sample.seed, np.uint32).view(np.int32)
        row[len(_COLUMNS) : len(_COLUMNS) + len(sample.stop_ids)] = sample.stop_ids
        row[_WIDTH : _WIDTH + len(sample.pages)] = sample.pages
    return packed


def unpack_decode(packed: Int[Array, "B W"], progress: Int[Array, "N 4"]) -> DecodeRows:
    """``progress`` is that of the dispatch before; row ``source - 1`` of it counts where ``source`` is not 0."""
    column = {name: packed[:, index] for index, name in enumerate(_COLUMNS)}
    source = column["source"]
    carried = progress.at[jnp.maximum(source - 1, 0)].get(mode="promise_in_bounds")
    column |= {
        name: jnp.where(source > 0, carried[:, index], column[name]) for index, name in enumerate(_PROGRESS_COLUMNS)
    }
    floats = {name: jax.lax.bitcast_convert_type(column[name], jnp.float32) for name in _FLOAT_COLUMNS}
    seeds = packed[:, _COLUMNS.index("seed_0") : _COLUMNS.index("seed_1") + 1]
    sampling = SamplingRows(
        temperature=floats["temperature"],
        top_k=column["top_k"],
        top_p=floats["top_p"],
        min_p=floats["min_p"],
        seeds=jax.lax.bitcast_convert_type(seeds, jnp.uint32),
        generated=column["generated"],
        min_tokens=column["min_tokens"],
        stop_ids=packed[:, len(_COLUMNS) : _WIDTH],
    )
    return DecodeRows(
        active=column["active"] == 1,
        token=column["token"],
        position=column["position"],
        max_tokens=column["max_tokens"],
        sampling=sampling,
        page_table=packed[:, _WIDTH:],
    )


def pack_progress(
    active: Bool[Array, " B"],
    token: Int[Array, " B"],
    position: Int[Array, " B"],
    generated: Int[Array, " B"],
    num_slots: int,
) -> Int[Array, "N 4"]:
    """Where the rows of a dispatch ended. A row per slot however many the dispatch had, so that any can follow any."""
    columns = jnp.stack([active.astype(jnp.int32), token, position, generated], axis=1)
    return jnp.pad(columns, ((0, num_slots - columns.shape[0]), (0, 0)))


def pack_tokens(
    steps: Array, count: Int[Array, " B"], tokens: Int[Array, "n B"], logprobs: Float[Array, "n B"]
) -> Int[Array, "B w"]:
    """What a decode dispatch returns: per row the steps of the loop (the same in all), how many tokens the row made,
    n ids, and n log-probabilities."""
    bits = jax.lax.bitcast_convert_type(logprobs, jnp.int32)
    steps = jnp.broadcast_to(steps, count.shape)
    return jnp.concatenate([steps[:, None], count[:, None], tokens.T, bits.T], axis=1)


def unpack_tokens(packed: np.ndarray) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """``(steps, count [B], tokens [B, n], logprobs [B, n])`` on the host."""
    most = (packed.shape[1] - 2) // 2
    logprobs = np.ascontiguousarray(packed[:, 2 + most :]).view(np.float32)
    return int(packed[0, 0]), packed[:, 1], packed[:, 2 : 2 + most], logprobs


@dataclasses.dataclass(frozen=True)
class PrefillRow:
    """Pieces of sequences laid end to end in one row on the device. Padding is written nowhere.

    Attributes:
      sequence: 1, 2, … by piece; 0 is padding.
      page, offset: where the token's key and value go; page ids at or above the pool's size are dropped.
    """

    token: Int[Array, " T"]
    position: Int[Array, " T"]
    sequence: Int[Array, " T"]
    page: Int[Array, " T"]
    offset: Int[Array, " T"]


def pack_prefill(pieces: Sequence[Prefill], num_tokens: int, page_size: int, num_pages: int) -> np.ndarray:
    """``int32 [5, num_tokens]``, the fields of `PrefillRow`."""
    packed = np.zeros((5, num_tokens), np.int32)
    index = np.arange(num_tokens, dtype=np.int32)
    packed[3] = num_pages + index  # nowhere, and all different: the scatter is told that indices are unique
    begin = 0
    for number, piece in enumerate(pieces, start=1):
        count = len(piece.tokens)
        where = slice(begin, begin + count)
        position = piece.start + index[:count]
        packed[0, where] = piece.tokens
        packed[1, where] = position
        packed[2, where] = number
        packed[3, where] = np.asarray(piece.pages, np.int32)[position // page_size]
        packed[4, where] = position % page_size
        begin += count
    return packed


def unpack_prefill(packed: Int[Array, "5 T"]) -> PrefillRow:
    return PrefillRow(*packed)


def pack_context(pieces: Sequence[Prefill], num_columns: int, page_size: int) -> np.ndarray:
    """``int32 [4, num_columns]``: the cached pages that the pieces of a row read, as `prefill_attention` takes them."""
    packed = np.zeros((4, num_columns), np.int32)
    begin = 0
    for number, piece in enumerate(pieces, start=1):
        first = np.arange(0, piece.start, page_size, dtype=np.int32)
        where = slice(begin, begin + len(first))
        packed[0, where] = piece.pages[: len(first)]
        packed[1, where] = number
        packed[2, where] = first
        packed[3, where] = np.minimum(page_size, piece.start - first)
        begin += len(first)
    return packed


def bins_of(pieces: Sequence[Prefill], capacity: int, context_pages: int, page_size: int) -> list[list[Prefill]]:
    """Pieces in order, cut so that they fit, into rows of at most ``capacity`` tokens that read at most
    ``context_pages`` pages. No sequence may have more pages than that."""
    bins: list[list[Prefill]] = [[]]
    room, pages = capacity, context_pages
    for piece in pieces:
        begin = 0
        while begin < len(piece.tokens):
            start = piece.start + begin
            needed = pages_for(start, page_size)
            if room == 0 or needed > pages:
                bins.append([])
                room, pages = capacity, context_pages
            count = min(room, len(piece.tokens) - begin)
            bins[-1].append(Prefill(piece.tokens[begin : begin + count], piece.pages, start))
            begin, room, pages = begin + count, room - count, pages - needed
    return bins if bins[-1] else []
