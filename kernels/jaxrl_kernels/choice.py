"""The rule of ``auto`` for kernels in plain XLA and for Pallas's Triton backend, and how a choice is told."""

import dataclasses
import functools
import logging

import jax

from jaxrl_kernels import triton_tiles
from jaxrl_kernels.device import Device

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What ``auto`` stands for.

    Attributes:
      name: the implementation's name.
      reason: one sentence, to be shown to a person.
    """

    name: str
    reason: str


def choose_for(device: Device, dtype, head_size: int, automatic_axes: tuple[str, ...] = ()) -> Choice:
    """The implementation that ``auto`` stands for on a device, and why.

    A rule, until there are measurements on devices: every NVIDIA GPU since Ampere gets ``pallas_triton``, all else
    ``xla``.

    Args:
      automatic_axes: mesh axes of more than one device over which XLA partitions the program by itself.
    """
    if device.platform != "gpu":
        return Choice("xla", f"{device.platform}: blocks in plain XLA; the kernel is for NVIDIA GPUs")
    if reason := why_not("pallas_triton", device, dtype, head_size, automatic_axes):
        return Choice("xla", f"{device.kind}: 'pallas_triton' {reason.partition('; choose')[0]}")
    return Choice("pallas_triton", f"{device.kind}: NVIDIA GPU since Ampere, by rule and not yet by measurement")


@functools.cache
def tell(kernel: str, choice: Choice) -> None:
    """Logs what ``auto`` took and why, at level info; the same for the same kernel is told once in a process, however
    often it is traced."""
    logger.info("%s: %s (%s)", kernel, choice.name, choice.reason)


def why_not(name: str, device: Device, dtype, head_size: int, automatic_axes: tuple[str, ...] = ()) -> str | None:
    """Why an implementation can't run on a device, and what to choose instead; None when it can."""
    if name != "pallas_triton":
        return None
    reason = triton_tiles.why_not(device, dtype, head_size)
    if reason is None and automatic_axes:
        reason = (
            f"is not partitioned by XLA, and here it would have to be over the mesh axes {', '.join(automatic_axes)}: "
            "make them manual by jax.shard_map; choose 'xla' otherwise"
        )
    return reason


def automatic_axes() -> tuple[str, ...]:
    """Axes of the mesh in context that have more than one device and are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in not_manual_axes() if mesh.shape[name] > 1)


def not_manual_axes() -> tuple[str, ...]:
    """Axes of the mesh in context that are not manual, those of one device included."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    return tuple(str(name) for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != manual)
