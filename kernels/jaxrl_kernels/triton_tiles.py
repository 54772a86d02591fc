"""What attention kernels of Pallas's Triton backend share: where they run, tiles, and the softmax over blocks of keys.

A tile's sides are powers of two, so a head is read in parts of such sizes (80 is 64 and 16), each with its own
products. Scores are in powers of two, which the hardware has an instruction for. The softmax runs over the blocks as in
flash attention (arXiv:2205.14135).
"""

import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_kernels.device import Device

DTYPES = ("float32", "bfloat16", "float16")
MIN_TILE = 16  # the shortest side that a matrix instruction takes
MASKED = -1e30  # finite: no infinity is subtracted from another
_LOG2_E = math.log2(math.e)


def why_not(device: Device, dtype, head_size: int) -> str | None:
    """Why such a kernel can't run for these on that device, and what to choose; None when it can."""
    if device.platform != "gpu":
        return f"needs an NVIDIA GPU, and the program is for {device.platform}; choose 'xla' or 'auto'"
    if device.compute_capability is None:
        return f"knows no compute capability of {device.kind!r}: not an NVIDIA GPU that it knows; choose 'xla'"
    if device.compute_capability < (8, 0):
        major, minor = device.compute_capability
        return f"needs compute capability 8.0 (Ampere) or more, and {device.kind} has {major}.{minor}; choose 'xla'"
    return why_not_shape(dtype, head_size)


def why_not_shape(dtype, head_size: int) -> str | None:
    """As :func:`why_not`, of dtype and head size alone."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"takes {', '.join(DTYPES)}, not {jnp.dtype(dtype).name}; choose 'xla'"
    if head_size % MIN_TILE:
        return f"needs a head size that is a multiple of {MIN_TILE}, not {head_size}; choose 'xla'"
    return None


def check(kernel: str, q, *others) -> None:
    """Raises ValueError for a dtype or head size that Triton's kernels don't take, or dtypes that differ."""
    if reason := why_not_shape(q.dtype, q.shape[-1]):
        raise ValueError(f"{kernel} 'pallas_triton' {reason}")
    if any(other.dtype != q.dtype for other in others):
        found = ", ".join(str(x.dtype) for x in (q, *others))
        raise ValueError(f"{kernel} 'pallas_triton' takes one dtype, not {found}; choose 'xla' or cast")


def block_size(wanted: int, num_tokens: int) -> int:
    """A power of two up to ``wanted`` that is no longer than the tokens need.

    Raises:
      ValueError: ``wanted`` is none, or below the shortest tile.
    """
    if wanted < MIN_TILE or wanted & (wanted - 1):
        raise ValueError(f"a block must be a power of two and at least {MIN_TILE} tokens, not {wanted}")
    return min(wanted, max(MIN_TILE, pl.next_power_of_2(num_tokens)))


def compiler_params(num_warps: int, num_stages: int):
    """Triton's parameters for ``pl.pallas_call``, as long as jax has that backend."""
    from jax.experimental.pallas import triton

    # Said by jax >= 0.11 whenever such a kernel is lowered, which happens after this function has returned: a filter
    # for this one message is what can be done here. README.md says what follows from the deprecation.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def parts(head_size: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of power-of-two parts of a head."""
    found, start = [], 0
    while start < head_size:
        size = 1 << ((head_size - start).bit_length() - 1)
        found.append((start, size))
        start += size
    return tuple(found)


def load(ref, start, count: int, head=None):
    """``count`` entries of a ref ``[T]``, or of ``[G, T]`` at a head, from ``start`` on; 0 beyond its end."""
    from jax.experimental.pallas import triton

    inside = start + jnp.arange(count) < ref.shape[-1]
    where = ref.at[pl.ds(start, count)] if head is None else ref.at[head, pl.ds(start, count)]
    return triton.load(where, mask=inside, other=jnp.zeros((), ref.dtype))


def load_head(ref, start, count: int, head=None) -> list[jax.Array]:
    """The parts ``[count, size]`` of rows of a ref ``[T, h]``, or of ``[T, G, h]`` at a head; 0 beyond its end."""
    from jax.experimental.pallas import triton

    inside = start + jnp.arange(count) < ref.shape[0]
    tiles = []
    for begin, size in parts(ref.shape[-1]):
        columns, rows = pl.ds(begin, size), pl.ds(start, count)
        where = ref.at[rows, columns] if head is None else ref.at[rows, head, columns]
        tiles.append(triton.load(where, mask=jnp.broadcast_to(inside[:, None], (count, size)), other=0.0))
    return tiles


def gather_head(ref, places, head, wanted) -> list[jax.Array]:
    """The parts ``[count, size]`` of rows of a ref ``[N, K, h]`` at a head by their places; 0 where not wanted."""
    from jax.experimental.pallas import triton

    tiles = []
    for begin, size in parts(ref.shape[-1]):
        shape = places.shape[0], size
        # Indices are whole tiles: the interpreter can't mask a load that mixes them with slices.
        rows, mask = (jnp.broadcast_to(each[:, None], shape) for each in (places, wanted))
        columns = jnp.broadcast_to(begin + jnp.arange(size)[None, :], shape)
        tiles.append(triton.load(ref.at[rows, head, columns], mask=mask, other=0.0))
    return tiles


def store(ref, start, values) -> None:
    """Writes ``values`` from ``start`` on to a ref ``[T]``, as far as it reaches."""
    from jax.experimental.pallas import triton

    count = values.shape[0]
    triton.store(ref.at[pl.ds(start, count)], values, mask=start + jnp.arange(count) < ref.shape[0])


def store_head(ref, start, tiles) -> None:
    """Writes the parts of rows from ``start`` on to a ref ``[T, h]``, as far as it reaches, in its dtype."""
    from jax.experimental.pallas import triton

    for (begin, size), tile in zip(parts(ref.shape[-1]), tiles, strict=True):
        count = tile.shape[0]
        inside = jnp.broadcast_to((start + jnp.arange(count) < ref.shape[0])[:, None], (count, size))
        triton.store(ref.at[pl.ds(start, count), pl.ds(begin, size)], tile.astype(ref.dtype), mask=inside)


def product(left, right):
    """A matrix product that adds up in float32; float32 factors are not rounded to tf32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)


def inner(left, right):
    """``[a, b]`` inner products over the head of rows given in parts."""
    return sum(product(x, y.T) for x, y in zip(left, right, strict=True))


def scores_of(raw, scale: float, soft_cap: float | None):
    """Scores in powers of two from inner products, and the soft cap's derivative (None without one)."""
    if soft_cap is None:
        return raw * (scale * _LOG2_E), None
    bent = jnp.tanh(raw * (scale / soft_cap))
    return bent * (soft_cap * _LOG2_E), 1.0 - bent * bent


class Softmax(NamedTuple):
    """What a block of queries has gathered from the keys so far.

    Attributes:
      sums: float32 parts ``[b, size]``, the weighted sum of values.
      largest: ``[b]``, the largest score.
      total: ``[b]``, the sum of weights, each relative to the largest score.
    """

    sums: tuple[jax.Array, ...]
    largest: jax.Array
    total: jax.Array

    @classmethod
    def empty(cls, count: int, head_size: int) -> "Softmax":
        """Of queries that have met no key."""
        sums = tuple(jnp.zeros((count, size), jnp.float32) for _, size in parts(head_size))
        return cls(sums, jnp.full((count,), MASKED, jnp.float32), jnp.zeros((count,), jnp.float32))

    def with_keys(self, scores, seen, values) -> "Softmax":
        """After keys more: scores in powers of two and what is seen of them ``[b, keys]``, values in parts."""
        scores = jnp.where(seen, scores, MASKED)
        largest = jnp.maximum(self.largest, jnp.max(scores, axis=1))
        shrink = jnp.exp2(self.largest - largest)
        weights = jnp.where(seen, jnp.exp2(scores - largest[:, None]), 0.0)
        sums = tuple(
            total * shrink[:, None] + product(weights.astype(tile.dtype), tile)
            for total, tile in zip(self.sums, values, strict=True)
        )
        return Softmax(sums, largest, self.total * shrink + jnp.sum(weights, axis=1))

    def mean(self):
        """The weighted mean of values in parts, 0 where no key was seen, and log2 of the weights' sum ``[b]``."""
        total = jnp.where(self.total == 0.0, 1.0, self.total)
        return [tile / total[:, None] for tile in self.sums], self.largest + jnp.log2(total)
