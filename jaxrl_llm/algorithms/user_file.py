"""An algorithm out of a user's own file: ``algorithm.name = path.py:its_name``. Checked before any device work."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms import aggregation
from jaxrl_llm.algorithms.interface import Algorithm, Role
from jaxrl_llm.errors import UserError, readable
from jaxrl_llm.options import build, to_dict

_ARGUMENTS = {
    "roles": ("options",),
    "init": ("options",),
    "collect": ("context", "examples"),
    "prepare": ("context", "rollouts"),
    "after_step": ("options", "memory", "metrics"),
    "rests": ("options", "config", "role"),
    "validate": ("options", "config"),
    "metric_name": ("role", "metric"),
    "loss_aggregation": ("options",),
    "extras": ("options",),
    "divergence": ("options",),
    "longest": ("options", "prompt", "response"),
    "evaluate": ("context", "examples"),
    "answer": ("context", "examples", "samples", "temperature"),
}
_OPTIONAL = ("evaluate", "answer")
_LOSS_ARGUMENTS = ("options", "outputs", "rows")
_SECTIONS = ("policy", "critic", "reference", "teacher")
_DATA = ("prompt", "completion", "preference", "label")


def load(name: str) -> Algorithm:
    """The algorithm that ``path.py:its_name`` names. The file is the user's own, and runs as part of this program.

    Raises:
      UserError: no such file or name, a file that fails, or something that is no algorithm.
    """
    file, _, attribute = name.rpartition(":")
    path = pathlib.Path(file)
    with readable(f"algorithm.name = {name!r}: {file}"):
        if path.suffix != ".py" or not path.is_file():
            raise UserError(
                f"algorithm.name = {name!r}: there is no Python file {file!r}. Give 'path.py:its_name', the path from "
                "the folder you start in."
            )
    # Not resolved: what a link leads to may have a name of another ending.
    return _load(pathlib.Path(os.path.abspath(path)), attribute, name, path.stat().st_mtime_ns)


@functools.cache  # one object by version of the file: a configuration that is read twice is the same one
def _load(path: pathlib.Path, attribute: str, name: str, _changed_ns: int) -> Algorithm:
    specification = importlib.util.spec_from_file_location(f"_jaxrl_llm_user_{path.stem}_{_changed_ns}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises is told with its name
        raise UserError(f"algorithm.name = {name!r}: {path} fails: {type(error).__name__}: {error}.") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Algorithm):
        kind = "has no such name" if found is None else f"has a {type(found).__name__} there"
        own = [key for key, value in vars(module).items() if isinstance(value, Algorithm)]
        raise UserError(
            f"algorithm.name = {name!r}: {path} {kind}; expected an Algorithm "
            f"(jaxrl_llm.algorithms.interface). Algorithms in it: {', '.join(own) or 'none'}."
        )
    try:
        problems = check(found)
    except Exception as error:
        raise UserError(
            f"algorithm.name = {name!r}: with the defaults of its options it fails: {type(error).__name__}: {error}."
        ) from error
    if problems:
        raise UserError(f"algorithm.name = {name!r}: {' '.join(problems)}")
    return found


def check(algorithm: Algorithm) -> list[str]:
    """What is wrong with an algorithm, as far as it can be told without running it on anything."""
    options = algorithm.options
    parameters = getattr(options, "__dataclass_params__", None)  # what `dataclass` itself was told
    frozen = isinstance(options, type) and parameters is not None and parameters.frozen
    if not frozen:
        return [f"options is {options!r}; it must be a frozen dataclass, with fields made by jaxrl_llm.config.option."]
    problems = [
        f"options.{field.name} has no default; make it with jaxrl_llm.config.option."
        for field in dataclasses.fields(options)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for part, arguments in _ARGUMENTS.items():
        function = getattr(algorithm, part)
        if function is not None or part not in _OPTIONAL:
            problems += _signature(part, function, arguments)
    losses = algorithm.losses
    is_mapping = isinstance(losses, Mapping)
    by_role = {str(role): loss for role, loss in losses.items()} if isinstance(losses, Mapping) else {"": losses}
    for role, loss in by_role.items():
        problems += _signature(f"losses[{role!r}]" if role else "losses", loss, _LOSS_ARGUMENTS)
    if algorithm.data not in _DATA:
        problems.append(f"data is {algorithm.data!r}; it is one of {', '.join(_DATA)}.")
    if problems:
        return problems
    defaults = options()
    build(options, to_dict(defaults), "algorithm")  # types that no configuration can hold, defaults out of range
    if algorithm.loss_aggregation(defaults) not in aggregation.MODES:
        problems.append(
            f"loss_aggregation gives {algorithm.loss_aggregation(defaults)!r}; it is one of "
            f"{', '.join(aggregation.MODES)}."
        )
    roles = algorithm.roles(defaults)
    if not isinstance(roles, tuple) or not all(isinstance(role, Role) for role in roles):
        return [*problems, f"roles gives {roles!r}; it must be a tuple of Role."]
    if not any(role.trained for role in roles):
        problems.append("roles names no trained role; POLICY is the usual one.")
    if algorithm.generates and not any(role.name == "policy" for role in roles):
        problems.append("it generates, and roles names no policy; add POLICY, or set generates=False.")
    for role in roles:
        if role.section not in _SECTIONS:
            problems.append(
                f"the role {role.name!r} has no section of the configuration; give it settings= one of "
                f"{', '.join(_SECTIONS)}."
            )
        if is_mapping and role.trained and role.name not in by_role:
            problems.append(f"losses has none for the trained role {role.name!r}.")
    return problems


def _signature(part: str, function: Callable[..., Any] | Any, arguments: tuple[str, ...]) -> list[str]:
    if not callable(function):
        return [f"{part} is {function!r}; it must be a function of ({', '.join(arguments)})."]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return [f"{part} is called as {part}({', '.join(arguments)}), which does not fit: {error}."]
    except ValueError:  # a builtin without a signature is called and will tell
        return []
    return []
