"""What this machine can do, found out by doing it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.paged_attention import api as paged_attention

HOST_MEMORY_KINDS = ("pinned_host", "unpinned_host")


def get_available_backends() -> dict[str, Any]:
    """Tries what the rest of the package may use; takes a few seconds, starts the devices.

    Returns:
      ``platforms``: number of devices by platform, the default one first. ``attention``: for each implementation of
      paged attention True, or the reason why it does not run here, and the name that ``auto`` stands for as
      ``auto``. ``host_offload``: for each kind of host memory True, or the reason why arrays can't live there.
    """
    implementations: dict[str, Any] = {name: _try_attention(name) for name in paged_attention.IMPLEMENTATIONS}
    return {
        "platforms": _platforms(),
        "attention": {**implementations, "auto": paged_attention.choose()},
        "host_offload": {kind: _try_host_memory(kind) for kind in HOST_MEMORY_KINDS},
    }


def _platforms() -> dict[str, int]:
    default = jax.default_backend()
    found = {default: jax.device_count()}
    for platform in ("cpu", "cuda", "rocm", "tpu"):
        try:
            found.setdefault(jax.devices(platform)[0].platform, len(jax.devices(platform)))
        except RuntimeError:  # jax's answer for a platform that is not here
            continue
    return found


def _try_attention(name: str) -> bool | str:
    """Runs one small case and compares it with the reference: one that runs but is wrong is not available."""
    keys = jax.random.split(jax.random.key(0), 3)
    dtype = jnp.bfloat16 if name == "pallas_mosaic" else jnp.float32  # all that its matrix instruction takes
    q = jax.random.normal(keys[0], (2, 4, 64), dtype)
    k_pages, v_pages = (jax.random.normal(key, (5, 16, 2, 64), dtype) for key in keys[1:])
    page_table, lengths = jnp.array([[1, 2], [3, 4]], jnp.int32), jnp.array([17, 32], jnp.int32)
    arguments = (q, k_pages, v_pages, page_table, lengths)
    try:
        got = paged_attention.paged_attention(*arguments, implementation=name)
        got.block_until_ready()
    except (ValueError, NotImplementedError, RuntimeError) as error:  # RuntimeError holds XLA's own errors
        return f"{type(error).__name__}: {error}".splitlines()[0]
    expected = paged_attention.paged_attention(*arguments, implementation="reference")
    difference = float(jnp.abs(got - expected).astype(jnp.float32).max())
    return (
        True
        if difference < (3e-2 if dtype == jnp.bfloat16 else 1e-2)
        else f"differs from the reference by {difference:.2g}"
    )


def _try_host_memory(kind: str) -> bool | str:
    """Moves an array there and back."""
    device = jax.devices()[0]
    values = np.arange(8, dtype=np.float32)
    try:
        there = jax.device_put(values, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
        back = jax.device_put(there, jax.sharding.SingleDeviceSharding(device))
        same = bool((np.asarray(back) == values).all()) and there.sharding.memory_kind == kind
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return True if same else "the array came back changed"
