"""Generation's tensor groups are chosen apart from training's: what moves, by which collectives, what is decoded."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import resharding
from jaxrl_llm.config import HybridEngineConfig, MeshConfig
from jaxrl_llm.decoding.engine import Engine
from jaxrl_llm.errors import UserError
from jaxrl_llm.hybrid_engine import HybridEngine
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.observability.timing import CompileCounter
from jaxrl_llm.sharding import TRAINING, Layout, generation_view, make_mesh, replica_count
from tests.test_update import CONFIG

STAGED = Layout("training", {**TRAINING.rules, "layers": "pipeline"})
"""As `TRAINING`, with the layers of a stacked run split over the stages of a pipeline."""

WIDE = dataclasses.replace(
    CONFIG, num_heads=8, num_kv_heads=8, head_size=4, num_layers=4, windows=(None,) * 4, tie_embeddings=False
)
"""Everything that `tensor` splits can be split by 8."""

LAYOUTS = [
    # data, pipeline, fsdp, tensor -> tensor of generation
    ((1, 1, 1, 8), 4),
    ((1, 1, 1, 8), 1),
    ((1, 1, 2, 4), 2),
    ((1, 1, 2, 4), 8),
    ((1, 1, 4, 2), 4),
    ((2, 1, 2, 2), 8),
    ((1, 2, 1, 4), 4),
    ((1, 2, 2, 2), 1),
    ((1, 2, 1, 4), 8),
]


def engine_and_params(shape, tensor=0, *, config=WIDE, scale=1.0, **options):
    data, pipeline, fsdp, tensor_size = shape
    mesh = make_mesh(MeshConfig(data=data, pipeline=pipeline, fsdp=fsdp, tensor=tensor_size))
    decoder = Decoder(config)
    host = jax.tree.map(lambda leaf: scale * leaf if leaf.ndim > 1 else leaf, decoder.init(jax.random.key(0)))
    params = jax.device_put(host, STAGED.shardings(mesh, decoder.logical_axes()))
    settings = HybridEngineConfig(**options)
    return HybridEngine(decoder, mesh, settings, jnp.float32, training=STAGED, tensor=tensor), params, host


def group_size(operation):
    """Devices of a group of a collective, in any of the forms that XLA writes."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", operation):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", operation):
        return len(found[1].split(","))
    sizes, names = re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", operation).groups()
    size_of = dict(re.findall(r"'(\w+)'=(\d+)", sizes))
    parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", names)
    return int(np.prod([int(part or size_of[name]) for name, part in parts]))


def collectives(text):
    """(kind, bytes that one device receives) of each collective of a compiled float32 program."""
    found = []
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for results, kind, rest in re.findall(rf"= (\(?\w+\[.*?) ({kinds})(?:-start)?\((.*)", text):
        size = sum(np.prod([int(n) for n in dims.split(",") if n]) for dims in re.findall(r"f32\[([\d,]*)\]", results))
        groups = 2 if kind == "collective-permute" else group_size(rest)
        found.append((kind, int(4 * size * (groups - 1) // groups if kind != "collective-permute" else 4 * size)))
    return found


@pytest.fixture
def compiled(monkeypatch):
    """The texts of all programs that move arrays."""
    texts = []

    def recording(make):
        def program(*arguments):
            jitted = make(*arguments)

            def run(array):
                texts.append(jitted.lower(array).compile().as_text())
                return jitted(array)

            return run

        return program

    for name in ("move_program", "split_program"):
        monkeypatch.setattr(resharding, name, recording(getattr(resharding, name)))
    return texts


@pytest.mark.parametrize(("shape", "tensor"), LAYOUTS, ids=str)
def test_values_and_the_least_bytes_by_the_compiled_collectives(shape, tensor, compiled):
    """Equal values on generation's mesh, and what the compiled programs receive is what the shards lack, to the byte.

    Caught: layers of the stages in turn; what fsdp splits gathered before `tensor` is split further.
    """
    engine, params, host = engine_and_params(shape, tensor)
    moved = engine.to_generation(params)
    expected = engine.decoder.generation_params(host)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved), jax.device_get(expected))
    mesh = engine.generation_mesh
    assert mesh.shape["tensor"] == tensor and replica_count(mesh) == 8 // tensor
    shardings = engine.generation.shardings(mesh, engine.decoder.generation_axes())
    placed = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), moved, shardings)
    assert jax.tree.all(placed)
    sent = [operation for text in compiled for operation in collectives(text)]
    assert {kind for kind, _ in sent} <= {"all-gather", "all-to-all"}
    assert 8 * sum(received for _, received in sent) == engine.last.moved_bytes > 0
    run = params["blocks"]["run_0"]
    assert not collectives(engine._arrange.lower(run, jnp.int32(0)).compile().as_text())


@pytest.mark.parametrize(("shape", "tensor"), [((1, 1, 1, 8), 4), ((1, 1, 1, 8), 1), ((1, 2, 1, 4), 2)], ids=str)
def test_moved_bytes_are_those_of_hybridflow(shape, tensor):
    """(t p - t_g) / (t_g t p) of the matrices of layers for each device, arXiv:2409.19256, table 2."""
    engine, params, _ = engine_and_params(shape, tensor)
    moved = engine.to_generation(params)
    _, stages, _, size = shape
    groups = stages * size
    layers = sum(leaf.nbytes for layer in moved["layers"] for leaf in jax.tree.leaves(layer) if leaf.ndim > 1)
    scales = sum(leaf.nbytes for layer in moved["layers"] for leaf in jax.tree.leaves(layer) if leaf.ndim == 1)
    rest = sum(moved[name]["weight"].nbytes for name in ("embed", "lm_head"))  # on every stage
    assert engine.last.moved_bytes == (
        8 * layers * (groups - tensor) // (tensor * groups)
        + 8 * scales * (stages - 1) // stages
        + 8 * rest * (size - tensor) // (tensor * size)
    )


def test_a_repeated_change_compiles_nothing_and_holds_a_bucket_beside_both_layouts(monkeypatch):
    """In a pipeline, onto another tensor size. Caught: programs made anew."""
    bucket_bytes = 20_000
    engine, params, _ = engine_and_params((1, 2, 2, 2), 4, bucket_bytes=bucket_bytes)
    result = engine.to_generation(params)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(result))
    layer = sum(leaf.nbytes for leaf in jax.tree.leaves(result["layers"][0]))
    del result
    before = jax.live_arrays()
    known, beside, flush = {id(array) for array in before}, [], resharding.BucketMover.flush

    def counted(mover):
        alive = [array for array in jax.live_arrays() if len(array.sharding.device_set) > 1]
        beside.append(sum(array.nbytes for array in alive if id(array) not in known))
        pending = mover.pending
        flush(mover)
        known.update(id(slot.array) for slot in pending)

    monkeypatch.setattr(resharding.BucketMover, "flush", counted)
    with CompileCounter() as compiles:
        engine.to_generation(params)
    assert compiles.count == 0
    # The group as it was taken out, its layers, and what waits.
    assert len(beside) > 3 and max(beside) <= bucket_bytes + largest + 2 * 2 * layer


@pytest.mark.parametrize(
    ("shape", "tensor", "options"),
    [
        ((2, 1, 1, 4), 2, {}),
        ((1, 2, 2, 2), 4, {}),
        ((1, 1, 4, 2), 2, {"enable_3d_resharding": False}),
    ],
    ids=str,
)
def test_the_same_tokens_as_on_one_device(shape, tensor, options, rollout, make_request, make_model):
    """Completions with the log-probabilities of a full forward, and those of one device."""
    model = make_model(num_heads=8, num_kv_heads=4, windows=(None, None))
    engine, params, _ = engine_and_params(shape, tensor, config=model.decoder.config, scale=5.0, **options)
    generation = engine.to_generation(params)
    decoder_engine = Engine(model.decoder, engine.generation_mesh, rollout(num_slots=2))
    requests = [make_request(5 + n, n=2, key=n, temperature=0.0 if n % 2 else 1.0) for n in range(5)]
    found = decoder_engine.generate(generation, requests)
    one, one_params = model.engine(rollout(num_slots=2))
    for request, completions, expected in zip(requests, found, one.generate(one_params, requests), strict=True):
        model.check_same(request, expected, completions)
        for completion in completions:
            np.testing.assert_allclose(completion.logprobs, model.logprobs(request, completion), atol=1e-4)
    assert decoder_engine.num_replicas == 8 // tensor


def test_one_layout_for_both_phases_moves_nothing_and_says_what_decoding_gathers():
    """Each dispatch then gathers what a change would have moved."""
    engine, params, _ = engine_and_params((1, 1, 4, 2), enable_3d_resharding=False)
    kept = engine.to_generation(params)
    assert engine.last.moved_bytes == 0
    assert kept["embed"]["weight"] is params["embed"]["weight"]
    moving, _, _ = engine_and_params((1, 1, 4, 2))
    moving.to_generation(params)
    assert engine.last.gathered_bytes == moving.last.moved_bytes > moving.last.gathered_bytes == 0


def test_a_size_that_the_mesh_does_not_have_is_refused():
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    with pytest.raises(UserError, match=r"rollout.tensor = 3 .*Allowed: 1, 2, 4, 8, or 0"):
        generation_view(mesh, 3)
