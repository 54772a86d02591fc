"""Compiling for NVIDIA GPUs on a machine that has none: what a kernel's or a whole program's test without a GPU is.

``lower`` needs plain jax: it turns Pallas kernels into Triton's or Mosaic's form and catches tiles, dtypes and layouts
that these refuse. ``compile`` goes on to machine code; it needs the CUDA plugin of the same version as jax::

  pip install --no-deps jax-cuda13-plugin==<version> jax-cuda13-pjrt==<version>

and sees what lowering can't: shared memory that overflows, and how much memory the program takes on each device.
Neither sees wrong results, hangs or speed. Run with ``JAX_PLATFORMS=cpu``, or the plugin looks for a driver.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU as XLA's compiler wants it described.

    Attributes:
      kind: the name that jax calls it by.
      compute_capability: (major, minor).
      num_cores: streaming multiprocessors.
      shared_memory: bytes that one block may use.
      memory: bytes of the device.
      bandwidth: bytes per second.
      clock: GHz.
      l2_cache: bytes.
    """

    kind: str
    compute_capability: tuple[int, int]
    num_cores: int
    shared_memory: int
    memory: int
    bandwidth: int
    clock: float
    l2_cache: int


H200 = Chip("NVIDIA H200", (9, 0), 132, 232448, 151397597184, 4_800_000_000_000, 1.98, 52428800)
H100 = Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 85520809984, 3_350_000_000_000, 1.98, 52428800)
A100 = Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 85899345920, 2_039_000_000_000, 1.41, 41943040)


HOST_DEVICES = 8
"""GPUs of one machine, joined by NVLink."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program.

    Attributes:
      text: the optimised HLO.
      argument_bytes, output_bytes, temporary_bytes: memory of one device. Aliased outputs, ``alias_bytes`` of them,
        count in both of the first two; what the driver, NCCL and the allocator take is in none.
      kernels: ``triton`` or ``mosaic`` for each call of a Pallas kernel in the program, in its order.
      host_argument_bytes: of arguments in the host's memory, which count nowhere else (but on CPUs, where they are
        `argument_bytes` like all others).
    """

    text: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    kernels: tuple[str, ...]
    host_argument_bytes: int = 0


def missing() -> str | None:
    """Why ``compile`` can't work here; None when it can."""
    for module, package in (("jax_plugins.xla_cuda13", "jax-cuda13-pjrt"), ("jax_cuda13_plugin", "jax-cuda13-plugin")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{package} is not installed: pip install --no-deps {package}=={jax.__version__}"
    return None


def devices(num_devices: int = 1, chip: Chip = H200) -> list[Any]:
    """Compile-only devices for a mesh: of one host, or of hosts of `HOST_DEVICES` where that divides a larger number.

    Raises:
      NotImplementedError: the CUDA plugin is missing; the message names the package.
    """
    if reason := missing():
        raise NotImplementedError(reason)
    from jax.experimental import topologies

    hosts = num_devices // HOST_DEVICES if num_devices % HOST_DEVICES == 0 else 1
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_target_config(chip), topology=f"1x{hosts}x{num_devices // hosts}"
    )
    return list(topology.devices)


@contextlib.contextmanager
def target(chip: Chip = H200) -> Iterator[None]:
    """A context in which programs are traced for the chip, as `device.target_device` reads it."""
    device = AbstractDevice(device_kind=chip.kind, num_cores=chip.num_cores, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device)):
        yield


def lower(function: Callable[..., Any], *arguments: Any, chip: Chip = H200) -> str:
    """The program's StableHLO, kernels included, for a GPU of that kind.

    Args:
      function: what to jit; a jitted function will do.
      arguments: arrays or ``jax.ShapeDtypeStruct`` trees.
    """
    with target(chip):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def compile(function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None, chip: Chip = H200) -> Report:
    """Compiles to machine code.

    Args:
      function: what to jit, or a jitted function, whose donations are kept.
      arguments: ``jax.ShapeDtypeStruct`` trees, with shardings over ``mesh`` if there is one.
      mesh: of `devices`; None is one device that holds everything.
      chip: used without a mesh.

    Raises:
      NotImplementedError: the CUDA plugin is missing.
      Exception: what the compiler refuses, as it says it.
    """
    if mesh is None:
        mesh = Mesh(np.array(devices(1, chip)), ("device",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), arguments
        )
    with _without_persistent_cache(), jax.set_mesh(mesh):  # Pallas asks the mesh in context for the kind of GPU
        # A jitted function is not jitted again: its donations would be lost.
        lowered = (function if hasattr(function, "lower") else jax.jit(function)).lower(*arguments)
        compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        raise RuntimeError("the compiler gave no text or no memory analysis of the program")
    return Report(
        text=text,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        kernels=kernel_targets(lowered.as_text()),
        host_argument_bytes=memory.host_argument_size_in_bytes,
    )


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """jax would store what it can't load again: a program for a device that is not there."""
    from jax.experimental.compilation_cache import compilation_cache

    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it asks for the flag only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def kernel_targets(text: str) -> tuple[str, ...]:
    """``triton`` or ``mosaic`` for each Pallas kernel in the text of a lowering, in its order."""
    found = []
    for line in text.splitlines():
        if "stablehlo.custom_call" in line:
            found += ["triton"] * ("@__gpu$xla.gpu.triton" in line) + ["mosaic"] * ("@mosaic_gpu" in line)
    return tuple(found)


def _target_config(chip: Chip) -> str:
    """XLA's description of a GPU, as the text form of its protocol buffer."""
    major, minor = chip.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_memory + 1024} shared_memory_per_block_optin: {chip.shared_memory}
  threads_per_core_limit: 2048 core_count: {chip.num_cores} fpus_per_core: {128 if major > 8 else 64}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth} l2_cache_size: {chip.l2_cache} clock_rate_ghz: {chip.clock}
  device_memory_size: {chip.memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
device_description_str: "{chip.kind}"
"""
