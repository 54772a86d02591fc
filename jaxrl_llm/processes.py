"""What the processes of one run tell each other, so that all of them decide alike.

Every process runs the same host program, so a decision that only one of them takes (an error in a reward, a signal, a
full disk) would leave the others waiting in their next collective. Such things are exchanged here first. Only host
work may stand in these functions: where device work of several processes is inside, the others don't come to the
exchange. A run of one process exchanges nothing, and starts no device for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxrl_llm.errors import RunStopped, UserError

if TYPE_CHECKING:
    import jax

T = TypeVar("T")

PLAIN = (type(None), bool, int, float, str)
ERRORS = {"UserError": UserError, "RunStopped": RunStopped}
"""Those that keep their kind on the way; any other is a RuntimeError elsewhere."""

SIZE_BYTES = 4
SMALLEST_MESSAGE = 1024  # bytes; longer ones are padded to powers of two, so that few programs are compiled


def count() -> int:
    """How many processes the run has."""
    jax = _joined_jax()
    return 1 if jax is None else jax.process_count()


def index() -> int:
    """Which of them this is, from 0."""
    jax = _joined_jax()
    return 0 if jax is None else jax.process_index()


def is_first() -> bool:
    """Whether this is the process that writes files and prints results."""
    return index() == 0


def share(size: int) -> range:
    """This process's part of ``size`` items: the parts follow each other, cover all, and differ by at most one item."""
    return range(size * index() // count(), size * (index() + 1) // count())


def exchange(work: Callable[[], T]) -> list[T]:
    """What ``work`` returns on each process, by process, to all of them.

    It travels as JSON: None, bool, int, float (to the last bit; also NaN and the infinities), str, lists, and dicts by
    text. Anything else is a TypeError.

    Raises:
      Exception: what ``work`` raised here, or what it raised elsewhere: UserError and RunStopped as such, anything else
        as a RuntimeError. So either all processes go on or none does.
    """
    if count() == 1:
        return [work()]
    own: Exception | None = None
    try:
        message = _encode({"value": work()})
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to hear of it
        own = error
        message = _encode({"error": _told(error)})
    found = [json.loads(one) for one in _gather(message)]
    if own is not None:
        raise own
    for process, told in enumerate(found):
        if "error" in told:
            kind, text = told["error"]
            raise ERRORS.get(kind, RuntimeError)(f"Process {process}: {text}")
    return [told["value"] for told in found]


@contextlib.contextmanager
def agreement() -> Iterator[None]:
    """An error inside, on any process, is raised on all of them where they leave the block; see `exchange`."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        if count() == 1:
            raise
        own = error

    def outcome() -> None:
        if own is not None:
            raise own

    exchange(outcome)


def together(work: Callable[[], T]) -> T:
    """What ``work`` returns here, once it has succeeded on every process."""
    with agreement():
        value = work()
    return value


def from_first(value: T) -> T:
    """Process 0's value, to all: for what is measured (seconds, bytes) and then decides something."""
    return exchange(lambda: value)[0]


def require_equal(values: Mapping[str, Any]) -> None:
    """Refuses processes that were given different things.

    Args:
      values: by what the error calls them; comparable and short (of something long, a digest).

    Raises:
      UserError: on all processes, where one has another value than process 0.
    """
    found = exchange(lambda: dict(values))
    for process, other in enumerate(found):
        different = [name for name, value in found[0].items() if other.get(name) != value]
        if different:
            raise UserError(
                f"Process {process} of {len(found)} differs from process 0 in {', '.join(different)}. All processes of "
                "a run need the same command line, code, and files: start them by one command, on a shared file system."
            )


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array that every process has in full, to the devices of all: each gives its devices their part.

    `jax.device_put` would first compare all of it between the processes.
    """
    import jax

    if count() == 1:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda place: array[place])


def _joined_jax() -> Any:
    """The module, if it is one of several processes: a program that never needed jax does not load it here."""
    jax = sys.modules.get("jax")
    return jax if jax is not None and jax.distributed.is_initialized() else None


def _told(error: Exception) -> list[str]:
    """The kind of an error, as the others raise it, and its text."""
    for name, kind in ERRORS.items():
        if isinstance(error, kind):
            return [name, str(error)]
    return ["", f"{type(error).__name__}: {error}"]


def _encode(value: Any) -> bytes:
    _require_plain(value)
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _require_plain(value: Any) -> None:
    """Refuses what JSON would change without a word: tuples, numbers of numpy, dicts by numbers."""
    if type(value) is dict:
        for key, one in value.items():
            if type(key) is not str:
                raise TypeError(f"A dict by {key!r} can't be sent to other processes: its keys must be texts.")
            _require_plain(one)
    elif type(value) is list:
        for one in value:
            _require_plain(one)
    elif type(value) not in PLAIN:
        raise TypeError(f"{type(value).__name__} can't be sent to other processes: make plain values of it.")


def _gather(message: bytes) -> list[bytes]:
    """Every process's message: by one collective where all are short, by two where not."""
    framed = len(message).to_bytes(SIZE_BYTES, "little") + message
    found = _from_all(framed[:SMALLEST_MESSAGE], SMALLEST_MESSAGE)
    ends = [SIZE_BYTES + int.from_bytes(one[:SIZE_BYTES], "little") for one in found]
    if max(ends) > SMALLEST_MESSAGE:
        found = _from_all(framed, _padded_size(max(ends)))
    return [one[SIZE_BYTES:end] for one, end in zip(found, ends, strict=True)]


def _from_all(message: bytes, size: int) -> list[bytes]:
    """Every process's message, filled up to at least ``size`` bytes. All have as many devices, and each device takes a
    part of it.

    One group of all devices gathers them, which a program on a part of the devices never forms. (Those of
    `multihost_utils.process_allgather`, one for each place in a process, can be those of an update that still runs; on
    CPUs the two then take each other's bytes.)
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    split = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    here = [device for device in devices if device.process_index == index()]
    width = -(-size // len(here))
    own = np.frombuffer(message.ljust(len(here) * width, b"\0"), np.uint8).reshape(len(here), 1, width)
    shards = [jax.device_put(part, device) for part, device in zip(own, here, strict=True)]
    parts = jax.make_array_from_single_device_arrays((len(devices), width), split, shards)
    return [one.tobytes() for one in np.asarray(_copied_to_all(split.mesh)(parts)).reshape(count(), -1)]


@functools.cache
def _copied_to_all(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _padded_size(size: int) -> int:
    return max(SMALLEST_MESSAGE, 1 << (size - 1).bit_length())
