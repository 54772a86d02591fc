"""What a problem is, how large its shapes are, and the arrays that problems are made of."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Call = Callable[[str, Any], tuple[jax.Array, ...]]
"""``call(implementation, arrays)``, to be jitted."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One shape of one kernel.

    Attributes:
      kernel: a key of `problems.IMPLEMENTATIONS`.
      inputs: makes the arrays, a dict.
      call: gives every output that is compared.
      timed: what is timed, by name; empty for shapes that are only checked.
      num_bytes: that the kernel has to read and write; 0 where products are its limit.
      flops: of its products, by the name in ``timed``; a gradient has those of the forward pass too.
    """

    kernel: str
    name: str
    dtype: str
    inputs: Callable[[], dict[str, Any]]
    call: Call
    timed: dict[str, Call] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    flops: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Size:
    """How big the shapes of real models are, so that a CPU and a test can run them too.

    Attributes:
      heads: query heads, key/value heads and head size.
      batch: sequences of a decode step; ``context``: tokens that each has.
      tokens: of a row in prefill and training.
      width, vocabulary: of the output projection.
      copy_bytes, product: what the device's own limits are measured with.
    """

    dtype: str
    heads: tuple[int, int, int]
    batch: int
    context: int
    tokens: int
    width: int
    vocabulary: int
    copy_bytes: int
    product: int


def random_array(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Normal numbers made on the device: a pool of gigabytes would take the host a minute."""
    return jax.jit(lambda: (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype))()


def cast(arrays: dict[str, np.ndarray], dtype: Any) -> dict[str, Any]:
    return {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}


def wave(shape: tuple[int, ...]) -> jax.Array:
    """A cotangent that no symmetry hides in."""
    return jnp.cos(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape)
