"""What a compiled program sends between devices, read from its optimised HLO.

Bytes are those that one device receives, the least that any algorithm needs: of a gather what it lacks, of a sum over n
devices twice ``(n - 1) / n`` of the array.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np
from jax.sharding import Mesh

from jaxrl_kernels.gpu_compile import HOST_DEVICES
from jaxrl_llm.plan.device_kinds import DeviceKind

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_ITEM_BYTES = {"pred": 1, "f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2,
               "u16": 2, "s8": 1, "u8": 1, "s4": 1, "u4": 1}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """All of a kind over the same mesh axes.

    Attributes:
      axes: mesh axes whose devices take part.
      across_hosts: whether they are of several machines.
      in_loop: whether it stands in the loop whose trips are given at run time: micro-batches of an update, tokens of a
        decode dispatch. The figures are then those of one trip, else of the program.
      bytes: received by one device.
    """

    kind: str
    axes: tuple[str, ...]
    across_hosts: bool
    in_loop: bool
    bytes: int
    count: int

    def seconds(self, kind: DeviceKind, efficiency: float, least_s: float) -> float:
        """At a part of the peak rate, and ``least_s`` for each."""
        rate = kind.network_rate if self.across_hosts else kind.link_rate
        return self.bytes / (rate * efficiency) + self.count * least_s


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Those of a program over ``mesh``, the most bytes first. Loops of known length count with all their trips, loops
    of unknown length within another once."""
    computations, entry = _computations(text)
    found: collections.Counter[tuple[str, tuple[str, ...], bool, bool]] = collections.Counter()
    counts: collections.Counter[tuple[str, tuple[str, ...], bool, bool]] = collections.Counter()

    def walk(name: str, times: int, in_loop: bool) -> None:
        for line in computations.get(name, ()):
            if "async-done(" in line or "async-update(" in line:
                continue  # they name the computation that the start has named
            match = _INSTRUCTION.search(line)
            if match:
                ids = _group(line, mesh.size)
                if len(ids) > 1:
                    axes = _axes(ids, mesh)
                    key = match[2], axes, across_hosts(ids, mesh), in_loop
                    found[key] += times * _received(match[2], _result_bytes(match[1], match[2], match[3]), len(ids))
                    counts[key] += times
            trips, inside = 1, in_loop
            if " while(" in line:
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                trips, inside = (int(known[1]), in_loop) if known else (1, True)
            for called in (*_CALLED.findall(line), *_names(line)):
                if called in computations:
                    walk(called, times * trips, inside)

    walk(entry, 1, False)
    all_of = [Collective(*key, bytes=size, count=counts[key]) for key, size in found.items()]
    return sorted(all_of, key=lambda one: -one.bytes)


def across_hosts(places: Iterable[int], mesh: Mesh) -> bool:
    """Whether devices, by their places in the mesh, are of several machines: a block of a run may begin within one."""
    devices = mesh.devices.ravel()
    return len({devices[place].id // HOST_DEVICES for place in places}) > 1


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = None if line.startswith(" ") else _HEADER.match(line)
        if header:
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif current:
            computations[current].append(line)
    return computations, entry


def _names(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    return re.findall(r"[\w.\-]+", branches[1]) if branches else []


def _result_bytes(types: str, kind: str, start: str | None) -> int:
    """Of an instruction's results. The start of an asynchronous one but of a sum also names its operands, first."""
    sizes = [
        _ITEM_BYTES.get(dtype, 1) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types)
    ]
    if start and kind != "all-reduce":
        if types.startswith("(("):
            operands = re.match(r"\(\(([^()]*)\)", re.sub(r"\{[^}]*\}", "", types))
            sizes = sizes[len(re.findall(r"\w+\[", operands[1])) if operands else 0 :]
        elif types.startswith("("):
            if kind == "collective-permute":
                sizes = sizes[:2]  # two counters follow
            sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _received(kind: str, result: int, devices: int) -> int:
    if kind == "all-reduce":
        return 2 * result * (devices - 1) // devices
    if kind == "reduce-scatter":
        return result * (devices - 1)
    if kind == "collective-permute":
        return result
    return result * (devices - 1) // devices


def _group(line: str, num_devices: int) -> list[int]:
    """Devices, by their place in the mesh, that are one of the groups (or pairs) of a collective."""
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}(.*?)\}\}", line) or re.search(
        r"source_target_pairs=\{\{(\d+),(\d+)\}\}", line
    )
    if pairs:
        return sorted({int(pairs[1]), int(pairs[2])})
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return [int(index) for index in listed[1].split(",")]
    iota = re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", line)
    if iota:
        return _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))[0].tolist()
    named = re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))?\s*\{{([^}}]*)\}}", line)
    if named:
        return _of_named_axes(named[1], _iota(named[2], named[3]) if named[2] else np.arange(num_devices), named[4])
    if re.search(r"replica_groups=(?!\{\})", line):
        raise ValueError(f"groups of devices in a form that is not known: {line.strip()}")
    return list(range(num_devices))


def _iota(sizes: str, transposed: str | None) -> np.ndarray:
    ids = np.arange(math.prod(int(size) for size in sizes.split(","))).reshape([int(size) for size in sizes.split(",")])
    return ids.transpose([int(axis) for axis in transposed.split(",")]) if transposed else ids


def _of_named_axes(axes: str, ids: np.ndarray, members: str) -> list[int]:
    """The first group along axes of a mesh of XLA's own. A part of an axis is written ``name:(before)size``: the axis
    is that many times as long in front of it."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = {name: (1, size) for name, size in sizes.items()}
    taken = {}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", members):
        taken.setdefault(name, []).append((int(before), int(size)) if size else parts[name])
    places = []
    for name, length in sizes.items():
        along = np.zeros(1, np.int64)
        for before, size in taken.get(name, ()):
            along = (along[:, None] + np.arange(size) * (length // (before * size))).ravel()
        places.append(along)
    return ids.reshape(list(sizes.values()))[np.ix_(*places)].ravel().tolist()


def _axes(ids: list[int], mesh: Mesh) -> tuple[str, ...]:
    places = np.array(np.unravel_index(ids, mesh.devices.shape))
    return tuple(axis for axis, where in zip(mesh.axis_names, places, strict=True) if len(set(where.tolist())) > 1)
