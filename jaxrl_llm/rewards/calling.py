"""How a reward function is found and called, in the worker process. No jax here.

Accepted are functions of one sample, ``f(prompt, completion, answer, **metadata)``, and TRL's functions of a batch,
``f(prompts, completions, **columns)``, which get lists of length one so that a time-out stops one sample only.
A function receives what its signature names: prompt, completion, answer, the row's other columns, and verl's
names ``solution_str`` (completion) and ``ground_truth`` (answer); with ``**kwargs`` it receives everything.
A built-in reward receives no other column: a column that happens to be called ``correct`` must not set its option.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.functions import BUILTIN

Call = Callable[[str, str, Any, Mapping[str, Any]], Any]
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find_function(target: str) -> Callable[..., Any]:
    """A built-in name, ``module:function`` or ``path.py:function``.

    Raises:
      LookupError: there is none of that name. Errors of the imported module come through as they are.
    """
    if ":" not in target:
        if target not in BUILTIN:
            raise LookupError(
                f"there is no built-in reward {target!r} (known: {', '.join(BUILTIN)}); your own function is "
                "'module:function' or 'path.py:function'"
            )
        return BUILTIN[target]
    source, _, name = target.rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise LookupError(f"{source} has no function {name!r}")
    return function


def _load_file(path: Path) -> Any:
    name = f"_reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise LookupError(f"the file {path} does not exist (current folder: {Path.cwd()})")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle in that file look themselves up
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours
    spec.loader.exec_module(module)
    return module


def bind(function: Callable[..., Any], options: Mapping[str, Any]) -> Call:
    """Adapts a user's function to ``call(prompt, completion, answer, metadata)``.

    Raises:
      ValueError: ``options`` has a name that the function does not take, or lacks one that it needs.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = {name for name, p in parameters.items() if p.kind in _KEYWORD}
    unknown = [name for name in options if name not in named and not takes_all]
    if unknown:
        raise ValueError(f"it has no option {', '.join(unknown)}; it takes {', '.join(sorted(named))}")
    required = {
        name
        for name, p in parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is p.empty and name not in options
    }
    builtin = function in BUILTIN.values()
    if builtin and required:
        raise ValueError(f"it needs the option {', '.join(sorted(required))}")
    plural = bool(named & {"prompts", "completions"})

    def call(prompt: str, completion: str, answer: Any, metadata: Mapping[str, Any]) -> Any:
        own = {"prompt": prompt, "completion": completion, "answer": answer}
        if plural:
            own = {"prompts": prompt, "completions": completion, "answer": answer, "answers": answer}
        aliases = {"solution_str": completion, "ground_truth": answer}
        available = own if builtin else {**aliases, **metadata, **own}
        if takes_all:
            chosen = {n: v for n, v in available.items() if n not in aliases or n in metadata or n in named}
        else:
            chosen = {n: v for n, v in available.items() if n in named}
        if not plural:
            return function(**{**chosen, **options})
        result = function(**{**{n: [v] for n, v in chosen.items()}, **options})
        if not isinstance(result, (list, tuple)) or len(result) != 1:
            raise TypeError(f"a function of prompts and completions must return one score each, not {result!r}")
        return result[0]

    return call


def as_score(result: Any) -> tuple[float | None, dict[str, float]]:
    """``(score, parts)`` of what a function returned; a score of None means "does not apply".

    A dict names parts, each a number or None. Its score is ``score`` where it has that key (the other parts are
    only reported), else the sum of its parts.

    Raises:
      TypeError: it is no number.
    """
    if result is None:
        return None, {}
    if isinstance(result, Mapping):
        parts = {str(name): _number(value) for name, value in result.items() if value is not None}
        if "score" in result:
            return parts.pop("score", None), parts
        return (sum(parts.values()) if parts else None), parts
    return _number(result), {}


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"a reward must be a number or None, not {type(value).__name__} {value!r:.80}")
    return float(value)
