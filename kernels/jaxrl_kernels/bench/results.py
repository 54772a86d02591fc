"""Running the problems: is each implementation right, and how long does it take."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_kernels.bench import timing
from jaxrl_kernels.bench.problem import Problem
from jaxrl_kernels.bench.problems import IMPLEMENTATIONS

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Checked:
    """One implementation on one problem.

    Attributes:
      verdict: ``right``, ``wrong``, or ``refused`` (an error of the kernel's own that says why it can't).
      error: the largest difference from the reference, as a share of the output's largest entry.
    """

    kernel: str
    implementation: str
    problem: str
    verdict: str
    error: float = 0.0
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Timed:
    """One implementation's time on one problem.

    Attributes:
      part: ``""`` for the forward pass, or ``gradient``, the forward pass included.
      rate: bytes or floating-point operations per second.
      share: of the rate of a copy, or of a matrix product, on the same device.
    """

    kernel: str
    implementation: str
    problem: str
    part: str
    seconds: float
    unit: str
    rate: float
    share: float


def tolerance(dtype: str, implementation: str, platform: str) -> float:
    """The largest error that rounding explains, as a share of the output's largest entry.

    bfloat16 has 8 bits, lost in the inputs of both products. float32 is summed in another order; on a GPU XLA's own
    products, not those of the kernels, round their inputs to tf32 (11 bits).
    """
    if dtype != "float32":
        return 3e-2
    return 5e-3 if platform == "gpu" and not implementation.startswith("pallas") else 1e-4


def check(problems: Iterable[Problem], workers: int = 1) -> list[Checked]:
    """Every implementation but the reference on every problem.

    Args:
      workers: problems in work at once. Compiling takes most of the time, and each needs memory for its arrays.
    """

    def one(problem: Problem) -> list[Checked]:
        arrays = problem.inputs()
        right = [np.asarray(out, np.float64) for out in _run(problem, REFERENCE, arrays)]
        names = [name for name in IMPLEMENTATIONS[problem.kernel] if name != REFERENCE]
        return [_check(problem, name, arrays, right) for name in names]

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [entry for entries in pool.map(one, problems) for entry in entries]


def _run(problem: Problem, implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
    return jax.jit(functools.partial(problem.call, implementation))(arrays)


def _check(problem: Problem, implementation: str, arrays: Any, right: Sequence[np.ndarray]) -> Checked:
    checked = functools.partial(Checked, problem.kernel, implementation, problem.name)
    try:
        outputs = [np.asarray(out, np.float64) for out in _run(problem, implementation, arrays)]
    except ValueError as error:
        return checked("refused", reason=str(error).partition("\n")[0])
    except (RuntimeError, TypeError, NotImplementedError) as error:  # the compiler, the driver, memory
        return checked("wrong", float("inf"), f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    # An output that is all but zero (the gradient of a softmax over one entry) is measured by the others.
    overall = max((float(np.abs(out).max(initial=0)) for out in right), default=0.0)
    error = 0.0
    for out, expected in zip(outputs, right, strict=True):
        size = max(float(np.abs(expected).max(initial=0)), 0.1 * overall) or 1.0
        error = max(error, _infinite(float(np.abs(out - expected).max(initial=0)) / size))
    allowed = tolerance(problem.dtype, implementation, jax.default_backend())
    if error <= allowed:
        return checked("right", error)
    return checked("wrong", error, f"{error:.1e} of the largest entry, where {allowed:.0e} is rounding")


def _infinite(value: float) -> float:
    return float("inf") if np.isnan(value) else value


def time(problems: Iterable[Problem], copy: float, product: float, refused: set[tuple[str, str, str]]) -> list[Timed]:
    """Times every implementation but the reference.

    Args:
      copy: bytes per second of a copy; ``product``: floating-point operations per second of a matrix product.
      refused: (kernel, implementation, problem) that are left out.
    """
    found = []
    for problem in problems:
        arrays = problem.inputs()
        for name in IMPLEMENTATIONS[problem.kernel]:
            if name == REFERENCE or (problem.kernel, name, problem.name) in refused:
                continue
            for part, call in problem.timed.items():
                taken = timing.seconds(jax.jit(functools.partial(call, name)), arrays)
                work, unit, limit = problem.num_bytes, "B/s", copy
                if problem.flops:
                    work, unit, limit = problem.flops[part], "FLOP/s", product
                rate = work / taken
                found.append(Timed(problem.kernel, name, problem.name, part, taken, unit, rate, rate / limit))
    return found
