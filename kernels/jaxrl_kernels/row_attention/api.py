"""Attention of packed rows: shapes, checks and the explicit choice of an implementation.

A row holds several sequences by segment ids, and the samples of one prompt may share it. Letters: R rows, T tokens in
a row, H query heads, K key/value heads (H a multiple of K; query head i reads key/value head i // (H // K)), h head
size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.row_attention import reference, xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "reference": reference.row_attention,
    "xla": xla.row_attention,
}
"""Every implementation by name. Each takes the arguments of :func:`row_attention` after its checks."""

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
      implementation: a name in ``IMPLEMENTATIONS``, or ``auto``.

    Returns:
      ``[R, T, H, h]`` in v's dtype; scores, softmax and sums are in float32.

    Raises:
      ValueError: an unknown implementation, or shapes that don't fit.
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
    name = choose() if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"row attention implementation {name!r} is unknown; choose auto or {', '.join(IMPLEMENTATIONS)}"
        )
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    window = jnp.asarray(window, jnp.int32)
    return IMPLEMENTATIONS[name](q, k, v, positions, segment_ids, prefix_ids, window, scale=scale, soft_cap=soft_cap)


def choose() -> str:
    """The implementation that ``auto`` stands for."""
    return "xla"
