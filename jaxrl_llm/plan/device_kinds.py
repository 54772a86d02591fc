"""Kinds of devices that a run can be planned for, their peak rates, and how much of a peak is counted on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_kernels import gpu_compile
from jaxrl_llm.errors import UserError

MEMORY_MARGIN = 0.1
"""Part of a device's memory that a plan leaves free: the driver's context, the workspaces of NCCL and of products with
weights, and what the allocator can't use. None of it is in the compiler's figures."""


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """Peak rates of one device.

    Attributes:
      chip: what the compiler is told; None for CPUs.
      memory_bytes: 0 is this machine's memory, shared by its devices.
      flops: per second, dense products in bfloat16 (float32 on CPUs).
      memory_rate: bytes per second of its own memory.
      link_rate: bytes per second that it receives from devices of its machine.
      network_rate: the same from other machines.
      source: where the figures are from.
    """

    name: str
    chip: gpu_compile.Chip | None
    memory_bytes: int
    flops: float
    memory_rate: float
    link_rate: float
    network_rate: float
    source: str


_NETWORK = "network: 400 Gbit/s for each GPU, as in an NVIDIA DGX (8 ConnectX-7)"

DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind(
            "H200", gpu_compile.H200, gpu_compile.H200.memory, 989.4e12, 4.8e12, 450e9, 50e9,
            f"NVIDIA's H200 SXM datasheet (NVLink 900 GB/s is both directions); {_NETWORK}",
        ),
        DeviceKind(
            "H100", gpu_compile.H100, gpu_compile.H100.memory, 989.4e12, 3.35e12, 450e9, 50e9,
            f"NVIDIA's H100 SXM datasheet (80 GB; NVLink 900 GB/s is both directions); {_NETWORK}",
        ),
        DeviceKind(
            "cpu", None, 0, 5e10, 1e10, 5e9, 1e9,
            "an assumption for a core of a server, no datasheet; compare its plans, don't trust their seconds",
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Parts of the peak rates that a plan counts on: assumptions, measured on no machine yet.

    Attributes:
      training: of the flops, in updates, log-probabilities and prefill.
      decoding: of the memory rate, reading weights and pages.
      communication: of link and network.
      collective_s: seconds that a collective takes at least.
    """

    training: float = 0.4
    decoding: float = 0.6
    communication: float = 0.7
    collective_s: float = 1e-5


@dataclasses.dataclass(frozen=True)
class PlannedDevices:
    """Devices to compile for.

    Attributes:
      devices: of jax; they need not exist.
      simulated: the compiler is the CPU's though the kind is a GPU.
      memory_bytes: of each.
    """

    kind: DeviceKind
    devices: Sequence[Any]
    simulated: bool
    memory_bytes: int


def planned_devices(kind: DeviceKind, count: int) -> PlannedDevices:
    """Devices of the kind that the compiler knows, whatever this machine has.

    GPUs need the CUDA plugin; where it is missing, simulated CPU devices stand in for them.

    Raises:
      UserError: jax has started already, with fewer CPU devices than are to be simulated.
    """
    if kind.chip is not None and gpu_compile.missing() is None:
        return PlannedDevices(kind, gpu_compile.devices(count, kind.chip), False, kind.memory_bytes)
    here = jax.devices("cpu")
    if len(here) < count:
        raise UserError(
            f"--devices {count}: jax has started with {len(here)} simulated CPU devices in this process. Run the plan "
            "as a command of its own, python -m jaxrl_llm.main plan."
        )
    memory = kind.memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count
    return PlannedDevices(kind, here[:count], kind.chip is not None, memory)


def start_without_devices(count: int) -> None:
    """Keeps jax from starting accelerators of this machine, and gives it ``count`` CPU devices to compile for; for the
    beginning of a process. One in which jax has started already stays as it is."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # the CUDA plugin reads it itself
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # started: `planned_devices` says whether its devices are enough
        jax.config.update("jax_num_cpu_devices", count)
