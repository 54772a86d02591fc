"""Arrays on devices that share none with those they come from: the same values, each byte sent once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.crossing import cross, lies_apart
from jaxrl_llm.observability.timing import CompileCounter


def sharding(sizes, first, *spec):
    count = int(np.prod(sizes))
    devices = np.array(jax.devices()[first : first + count]).reshape(sizes)
    names = ("x", "y")[: len(sizes)]
    return NamedSharding(Mesh(devices, names), PartitionSpec(*spec))


SOURCES = [sharding((4,), 0, "x"), sharding((4,), 0, None, "x"), sharding((2, 2), 0, "x", "y"), sharding((4,), 0)]
TARGETS = [
    sharding((2,), 4, "x"),
    sharding((2, 2), 4, "y", "x"),
    sharding((2, 2), 4, ("x", "y")),
    sharding((3,), 4, "x"),
    sharding((4,), 4),
    sharding((1,), 7),
]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SOURCES, TARGETS)), ids=str)
def test_values_arrive_where_they_belong(source, target):
    """Caught: pieces joined in another order; a shard cut from the wrong end."""
    value = np.arange(12 * 24 * 2, dtype=np.float32).reshape(12, 24, 2)
    array = jax.device_put(value, source)
    assert lies_apart(array, target) and not lies_apart(array, source)
    (moved,) = cross([array], [target])
    assert moved.sharding == target
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def test_several_at_once_and_again():
    """Of other shapes and dtypes in one call, a number without dimensions among them; a second call compiles nothing.

    Caught: programs made anew for each call."""
    arrays = [
        jax.device_put(jnp.arange(16, dtype=jnp.int8).reshape(4, 4), SOURCES[0]),
        jax.device_put(jnp.arange(24, dtype=jnp.bfloat16), SOURCES[0]),
        jax.device_put(jnp.float32(3), SOURCES[3]),
    ]
    targets = [TARGETS[1], TARGETS[3], TARGETS[4]]
    first = cross(arrays, targets)
    with CompileCounter() as compiles:
        second = cross(arrays, targets)
    assert compiles.count == 0
    for array, *moved in zip(arrays, first, second, strict=True):
        for one in moved:
            assert one.dtype == array.dtype
            np.testing.assert_array_equal(jax.device_get(one), jax.device_get(array))


def test_each_device_receives_its_shard_and_senders_take_turns(monkeypatch):
    """Of an array that four devices hold, split over two that hold it twice: four pieces, of four senders.

    Caught: one device that sends all; whole arrays sent and cut where they arrive."""
    put, sent = jax.device_put, []

    def watched(values, devices):
        sent.extend(zip(values, devices, strict=True))
        return put(values, devices)

    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), SOURCES[3])
    target = sharding((2, 2), 4, "x")
    monkeypatch.setattr(jax, "device_put", watched)
    (moved,) = cross([array], [target])
    assert sum(value.nbytes for value, _ in sent) == sum(shard.data.nbytes for shard in moved.addressable_shards)
    assert len({device for value, _ in sent for device in value.devices()}) == 4
    assert [device for _, device in sent] == list(target.mesh.devices.flat)
