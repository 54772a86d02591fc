"""A layout change gives the same parameters, moves only what is missing, and compiles once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.bench.gpu_programs import operations
from jaxrl_llm.config import HybridEngineConfig, MeshConfig
from jaxrl_llm.hybrid_engine import HybridEngine
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.observability.timing import CompileCounter
from jaxrl_llm.resharding import BucketMover, received_bytes
from jaxrl_llm.sharding import GENERATION, TRAINING, make_mesh
from tests.test_update import CONFIG

UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False)
MATRICES = (("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down"))


def engine_and_params(shape, *, bucket_bytes=2**20, dtype=jnp.float32, config=UNTIED, **options):
    data, fsdp, tensor, *rest = shape
    stages = rest[0] if rest else 1
    mesh = make_mesh(
        MeshConfig(data=data, fsdp=fsdp, tensor=tensor, pipeline=stages), jax.devices()[: data * fsdp * tensor * stages]
    )
    decoder = Decoder(config)
    params = jax.device_put(decoder.init(jax.random.key(0)), TRAINING.shardings(mesh, decoder.logical_axes()))
    return HybridEngine(decoder, mesh, HybridEngineConfig(bucket_bytes=bucket_bytes), dtype, **options), params


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (1, 4, 2), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 2**20], ids=["array at a time", "all at once"])
def test_values_and_shardings(shape, bucket_bytes):
    """Caught: layers in the wrong order; a bucket that leaves its last array behind; a last bucket never flushed."""
    engine, params = engine_and_params(shape, bucket_bytes=bucket_bytes)
    moved = engine.to_generation(params)
    expected = engine.decoder.generation_params(jax.device_put(jax.device_get(params)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), jax.device_get(expected))
    shardings = GENERATION.shardings(engine.mesh, engine.decoder.generation_axes())
    placed = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), moved, shardings)
    assert jax.tree.all(placed)


def test_moved_bytes_are_the_theoretical_minimum():
    """Caught: counting each array's whole size; counting what a device already holds.

    fsdp 4: a device holds a quarter of every parameter that carries `embed` and receives the rest of it.
    """
    engine, params = engine_and_params((1, 4, 1))
    engine.to_generation(params)
    axes = engine.decoder.logical_axes()
    split = sum(
        leaf.nbytes
        for leaf, names in zip(
            jax.tree.leaves(params), jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)), strict=True
        )
        if "embed" in names
    )
    assert engine.last.moved_bytes == split * 3 // 4 * 4


def test_equal_layouts_move_nothing_and_share_buffers():
    """Caught: a cast of parameters that need none; a `device_put` of all (which a new array object shows)."""
    engine, params = engine_and_params((1, 1, 1))
    moved = engine.to_generation(params)
    assert engine.last.moved_bytes == 0
    assert moved["embed"]["weight"] is params["embed"]["weight"]
    assert moved["lm_head"]["weight"] is params["lm_head"]["weight"]
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(params["blocks"]))
    assert engine.last.copied_bytes == layers  # unstacked and fused, each byte once


def test_a_cast_halves_what_moves():
    """Caught: casting after the move."""
    whole, params = engine_and_params((1, 4, 1))
    half, _ = engine_and_params((1, 4, 1), dtype=jnp.bfloat16)
    whole.to_generation(params)
    cast = half.to_generation(params)
    assert half.last.moved_bytes * 2 == whole.last.moved_bytes
    assert {leaf.dtype for leaf in jax.tree.leaves(cast)} == {jnp.dtype(jnp.bfloat16)}
    assert params["embed"]["weight"].dtype == jnp.float32 and not params["embed"]["weight"].is_deleted()


@pytest.mark.parametrize("weight_dtype", ["int8", "float8"])
def test_8_bit_matrices_move_a_quarter(weight_dtype):
    """Exactly: each device of a 4 x 2 mesh has 1/8 of a matrix and gets the rest of its half, a byte a weight. Beside
    that move the scales that lie along D, of which a device has a quarter; norms, embedding and output as before.

    Caught: quantizing after the move; scales of the other matrices moved.
    """
    whole, params = engine_and_params((1, 4, 2))
    low, _ = engine_and_params((1, 4, 2), weight_dtype=weight_dtype)
    whole.to_generation(params)
    moved = low.to_generation(params)
    layers = moved["layers"]
    weights = sum(layer[part][name].size for layer in layers for part, name in MATRICES)
    matrices = 8 * (weights // 2 - weights // 8)
    scales = 8 * len(layers) * 2 * (CONFIG.hidden_size * 3 // 4) * 4
    assert whole.last.moved_bytes - low.last.moved_bytes == 4 * matrices - matrices - scales
    assert matrices > scales


@pytest.mark.parametrize("weight_dtype", ["int8", "float8"])
def test_scales_are_of_whole_channels_and_only_they_are_exchanged(weight_dtype):
    """The same values bit for bit as on one device, from parameters rounded once (not from bfloat16); before the move
    nothing larger than the scales is sent.

    Caught: the largest weight of a shard in place of the channel's; weights cast to bfloat16 first.
    """
    engine, params = engine_and_params((1, 4, 2), dtype=jnp.bfloat16, weight_dtype=weight_dtype)
    moved = engine.to_generation(params)
    run = jax.device_put(jax.device_get(params["blocks"]["run_0"]))
    arrange = jax.jit(engine.decoder.generation_layer, static_argnums=(1, 2))
    for index, layer in enumerate(moved["layers"]):
        expected = arrange(run, index, weight_dtype)
        for part, name in MATRICES:
            for one in (name, f"{name}_scale"):
                got, want = layer[part][one], expected[part][one]
                assert got.dtype == want.dtype
                np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
        assert layer["mlp_norm"]["scale"].dtype == jnp.bfloat16
    text = engine._arrange.lower(params["blocks"]["run_0"], jnp.int32(0)).compile().as_text()
    sent = operations(text, {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"})
    assert sent and max(operation.largest for operation in sent) <= 2 * CONFIG.intermediate_size


def test_a_repeated_change_compiles_nothing():
    """Caught: programs made anew for each change."""
    engine, params = engine_and_params((2, 2, 2))
    engine.to_generation(params)
    with CompileCounter() as compiles:
        engine.to_generation(params)
    assert compiles.count == 0


def test_one_program_serves_every_layer():
    """Caught: a layer index that is a Python int, which compiles a program a layer."""
    counts = []
    for num_layers in (2, 2, 4):  # the first compiles what has nothing to do with layers
        config = dataclasses.replace(CONFIG, num_layers=num_layers, windows=(None,) * num_layers)
        engine, params = engine_and_params((2, 2, 2), config=config)
        with CompileCounter() as compiles:
            engine.to_generation(params)
        counts.append(compiles.count)
    assert counts[1] == counts[2] > 0


def test_a_change_holds_one_bucket_and_one_layer_beside_both_layouts(monkeypatch):
    """Caught: everything moved at once; sources that are kept until the end; buckets that do not wait for each other.

    What is neither a training parameter nor moved already is the change's own memory: the layer that was taken out of
    its run, and what of earlier ones waits in the bucket.
    """
    bucket_bytes = 12_000  # between a layer's smallest array and a whole layer
    engine, params = engine_and_params((1, 4, 2), bucket_bytes=bucket_bytes)
    before = jax.live_arrays()  # held, so that no id is used again
    known = {id(array) for array in before}
    events, in_flight, beside = [], [], []
    flush, wait = BucketMover.flush, jax.block_until_ready

    def counted_flush(mover):
        # An array on one device is a view of a shard here.
        alive = [array for array in jax.live_arrays() if len(array.sharding.device_set) > 1]
        beside.append(sum(array.nbytes for array in alive if id(array) not in known))
        pending = mover.pending
        in_flight.append(sum(slot.array.nbytes for slot in pending))
        events.append("move")
        flush(mover)
        known.update(id(slot.array) for slot in pending)

    def counted_wait(arrays):
        events.append("wait")
        return wait(arrays)

    monkeypatch.setattr(BucketMover, "flush", counted_flush)
    monkeypatch.setattr(jax, "block_until_ready", counted_wait)
    result = engine.to_generation(params)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(result))
    layer = sum(leaf.nbytes for leaf in jax.tree.leaves(result["layers"][0]))
    assert events == ["move", "wait"] * len(in_flight) and len(in_flight) > 2
    assert max(in_flight) <= bucket_bytes + largest
    assert layer <= max(beside) <= bucket_bytes + layer


def test_received_bytes_of_one_array():
    """Caught: the overlap with the first device's shard in place of each device's own."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    source = TRAINING.sharding(mesh, ("embed", "mlp"))
    target = GENERATION.sharding(mesh, ("embed", "mlp"))
    # Each of the 8 devices holds 1/8 of 64 values and then half of them.
    assert received_bytes((8, 8), 4, source, target) == 8 * (32 - 8) * 4
    assert received_bytes((8, 8), 4, source, source) == 0
