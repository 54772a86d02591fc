"""Turns plain dicts into frozen dataclasses of options, and names every mistake on the way.

An option is a dataclass field made by ``option``: its type is the annotation; default, unit, range, choices
and what it does are in the field. Here is the only code that reads them, so an option is never checked in two
places.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

from jaxrl_llm.errors import UserError

Section = TypeVar("Section")

LARGEST_COUNT = 2**31 - 1
"""Counts go to the devices as int32."""

LARGEST_BYTES = 2**63 - 1

_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}


class OptionGroup:
    """Base of the frozen dataclasses of options: one that is made by hand is checked like one of a configuration file,
    by its class's name in place of a path."""

    def __post_init__(self) -> None:
        annotations = _annotations(type(self))
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            path = _join(type(self).__name__, field.name)
            value = _convert(annotations[field.name], getattr(self, field.name), field.metadata, path, type(self))
            object.__setattr__(self, field.name, value)


@functools.cache
def _annotations(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section)


def option(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] | None = None,
    infinite: bool = False,
    unit: str = "",
) -> Any:
    """A dataclass field that is an option of the configuration.

    Args:
      default: the default value; a class (``dict``, a section's dataclass) is called for a fresh one.
      doc: what the option does, in one or two sentences.
      low, high: the allowed range, ends included. For a tuple they hold for each element.
      above, below: the same, ends excluded.
      choices: the only allowed values.
      infinite: whether infinity is a value; elsewhere it is refused like NaN, since it only makes NaN later.
      unit: what the number counts (``tokens``, ``s``, ``bytes`` …).
    """
    metadata = {
        "doc": doc,
        "low": low,
        "high": high,
        "above": above,
        "below": below,
        "choices": choices,
        "infinite": infinite,
        "unit": unit,
    }
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown ``name``: the nearest known one, and all of them."""
    names = sorted(known)
    close, _ = _closest(name, {candidate: candidate for candidate in names})
    hint = f" Did you mean {close!r}?" if close else ""
    return f"{hint} Known: {', '.join(names) or 'none'}."


def unknown_option(path: str, name: str, known: Iterable[str], root: type) -> UserError:
    """The error for an unknown key ``name`` in the group ``path``.

    The nearest name is looked for in the group and, since an option is easily put in the wrong group, below
    ``root``.
    """
    siblings = sorted(known)
    near, near_ratio = _closest(name, {sibling: _join(path, sibling) for sibling in siblings})
    # Of several options of one name the outermost is meant: its path comes last here and stays. Options of this
    # group that it does not know are another algorithm's.
    others = (option_path for option_path, _ in describe(root) if option_path.rpartition(".")[0] != path)
    paths = sorted(others, key=lambda option_path: -option_path.count("."))
    far, far_ratio = _closest(name, {option_path.split(".")[-1]: option_path for option_path in paths})
    best = far if far_ratio > near_ratio else near
    hint = f" Did you mean {best!r}?" if best else ""
    return UserError(
        f"Unknown option {_join(path, name)!r}.{hint} Known in {path or 'the top level'}: {', '.join(siblings)}."
    )


def _closest(name: str, candidates: Mapping[str, str]) -> tuple[str | None, float]:
    """The value of the candidate whose key is most like ``name``, and how alike (0 to 1); None below 0.5."""
    best, best_ratio = None, 0.5
    for candidate, value in candidates.items():
        ratio = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
        if ratio > best_ratio:
            best, best_ratio = value, ratio
    return best, best_ratio


def build(section: type[Section], values: Any, path: str = "", root: type | None = None) -> Section:
    """Makes the frozen dataclass ``section`` from a nested mapping; options left out take their defaults.

    A section with a classmethod ``from_mapping(values, path, root)`` makes itself.

    Args:
      path: the dotted path of ``values`` in the configuration, for messages.
      root: the outermost section, where the nearest name of an unknown key is looked for.

    Raises:
      UserError: an unknown key at any depth, a wrong type, a value out of range. It names the full path.
    """
    root = root or section
    if isinstance(values, section):
        return values
    if not isinstance(values, Mapping):
        raise UserError(f"{path} = {values!r}: expected a group of options, got {_type_name(values)}.")
    from_mapping = getattr(section, "from_mapping", None)
    if from_mapping is not None:
        return from_mapping(values, path, root)
    fields = {field.name: field for field in dataclasses.fields(section)}  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in fields:
            raise unknown_option(path, str(key), fields, root)
    annotations = typing.get_type_hints(section)
    return section(
        **{
            name: _convert(annotations[name], value, fields[name].metadata, _join(path, name), root)
            for name, value in values.items()
        }
    )


def to_dict(section: Any) -> dict[str, Any]:
    """The inverse of ``build``: nested plain dicts, lists and numbers, ready for JSON."""
    if hasattr(section, "to_mapping"):
        return section.to_mapping()
    return {field.name: _plain(getattr(section, field.name)) for field in dataclasses.fields(section)}


def annotation_at(section: type, path: str, group: str = "", root: type | None = None) -> Any:
    """The type of the option at the dotted ``path`` below ``section``: a class, ``tuple[X, ...]``, a section, or
    Any in a free-form dict.

    Args:
      group: where ``section`` itself stands, and ``root`` the outermost section, for messages.

    Raises:
      UserError: there is no such option.
    """
    annotation: Any = section
    for key in path.split("."):
        if typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        elif dataclasses.is_dataclass(annotation):
            hints = typing.get_type_hints(annotation)
            if key not in hints:
                raise unknown_option(group, key, hints, root or section)
            annotation = hints[key]
        elif annotation is not Any:
            raise UserError(f"Unknown option '{_join(group, key)}': {group} is a single value, not a group.")
        group = _join(group, key)
    return annotation


def describe(section: type, path: str = "") -> Iterator[tuple[str, str]]:
    """Every option below ``section`` as (dotted path, one line: type, default, range, unit, what it does)."""
    if hasattr(section, "describe"):
        yield from section.describe(path)
        return
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, annotation = _join(path, field.name), hints[field.name]
        if _is_section(annotation):
            yield from describe(annotation, name)
            continue
        default = field.default if field.default is not dataclasses.MISSING else {}
        facts = [_annotation_name(annotation), f"default {default!r}", _allowed(field.metadata)]
        yield name, f"{', '.join(filter(None, facts))}. {field.metadata.get('doc', '')}"


def _convert(annotation: Any, value: Any, metadata: Mapping[str, Any], path: str, root: type) -> Any:
    if _is_section(annotation):
        return build(annotation, value, path, root)
    origin = typing.get_origin(annotation)
    if origin is dict:
        return _convert_dict(typing.get_args(annotation)[1], value, path, root)
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise UserError(f"{path} = {value!r}: expected a list or tuple, got {_type_name(value)}.")
        element = typing.get_args(annotation)[0]
        return tuple(_convert(element, item, metadata, f"{path}[{i}]", root) for i, item in enumerate(value))
    converted = _convert_scalar(annotation, value, path)
    _check_range(converted, metadata, path)
    return converted


def _is_section(annotation: Any) -> TypeGuard[type]:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _convert_dict(annotation: Any, value: Any, path: str, root: type) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{path} = {value!r}: expected a dict, got {_type_name(value)}.")
    for key in value:
        if not isinstance(key, str):
            raise UserError(f"{path} has the key {key!r}: keys must be strings.")
    if annotation is Any:
        return {key: _json_value(item, _join(path, key), root) for key, item in value.items()}
    return {key: _convert(annotation, item, {}, _join(path, key), root) for key, item in value.items()}


def _convert_scalar(annotation: type, value: Any, path: str) -> Any:
    # bool is a subclass of int: without this order True would be taken for the number 1.
    if annotation is bool:
        if isinstance(value, bool):
            return value
    elif annotation is int:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
    elif annotation is float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
    elif annotation is str:
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
    else:
        raise TypeError(f"{path}: options of type {annotation} are not supported")
    raise UserError(f"{path} = {value!r}: expected {_NAMES[annotation]}, got {_type_name(value)}.")


def _check_range(value: Any, metadata: Mapping[str, Any], path: str) -> None:
    choices, low, high = metadata.get("choices"), metadata.get("low"), metadata.get("high")
    above, below = metadata.get("above"), metadata.get("below")
    if isinstance(value, int) and not isinstance(value, bool) and high is None:
        high = LARGEST_BYTES if metadata.get("unit") == "bytes" else LARGEST_COUNT
        metadata = {**metadata, "high": high}
    bad_float = isinstance(value, float) and not (
        math.isfinite(value) or (metadata.get("infinite") and not math.isnan(value))
    )
    fits = (
        not bad_float
        and (choices is None or value in choices)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    if not fits:
        hint = nearest(value, choices) if choices and isinstance(value, str) else ""
        allowed = hint.lstrip() if hint else f"Allowed: {_allowed(metadata) or 'any finite number'}."
        raise UserError(f"{path} = {value!r} is not allowed. {allowed}")


def _json_value(value: Any, path: str, root: type) -> Any:
    """Values of a free-form dict, as they come back from JSON, so that a saved configuration equals a loaded
    one."""
    if isinstance(value, Mapping):
        return _convert_dict(Any, value, path, root)
    if isinstance(value, (list, tuple)):
        return [_json_value(item, f"{path}[{i}]", root) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(
        f"{path} = {value!r}: expected a number, string, bool, None, list or dict, got {_type_name(value)}."
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _allowed(metadata: Mapping[str, Any]) -> str:
    parts = []
    if metadata.get("choices") is not None:
        parts.append("one of " + ", ".join(repr(choice) for choice in metadata["choices"]))
    for key, sign in (("low", "≥"), ("above", ">"), ("high", "≤"), ("below", "<")):
        if metadata.get(key) is not None:
            bound = metadata[key]
            parts.append(f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}")
    text = " and ".join(parts)
    return f"{text} ({metadata['unit']})" if metadata.get("unit") and text else text or metadata.get("unit", "")


def _annotation_name(annotation: Any) -> str:
    return (
        annotation.__name__
        if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
        else str(annotation).replace("typing.", "")
    )


def _type_name(value: Any) -> str:
    return type(value).__name__


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def set_by_path(config: dict[str, Any], name: str, value: Any) -> None:
    """Sets ``a.b.c`` of a nested dict; unknown names are refused by `config.resolve`, which knows them all.

    Raises:
      UserError: ``a.b`` is a value, not a group.
    """
    *parents, last = name.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
        if not isinstance(config, dict):
            raise UserError(f"options[{name!r}]: {parent} is a single value, not a group of options.")
    config[last] = value
