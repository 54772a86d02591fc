"""Configuration files and ``--config.a.b=3``: from the command line to an edited ``ConfigDict``.

``ml_collections.config_flags`` would do most of it, but it looks an option's type up before
``--config.algorithm.name=`` has brought the option, and its errors don't know our names.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import pathlib
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm.config import ConfigDict, option_type
from jaxrl_llm.errors import UserError, readable

PREFIX = "--config."


def read_config(location: str, overrides: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """Runs ``get_config()`` of a configuration file, then applies the overrides.

    Args:
      location: ``path.py``, or ``path.py:argument`` for a file whose ``get_config`` takes one string.
      overrides: pairs of a dotted path and the text of its value, as ``split_overrides`` returns them.

    Raises:
      UserError: there is no such file, it has no ``get_config``, or an override names an unknown option or has a
        value of the wrong type.
    """
    path, colon, argument = location.partition(":")
    with readable(f"--config={location}"):
        if not pathlib.Path(path).is_file():
            raise UserError(f"--config={location}: there is no file {path!r}. Give a Python file with get_config().")
        pathlib.Path(path).read_bytes()
    module = _run_file(path)
    if not hasattr(module, "get_config"):
        raise UserError(f"--config={location}: {path} has no function get_config().")
    try:
        config = module.get_config(argument) if colon else module.get_config()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a misspelt option of a ConfigDict, or any mistake of the file's own
        line = _line_in(path, error)
        if line is None:  # nothing in the file ran: the call itself does not fit the function
            raise UserError(
                f"--config={location}: {error}. FILE.py:ARGUMENT needs get_config(argument), and FILE.py alone "
                "get_config()."
            ) from error
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{path}: get_config() returned a {type(config).__name__}; it must return a ConfigDict.")
    for option_path, text in _algorithm_first(overrides):
        _override(config, option_path, text)
    return config


def split_overrides(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Separates ``--config.a.b=3`` and ``--config.a.b 3`` from the other arguments.

    Raises:
      UserError: an override has no value.
    """
    overrides, others, remaining = [], [], list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith(PREFIX):
            others.append(argument)
            continue
        path, equals, text = argument.removeprefix(PREFIX).partition("=")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise UserError(f"{argument} has no value: write {argument}=VALUE.")
            text = remaining.pop(0)
        overrides.append((path, text))
    return overrides, others


def _run_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("jaxrl_llm_config", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config={path}: a configuration is a Python file whose name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    try:
        with _neighbours(pathlib.Path(path).resolve().parent):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid Python: {error.msg}.") from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a failed import, or any mistake of the file's own
        raise UserError(f"{path}, line {_line_in(path, error)}: {type(error).__name__}: {error}") from error
    return module


@contextlib.contextmanager
def _neighbours(folder: pathlib.Path) -> Iterator[None]:
    """A configuration may import one that stands beside it, and change some of it."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:  # the next configuration may have a neighbour of the same name
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and pathlib.Path(file).parent == folder:
                del sys.modules[name]


def _line_in(path: str, error: BaseException) -> int | None:
    """The innermost line of the file at ``path`` that ``error`` passed through. Frames name it by an absolute path."""
    file = pathlib.Path(path).resolve()
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame.lineno for frame in frames if pathlib.Path(frame.filename).resolve() == file), None)


def _algorithm_first(overrides: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The algorithm's name decides which options there are, wherever it stands on the command line."""
    return sorted(overrides, key=lambda pair: pair[0] != "algorithm.name")


def _override(config: ConfigDict, path: str, text: str) -> None:
    *parents, last = path.split(".")
    annotation = option_type(path, algorithm=str(config.algorithm.name))
    value = _parse(annotation, text, path)
    group = config
    for parent in parents:
        if parent not in group:
            group[parent] = {}  # a new reward, or a key of a free-form dict
        group = group[parent]
    group[last] = value


def _parse(annotation: Any, text: str, path: str) -> Any:
    """The value that ``text`` spells for an option of this type; ranges are checked by ``config.resolve``."""
    if annotation is str:
        return text
    if annotation is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UserError(f"{PREFIX}{path}={text}: expected true or false.")
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            kind = "a whole number" if annotation is int else "a number"
            raise UserError(f"{PREFIX}{path}={text}: expected {kind}.") from None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # what `literal_eval` is said to raise
        if annotation is Any:
            return text  # an option of a reward, most likely a string
        example = '\'("a", "b")\'' if typing.get_origin(annotation) is tuple else "'{\"key\": 1}'"
        raise UserError(f"{PREFIX}{path}={text}: expected a Python literal such as {example}.") from None


def default_workdir(location: str) -> pathlib.Path:
    """``outputs/<name of the configuration file>`` below the current folder."""
    return pathlib.Path("outputs") / pathlib.Path(location.partition(":")[0]).stem
