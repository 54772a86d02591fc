"""Which device a kernel is being traced for, as far as the choice of an implementation needs it."""

import dataclasses
import re

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """The kind of device that a program is traced for.

    Attributes:
      platform: ``cpu``, ``gpu`` or ``tpu``.
      kind: the maker's name, such as ``NVIDIA H200``.
      compute_capability: NVIDIA's (major, minor); None for other makers and for a name that isn't known.
      num_cores: streaming multiprocessors; None where jax doesn't say.
    """

    platform: str
    kind: str
    compute_capability: tuple[int, int] | None = None
    num_cores: int | None = None


# Of chips that are not here and of which only the name is known: a mesh of compile-only devices.
_COMPUTE_CAPABILITIES = (
    (r"\b(H100|H200|GH200|H800|H20)\b", (9, 0)),
    (r"\b(A100|A30|A800)\b", (8, 0)),
    (r"\b(A10|A10G|A16|A40|A2|RTX A\d+|RTX 30\d+)\b", (8, 6)),
    (r"\b(L4|L40|L40S|RTX 40\d+)\b", (8, 9)),
    (r"\b(B200|GB200)\b", (10, 0)),
    (r"\b(B300|GB300)\b", (10, 3)),
    (r"\b(RTX 50\d+|RTX PRO \d+)\b", (12, 0)),
    (r"\bT4\b", (7, 5)),
    (r"\bV100\b", (7, 0)),
    (r"\bP100\b", (6, 0)),
)


def target_device() -> Device:
    """The device that the code now running is traced for.

    The mesh in context (``jax.set_mesh``, ``jax.shard_map``) decides: its devices may be compile-only ones. Without
    a mesh it is jax's default device, which starts the backend.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        default = jax.devices(default)[0]
    if default is None:
        default = jax.devices()[0]
    if abstract is None or (abstract.platform, abstract.device_kind) == (default.platform, default.device_kind):
        return _of_device(default)
    capability = None
    if abstract.platform == "gpu":
        capability = capability_of_kind(abstract.device_kind)
    return Device(abstract.platform, abstract.device_kind, capability, abstract.num_cores)


def capability_of_kind(kind: str) -> tuple[int, int] | None:
    """NVIDIA's compute capability by the name of the chip; None for a name that is not in the list."""
    for pattern, capability in _COMPUTE_CAPABILITIES:
        if re.search(pattern, kind):
            return capability
    return None


def _of_device(device) -> Device:
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))  # AMD's is such as gfx942
    capability = (int(match[1]), int(match[2])) if match else None
    num_cores = getattr(device, "core_count", None)
    return Device(device.platform, device.device_kind, capability, num_cores)
