"""Prefill attention: shapes, checks and the explicit choice of an implementation.

A row holds the new tokens of several sequences; what a sequence has cached already lies in pages. Letters: T tokens in
the row, H query heads, K key/value heads (H a multiple of K; query head i reads key/value head i // (H // K)), h head
size, P pages in the pool, S tokens in a page, C context pages that the row reads.

cuDNN through ``jax.nn.dot_product_attention`` is not among the implementations: it takes no segment ids, no soft cap
and no second set of keys in pages, except as a mask of every query with every key and gathered pages in memory.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_kernels.choice import Choice, automatic_axes, choose_for, tell, why_not
from jaxrl_kernels.device import target_device
from jaxrl_kernels.prefill_attention import pallas_triton, reference, xla

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference.prefill_attention,
    "xla": xla.prefill_attention,
    "pallas_triton": pallas_triton.prefill_attention,
}
"""Every implementation by name. Each takes the arguments of :func:`prefill_attention` after its checks and raises
ValueError for a dtype or head size that it can't do: none falls back to another."""


def prefill_attention(
    q: jax.Array,  # [T, H, h]
    k: jax.Array,  # [T, K, h]
    v: jax.Array,  # [T, K, h]
    positions: jax.Array,  # int32 [T]
    sequence_ids: jax.Array,  # int32 [T]
    pages: tuple[jax.Array, jax.Array] | None = None,  # [P, S, K, h] twice
    context: jax.Array | None = None,  # int32 [4, C]
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:  # [T, H, h]
    """Each token attends to its sequence's tokens at its own position or before, in the row and in cached pages.

    Args:
      q, k: after rotary embedding; q is not scaled.
      positions: of each token in its sequence, growing within a sequence.
      sequence_ids: 1, 2, … along the row; 0 is padding, whose output is 0.
      pages: the pools of keys and values; needed with ``context``.
      context: the cached pages that the row's sequences read, a column each: the page's id, the sequence that reads it
        (0: nobody), the position of the page's first token, and how many of its tokens count. Other entries of a page
        may hold anything, NaN included. Columns of one sequence stand together, in the order of the sequences.
      scale: multiplies the scores; None is ``h ** -0.5``.
      window: sliding window in tokens, the current one included; None sees everything.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``, after the scale; None is off.
      implementation: a name in ``IMPLEMENTATIONS``, or ``auto`` (see :func:`choose`).

    On a mesh XLA doesn't partition a Pallas kernel: every axis of more than one device must be manual (call this inside
    ``jax.shard_map`` over all of them with the local heads and pages, ``check_vma=False``). Elsewhere a Pallas kernel
    by name is an error, and ``auto`` is ``xla``.

    Returns:
      ``[T, H, h]`` in v's dtype; scores, softmax and sums are in float32.

    Raises:
      ValueError: an unknown implementation, shapes that don't fit, or a case the named one can't do.
    """
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"prefill attention takes q [T, H, h], k and v [T, K, h]; got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"keys {k.shape} must fit queries {q.shape}: same tokens and head size, heads that divide")
    for name, value in (("positions", positions), ("sequence_ids", sequence_ids)):
        if value.shape != q.shape[:1] or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers {q.shape[:1]}; got {value.dtype} {value.shape}")
    if (pages is None) != (context is None):
        raise ValueError("pages and context belong together: give both, or neither")
    if context is not None and pages is not None:
        if context.ndim != 2 or context.shape[0] != 4 or not jnp.issubdtype(context.dtype, jnp.integer):
            raise ValueError(f"context must be integers [4, C]; got {context.dtype} {context.shape}")
        if pages[0].shape != pages[1].shape or pages[0].ndim != 4 or pages[0].shape[2:] != k.shape[1:]:
            raise ValueError(f"pages {pages[0].shape} and {pages[1].shape} must be [P, S, K, h] and fit keys {k.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the current token, so it is at least 1, or None")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None")
    traits = target_device(), q.dtype, q.shape[-1], automatic_axes()
    name = implementation
    if name == "auto":
        one_dtype = all(x.dtype == q.dtype for x in (k, v, *(pages or ())))
        choice = choose_for(*traits) if one_dtype else Choice("xla", "queries, keys and pages differ in dtype")
        tell("prefill attention", choice)
        name = choice.name
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"prefill attention implementation {name!r} is unknown; choose auto or {', '.join(IMPLEMENTATIONS)}"
        )
    if reason := why_not(name, *traits):
        raise ValueError(f"prefill attention {name!r} {reason}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    return IMPLEMENTATIONS[name](q, k, v, positions, sequence_ids, pages, context, **options)


def choose(dtype=jnp.bfloat16, head_size: int = 128) -> str:
    """The implementation that ``auto`` stands for here and now: `choice.choose_for` the target device and mesh."""
    return choose_for(target_device(), dtype, head_size, automatic_axes()).name
