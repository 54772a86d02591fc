"""Attention of packed rows: shapes, checks and the explicit choice of an implementation.

A row holds several sequences by segment ids, and the samples of one prompt may share it. Letters: R rows, T tokens in
a row, H query heads, K key/value heads (H a multiple of K; query head i reads key/value head i // (H // K)), h head
size.

cuDNN through ``jax.nn.dot_product_attention`` is not among the implementations: it takes causal masks, lengths and one
window that is fixed when the program is traced, but no segment ids, no shared prefixes and no soft cap, except as a
``[T, T]`` mask or bias in memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_kernels.choice import Choice, automatic_axes, choose_for, not_manual_axes, tell, why_not
from jaxrl_kernels.device import Device, target_device
from jaxrl_kernels.row_attention import pallas_triton, reference, xla, xla_tiles

Axes = str | tuple[str, ...] | None

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "reference": reference.row_attention,
    "xla": xla.row_attention,
    "xla_tiles": xla_tiles.row_attention,
    "pallas_triton": pallas_triton.row_attention,
}
"""Every implementation by name. Each takes the arguments of :func:`row_attention` after its checks and raises
ValueError for a dtype or head size that it can't do: none falls back to another."""

NO_WINDOW = 1 << 30
"""The window, in tokens, of a layer that sees its whole context."""


def row_attention(
    q: jax.Array,  # [R, T, H, h]
    k: jax.Array,  # [R, T, K, h]
    v: jax.Array,  # [R, T, K, h]
    positions: jax.Array,  # int32 [R, T]
    segment_ids: jax.Array,  # int32 [R, T]
    prefix_ids: jax.Array | None = None,  # int32 [R, T]
    window: jax.Array | int = NO_WINDOW,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    mesh_axes: tuple[Axes, Axes] | None = None,
    implementation: str = "auto",
) -> jax.Array:  # [R, T, H, h]
    """Causal attention within each segment and, where it continues another one, over that one too.

    Token i sees token j <= i where ``segment_ids[j]`` is i's segment or the prefix of i, and
    ``positions[i] - positions[j]`` is in ``[0, window)``. Padding (segment 0) sees itself alone. Differentiable in q,
    k and v.

    Args:
      q, k: after rotary embedding; q is not scaled.
      positions: of each token in its own sequence; a completion's go on where its prompt's ended.
      segment_ids: 0 is padding. Ids that grow along the row let the most work be skipped.
      prefix_ids: the segment that a token's own segment continues (a shared prompt); 0 or None for none.
      window: sliding window in tokens, the current one included; may be an array, so that layers of a scan differ.
      scale: multiplies the scores; None is ``h ** -0.5``.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``, after the scale; None is off.
      mesh_axes: ``(axes that split R, axes that split H and K)`` of the mesh in context (``jax.set_mesh``), None for
        either if none does. A Pallas kernel, which XLA doesn't partition, then runs on each device with its own rows
        and heads (``jax.shard_map``); devices along other axes compute the same. The others ignore it.
        Without it a Pallas kernel needs all axes of more than one device manual: by name it is an error elsewhere, and
        ``auto`` is ``xla``.
      implementation: a name in ``IMPLEMENTATIONS``, or ``auto`` (see :func:`choose`).

    Returns:
      ``[R, T, H, h]`` in v's dtype; scores, softmax and sums are in float32.

    Raises:
      ValueError: an unknown implementation, shapes that don't fit, or a case the named one can't do.
    """
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4:
        raise ValueError(
            f"row attention takes q [R, T, H, h] and k, v [R, T, K, h]; got {q.shape}, {k.shape}, {v.shape}"
        )
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"keys {k.shape} must fit queries {q.shape}: same rows, tokens and head size, heads that divide"
        )
    prefix_ids = jnp.zeros_like(segment_ids) if prefix_ids is None else prefix_ids
    for name, value in (("positions", positions), ("segment_ids", segment_ids), ("prefix_ids", prefix_ids)):
        if value.shape != q.shape[:2] or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers {q.shape[:2]}; got {value.dtype} {value.shape}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None")
    device = target_device()
    axes = automatic_axes() if mesh_axes is None else ()
    name = implementation
    if name == "auto":
        choice = _choose_for(device, q.dtype, q.shape[-1], axes)
        if choice.name in _PALLAS and not q.dtype == k.dtype == v.dtype:
            choice = Choice("xla", "queries, keys and values differ in dtype")
        elif choice.name in _PALLAS and mesh_axes is not None:
            uneven = _uneven(mesh_axes, q.shape[0], k.shape[2])
            choice = Choice("xla", f"{choice.name!r} {uneven.partition('; choose')[0]}") if uneven else choice
        tell("row attention", choice)
        name = choice.name
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"row attention implementation {name!r} is unknown; choose auto or {', '.join(IMPLEMENTATIONS)}"
        )
    reason = why_not(name, device, q.dtype, q.shape[-1], axes)
    if reason is None and name in _PALLAS and mesh_axes is not None:
        reason = _uneven(mesh_axes, q.shape[0], k.shape[2])
    if reason is not None:
        raise ValueError(f"row attention {name!r} {reason}")
    options = {"scale": float(q.shape[-1] ** -0.5 if scale is None else scale), "soft_cap": soft_cap}
    attend = functools.partial(IMPLEMENTATIONS[name], **options)
    if name in _PALLAS and mesh_axes is not None:
        attend = _per_device(attend, *mesh_axes)
    return attend(q, k, v, positions, segment_ids, prefix_ids, jnp.asarray(window, jnp.int32))


def choose(dtype=jnp.bfloat16, head_size: int = 128) -> str:
    """The implementation that ``auto`` stands for here and now on the target device and mesh."""
    return _choose_for(target_device(), dtype, head_size, automatic_axes()).name


def _choose_for(device: Device, dtype, head_size: int, axes: tuple[str, ...]) -> Choice:
    """`choice.choose_for`, and on CPUs tiles: 1.1 to 2 times as fast as blocks, forward and backward, for 16 answers of
    64 tokens to prompts of 64 and 512."""
    if device.platform == "cpu":
        return Choice("xla_tiles", "cpu: tiles in plain XLA; the kernel is for NVIDIA GPUs")
    return choose_for(device, dtype, head_size, axes)


_PALLAS = ("pallas_triton",)


def _per_device(attend, row_axes: Axes, head_axes: Axes):
    """The same on each device's own rows and heads. Manual over all axes, or XLA would partition over the others."""
    axes = not_manual_axes()
    if not axes:
        return attend
    rows, heads = PartitionSpec(row_axes), PartitionSpec(row_axes, None, head_axes)
    specs = heads, heads, heads, rows, rows, rows, PartitionSpec()
    # A Pallas kernel doesn't say over which axes its result varies.
    return jax.shard_map(attend, in_specs=specs, out_specs=heads, axis_names=set(axes), check_vma=False)


def _uneven(mesh_axes: tuple[Axes, Axes], num_rows: int, num_kv_heads: int) -> str | None:
    """Why rows or heads can't be split over these axes; None when they can."""
    shape = jax.sharding.get_abstract_mesh().shape
    for what, count, axes in zip(("rows", "key/value heads"), (num_rows, num_kv_heads), mesh_axes, strict=True):
        names = (axes,) if isinstance(axes, str) else axes or ()
        if missing := [name for name in names if name not in not_manual_axes()]:
            return f"can't be split over {', '.join(missing)}: not among the axes of the mesh in context to be split"
        if count % math.prod(shape[name] for name in names):
            return f"can't split {count} {what} over the mesh axes {', '.join(names)}; choose 'xla'"
    return None
