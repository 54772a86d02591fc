"""The numeric and behavioural cases of `cases.json`, drawn from public bug reports and papers."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def _decode(value: Any) -> Any:
    """The file writes the floats that JSON lacks as strings."""
    if isinstance(value, dict):
        return {key: _decode(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    return _FLOATS.get(value, value) if isinstance(value, str) else value


@functools.cache
def _cases() -> dict[str, dict[str, Any]]:
    loaded = json.loads(pathlib.Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))
    return {entry["id"]: _decode(entry) for group in loaded.values() if isinstance(group, list) for entry in group}


def case(name: str) -> dict[str, Any]:
    """The case of that name, such as `L01`: its `input` and `expected`, with NaN and infinities as floats."""
    return _cases()[name]
