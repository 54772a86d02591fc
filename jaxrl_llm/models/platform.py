"""For which platform is the function that is being traced? Some arrangements are fast on one only."""

from __future__ import annotations

import jax


def compiles_for_cpu() -> bool:
    """True when the current trace will run on CPUs.

    A mesh in context (``jax.set_mesh``) decides, also one of devices that are only compiled for; without one, the
    default backend does.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device is not None and device.platform else jax.default_backend()
    return platform == "cpu"
