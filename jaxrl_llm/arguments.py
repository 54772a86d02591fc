"""Arguments of the public Python calls, checked against their annotations: the mistake is told where it was made."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from jaxrl_llm.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])

_NAMES = {
    Any: "anything",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    os.PathLike: "a path",
    type(None): "None",
    collections.abc.Sequence: "a list",
    collections.abc.Mapping: "a dict",
    collections.abc.Callable: "a function",
}


def checked(function: Function) -> Function:
    """`function`, refusing arguments of another type than it is annotated with.

    A whole number passes for a number (numpy's too), an array or a table's column for a list; what a list holds is for
    the function to check, keys and values of a dict are looked at.

    Raises (when called):
      UserError: it names the argument, what it was and what is expected.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        hints = _hints(function)
        for name, value in signature.bind(*arguments, **named).arguments.items():
            annotation = hints.get(name, Any)
            if not _fits(annotation, value):
                what = "" if function.__name__ == "__init__" else f"{function.__name__}: "
                raise UserError(
                    f"{what}{name} = {value!r:.80}: expected {_described(annotation)}, got {type(value).__name__}."
                )
        return function(*arguments, **named)

    return typing.cast(Function, call)


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else (annotation,)


_UNIONS = (types.UnionType, typing.Union)


def _fits(annotation: Any, value: Any) -> bool:
    return any(_fits_one(one, value) for one in _alternatives(annotation))


def _fits_one(annotation: Any, value: Any) -> bool:
    kind = typing.get_origin(annotation) or annotation
    if kind is Any:
        return True
    if kind in (int, float):  # bool is a subclass of int
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if kind is collections.abc.Sequence:
        listed = hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ()
        return listed and not isinstance(value, bytes | collections.abc.Mapping)
    if kind is collections.abc.Mapping:
        key, item = typing.get_args(annotation) or (Any, Any)
        return isinstance(value, kind) and all(_fits(key, k) and _fits(item, v) for k, v in value.items())
    return isinstance(value, kind) if isinstance(kind, type) else True


def _described(annotation: Any) -> str:
    names = []
    for one in _alternatives(annotation):
        kind = typing.get_origin(one) or one
        name = _NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")
        if kind is collections.abc.Mapping:
            key, item = (_described(part) for part in typing.get_args(one) or (Any, Any))
            name = f"{name} ({key}: {item})"
        names.append(name)
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
