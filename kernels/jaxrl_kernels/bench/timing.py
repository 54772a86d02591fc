"""Seconds of a call, and what the device itself can do: copy memory and multiply matrices."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 5


def seconds(function: Callable[..., Any], *arguments: Any, budget_s: float = 0.5) -> float:
    """Median seconds of one call of a jitted function, after one that compiles it.

    Calls are queued back to back, so what the host takes to launch one is hidden behind the one before it wherever the
    device takes longer (about 10 µs on a GPU).

    Args:
      budget_s: about how long to measure; at least `REPEATS` calls are made.
    """
    jax.block_until_ready(function(*arguments))
    once = _queued(function, arguments, 1)
    calls = max(1, min(1000, int(budget_s / REPEATS / max(once, 1e-6))))
    return statistics.median(_queued(function, arguments, calls) for _ in range(REPEATS))


def _queued(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    start = time.perf_counter()
    out = None
    for _ in range(calls):
        out = function(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second of reading and writing an array, both counted."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    return 2 * array.nbytes / seconds(jax.jit(lambda x: x + 1), array)


def product_rate(size: int, dtype: Any) -> float:
    """Floating-point operations per second of a square matrix product, 2 for each multiplication and its sum."""
    left, right = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32).astype(dtype) for i in range(2))
    return 2 * size**3 / seconds(jax.jit(lambda x, y: x @ y), left, right)
