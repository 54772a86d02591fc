"""Scored rollouts as JSON values and back, bit for bit: those that a checkpoint holds because no step has learned from
them yet.

A row of the training data is named, not copied: answers and other columns may be anything that a data file holds. What
an algorithm may have made of its prompt stands beside the name.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.types import Example, Rollouts

RowOf = Callable[[int, int], Example]
"""The example of a row of the training data, given the row and the epoch (`PromptData.example`)."""

_ARRAYS = ("group", "rewards", "baselines")
_LISTS = ("responses", "sampler_logprobs")


def to_json(rollouts: Rollouts) -> dict[str, Any]:
    """Plain values for `json`; arrays are their bytes in base64 with dtype and shape."""
    return {
        "examples": [_named(example) for example in rollouts.examples],
        "texts": list(rollouts.texts),
        "finish_reasons": list(rollouts.finish_reasons),
        "metrics": dict(rollouts.metrics),
        "components": {name: _array(values) for name, values in rollouts.components.items()},
        "turns": [to_json(turn) for turn in rollouts.turns],
        **{name: _optional(_array, getattr(rollouts, name)) for name in _ARRAYS},
        **{name: _optional(_ragged, getattr(rollouts, name)) for name in _LISTS},
    }


def from_json(values: dict[str, Any], row_of: RowOf) -> Rollouts:
    """What `to_json` was given, with the rows' other columns from `row_of`."""
    return Rollouts(
        examples=[_example(example, row_of) for example in values["examples"]],
        texts=values["texts"],
        finish_reasons=values["finish_reasons"],
        metrics=values["metrics"],
        components={name: _array_of(array) for name, array in values["components"].items()},
        turns=[from_json(turn, row_of) for turn in values["turns"]],
        **{name: _optional(_array_of, values[name]) for name in _ARRAYS},
        **{name: _optional(_ragged_of, values[name]) for name in _LISTS},
    )


def _optional(convert: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else convert(value)


def _named(example: Example) -> dict[str, Any]:
    named = {name: getattr(example, name) for name in ("row", "epoch", "uid", "prompt", "own_tokens", "sample")}
    return {**named, "prompt_ids": example.prompt_ids.tolist()}


def _example(values: dict[str, Any], row_of: RowOf) -> Example:
    changed = {**values, "prompt_ids": np.array(values["prompt_ids"], np.int32)}
    return dataclasses.replace(row_of(values["row"], values["epoch"]), **changed)


def _array(array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    little = array.astype(array.dtype.newbyteorder("<"))
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "base64": base64.b64encode(little.tobytes()).decode("ascii"),
    }


def _array_of(values: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(values["dtype"])
    flat = np.frombuffer(base64.b64decode(values["base64"]), dtype.newbyteorder("<"))
    return flat.reshape(values["shape"]).astype(dtype)


def _ragged(arrays: Sequence[np.ndarray]) -> dict[str, Any]:
    """Arrays ``[t]`` of one dtype, end to end."""
    lengths = [len(array) for array in arrays]
    return {"lengths": lengths, "flat": _array(np.concatenate(arrays) if arrays else np.zeros(0, np.int32))}


def _ragged_of(values: dict[str, Any]) -> list[np.ndarray]:
    flat = _array_of(values["flat"])
    return np.split(flat, np.cumsum(values["lengths"])[:-1]) if values["lengths"] else []
