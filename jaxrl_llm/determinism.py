"""The same numbers in every run on a GPU, where some of XLA's programs are not made for that.

A GPU adds up what meets in one place (the gradient of the embedding, the sums over the sequences of a row) in the order
in which it arrives, and XLA times several programs for a product and keeps the fastest, which may be another one in the
next run. With ``--xla_gpu_deterministic_ops`` it does neither. On CPUs nothing of this varies.
"""

from __future__ import annotations

import os

import jax
from jax._src import xla_bridge  # no public name says whether devices have been started

from jaxrl_llm.errors import UserError

FLAG = "--xla_gpu_deterministic_ops"


def require_deterministic() -> None:
    """Sets XLA's flag for this process, which XLA reads once, when it starts the devices.

    Raises:
      UserError: GPUs have been started without it.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if f"{FLAG}=true" in flags:
        return
    if xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu":
        raise UserError(
            f"deterministic = True: the GPUs of this process have been started without {FLAG}. Make the trainer before "
            f"anything else asks jax for a device, or start Python with XLA_FLAGS={FLAG}=true."
        )
    others = [flag for flag in flags if flag.partition("=")[0] != FLAG]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{FLAG}=true"])
