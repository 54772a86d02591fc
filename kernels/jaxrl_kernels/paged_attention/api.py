"""Paged decode attention: shapes, checks and the explicit choice of an implementation.

One query token per sequence attends the keys and values that its page table names. Letters: B sequences,
H query heads, K key/value heads (H a multiple of K; query head i reads key/value head i // (H // K)),
h head size, P pages in the pool, S tokens in a page, M columns of the page table.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_kernels.choice import Choice, automatic_axes, tell
from jaxrl_kernels.device import Device, target_device
from jaxrl_kernels.paged_attention import pallas_mosaic, pallas_triton, reference, xla

Implementation = Callable[..., jax.Array]

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
    "pallas_triton": pallas_triton.paged_attention,
    "pallas_mosaic": pallas_mosaic.paged_attention,
}
"""Every implementation by name. Each takes the arguments of :func:`paged_attention` after its checks, with
``scale`` filled in, and raises ValueError for a shape or dtype that it can't do: none falls back to another.
Those of Pallas also take ``interpret=True``, which runs them on any backend, slowly."""

_PALLAS = {"pallas_triton": pallas_triton, "pallas_mosaic": pallas_mosaic}


def paged_attention(
    q: jax.Array,  # [B, H, h]
    k_pages: jax.Array,  # [P, S, K, h]
    v_pages: jax.Array,  # [P, S, K, h]
    page_table: jax.Array,  # int32 [B, M]
    lengths: jax.Array,  # int32 [B]
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:  # [B, H, h]
    """Attention of the last token of each sequence over its cached tokens.

    Args:
      q: queries, after rotary embedding, not scaled.
      k_pages, v_pages: the pool. Token t of sequence b lies at ``[page_table[b, t // S], t % S]``; the new
        token's own key and value must already be there. Entries of a page beyond a sequence's length may
        hold anything, NaN included.
      page_table: page ids. Columns beyond a sequence's last page must be valid ids, and are not read from.
      lengths: tokens to attend, the new one included; at most ``M * S``. Length 0 (an idle row) gives zeros.
      scale: multiplies the scores; None is ``h ** -0.5``.
      window: sliding window in tokens, the current one included: key j is seen when j >= length - window.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``, after the scale; None is off.
      implementation: a name in ``IMPLEMENTATIONS``, or ``auto`` (see :func:`choose`).

    On a mesh XLA partitions ``reference`` and ``xla`` by itself, but not a Pallas kernel: it would gather the whole
    pool on every device. So every axis of more than one device must be manual: call this inside ``jax.shard_map`` over
    all of them, the one that splits the heads included, with the local heads of queries and pages (K a multiple of
    that axis), page ids of the local pool, and ``check_vma=False``, since a Pallas kernel doesn't say over which axes
    its result varies. Elsewhere a Pallas kernel by name is an error, and ``auto`` is ``xla``.

    Returns:
      ``[B, H, h]`` in q's dtype; softmax and sums are in float32.

    Raises:
      ValueError: an unknown implementation, shapes that don't fit, or a case the named one can't do.
    """
    _check(q, k_pages, v_pages, page_table, lengths, window, soft_cap)
    device = target_device()
    traits = q.dtype, q.shape[-1], k_pages.shape[1], automatic_axes()
    if implementation == "auto":
        choice = choose_for(device, *traits)
        tell("paged attention", choice)
        implementation = choice.name
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"paged attention implementation {implementation!r} is unknown; choose one of auto, "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    if reason := why_not(implementation, device, *traits):
        raise ValueError(f"paged attention {implementation!r} {reason}")
    options = {"num_cores": device.num_cores} if implementation in _PALLAS else {}
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return IMPLEMENTATIONS[implementation](
        q, k_pages, v_pages, page_table, lengths, scale=scale, window=window, soft_cap=soft_cap, **options
    )


def choose(dtype=jnp.bfloat16, head_size: int = 128, page_size: int = 16) -> str:
    """The implementation that ``auto`` stands for here and now: :func:`choose_for` the target device and mesh."""
    return choose_for(target_device(), dtype, head_size, page_size, automatic_axes()).name


def choose_for(device: Device, dtype, head_size: int, page_size: int, automatic_axes: tuple[str, ...] = ()) -> Choice:
    """The implementation that ``auto`` stands for on a device, and why.

    A rule, until there are measurements on devices: every NVIDIA GPU since Ampere gets ``pallas_triton``, Hopper
    included, whose ``pallas_mosaic`` needs a page size and dtype of its liking and has to show first that it is
    faster. All else gets ``xla``.

    Args:
      automatic_axes: mesh axes of more than one device over which XLA partitions the program by itself.
    """
    traits = device, dtype, head_size, page_size, automatic_axes
    if device.platform != "gpu":
        return Choice("xla", f"{device.platform}: the page gather by XLA; the kernels are for NVIDIA GPUs")
    if reason := why_not("pallas_triton", *traits):
        return Choice("xla", f"{device.kind}: 'pallas_triton' {reason.partition('; choose')[0]}")
    chosen = f"{device.kind}: NVIDIA GPU since Ampere, by rule and not yet by measurement"
    if why_not("pallas_mosaic", *traits) is None:
        chosen += "; 'pallas_mosaic' can run too"
    return Choice("pallas_triton", chosen)


def why_not(
    name: str, device: Device, dtype, head_size: int, page_size: int, automatic_axes: tuple[str, ...] = ()
) -> str | None:
    """Why an implementation can't run on a device, and what to choose instead; None when it can."""
    if name not in _PALLAS:
        return None
    reason = _PALLAS[name].why_not(device, dtype, head_size, page_size)
    if reason is None and automatic_axes:
        reason = (
            f"is not partitioned by XLA, and here it would have to be over the mesh axes {', '.join(automatic_axes)}: "
            "make them manual by jax.shard_map; choose 'xla' otherwise"
        )
    return reason


def _check(q, k_pages, v_pages, page_table, lengths, window, soft_cap) -> None:
    if q.ndim != 3 or k_pages.ndim != 4 or page_table.ndim != 2 or lengths.ndim != 1:
        raise ValueError(
            "paged attention takes q [B, H, h], pages [P, S, K, h], page_table [B, M] and lengths [B]; got "
            f"{q.shape}, {k_pages.shape}, {page_table.shape}, {lengths.shape}"
        )
    batch, num_heads, head_size = q.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[3] != head_size:
        raise ValueError(f"key pages {k_pages.shape} and value pages {v_pages.shape} must fit queries {q.shape}")
    if num_heads % k_pages.shape[2]:
        raise ValueError(f"{num_heads} query heads are not a multiple of {k_pages.shape[2]} key/value heads")
    if page_table.shape[0] != batch or lengths.shape[0] != batch:
        raise ValueError(f"page_table {page_table.shape} and lengths {lengths.shape} must have {batch} rows")
    if not (jnp.issubdtype(page_table.dtype, jnp.integer) and jnp.issubdtype(lengths.dtype, jnp.integer)):
        raise ValueError(f"page_table and lengths must be integers, not {page_table.dtype} and {lengths.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the current token, so it is at least 1, or None")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None")
