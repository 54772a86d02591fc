"""Schedules of a pipeline: what runs when, and that it is the layers one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models import pipeline
from jaxrl_llm.models.arrangement import merge_trees, split_adapters
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.pipeline import Schedule
from jaxrl_llm.sharding import TRAINING, make_mesh
from tests.models.tiny import one_segment, tiny_model

SCHEDULES = [Schedule(4, 4), Schedule(4, 8), Schedule(4, 4, 2), Schedule(2, 6, 3), Schedule(2, 2, 6)]


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule(3, 6, 2), Schedule(6, 6, 4), Schedule(4, 12, 6)], ids=str)
def test_every_piece_runs_once_right_after_the_one_before(schedule):
    """Caught: groups counted without the pieces of a stage."""
    stages, repeats = schedule.stages, schedule.repeats
    when = {}
    busy_ticks = 0
    for stage in range(stages):
        for tick in range(schedule.ticks):
            micro_batch, turn, busy = (int(x) for x in schedule.at(jnp.int32(tick), jnp.int32(stage)))
            if busy:
                piece = turn * stages + stage
                assert (micro_batch, piece) not in when
                when[micro_batch, piece] = tick
                busy_ticks += 1
    assert len(when) == schedule.micro_batches * stages * repeats
    for (micro_batch, piece), tick in when.items():
        if piece:  # handed on by the stage before in the tick before
            assert when[micro_batch, piece - 1] == tick - 1
    assert schedule.bubble == pytest.approx(1 - busy_ticks / (stages * schedule.ticks))


def test_more_micro_batches_and_repeats_shrink_the_bubble():
    """The formulas of the papers: (S - 1) / (M + S - 1), and so with M r for M."""
    assert Schedule(4, 4).bubble == pytest.approx(3 / 7)
    assert Schedule(4, 16).bubble == pytest.approx(3 / 19)
    assert Schedule(4, 16, 4).bubble == pytest.approx(3 / 67)
    with pytest.raises(ValueError, match="micro_batches a multiple of stages"):
        Schedule(4, 6)
    with pytest.raises(ValueError, match="30 layers can't be cut into 4 stages of 2 equal pieces"):
        Schedule(4, 8, 2).layer_order(30)


def _mesh(stages: int, tensor: int = 1):
    return make_mesh(MeshConfig(data=1, fsdp=1, tensor=tensor, pipeline=stages), jax.devices()[: stages * tensor])


LAYERS, WIDTH, TOKENS = 24, 8, 4


def _stage(trained, frozen, scales, rows, x):
    """Layers that do not commute; their rows' numbers and their own scale matter."""

    def layer(x, data):
        weights, fixed, scale = data
        return x + scale * jnp.tanh(x @ weights["w"] + fixed["b"][None] + rows), None

    return jax.lax.scan(layer, x, (trained, frozen, scales))[0]


def _problem(schedule, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    trained = {"w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)).astype(dtype)}
    frozen = {"b": jax.random.normal(keys[1], (LAYERS, WIDTH)).astype(dtype)}
    scales = jnp.linspace(0.2, 0.6, LAYERS).astype(dtype)
    rows = jnp.arange(schedule.micro_batches, dtype=jnp.int32)[:, None, None].repeat(TOKENS, axis=1)
    x = jax.random.normal(keys[2], (schedule.micro_batches, TOKENS, WIDTH)).astype(dtype)
    target = jax.random.normal(keys[3], x.shape)
    return trained, frozen, scales, rows.astype(dtype), x, target


@pytest.fixture(autouse=True)
def _plain_weights(monkeypatch):
    """The toy's weights are no model's, and have no place of their own on the mesh."""
    monkeypatch.setattr(pipeline, "place_weights", lambda params: params)


@pytest.mark.parametrize(
    ("schedule", "dtype"), [*((one, jnp.float32) for one in SCHEDULES), (Schedule(2, 4, 2), jnp.bfloat16)], ids=str
)
def test_a_pipeline_is_its_layers_one_after_the_other(schedule, dtype):
    """Values and gradients. Caught: the output's gradient given to every piece of the last stage; an order that is
    not undone."""
    trained, frozen, scales, rows, x, target = _problem(schedule, dtype)
    mesh = _mesh(schedule.stages)

    def plain(trained, x):
        run = functools.partial(_stage, trained, frozen, scales)
        return jnp.sum(jax.vmap(run)(rows, x).astype(jnp.float32) * target)

    def piped(trained, x):
        blocks = pipeline.arrange(schedule, {"blocks": {"trained": trained, "frozen": frozen}})["blocks"]
        order = schedule.layer_order(LAYERS)
        return jax.value_and_grad(
            lambda trained, x: jnp.sum(
                pipeline.run(schedule, _stage, trained, blocks["frozen"], scales[order], rows, x).astype(jnp.float32)
                * target
            ),
            argnums=(0, 1),
        )(blocks["trained"], x)

    def restored(trained, x):
        value, (d_trained, d_x) = piped(trained, x)
        return value, (pipeline.restore(schedule, {"blocks": d_trained})["blocks"], d_x)

    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("pipeline"))
    with jax.set_mesh(mesh):
        value, gradients = jax.jit(restored)(jax.device_put(trained, split), x)
    expected, expected_gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(trained, x)
    # float32: sums in another order; bfloat16: 8 bits, rounded once more where a piece ends
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    assert float(value) == pytest.approx(float(expected), rel=tolerance)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) < tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("schedule", [Schedule(4, 4, 2), Schedule(2, 2, 6), Schedule(4, 4, 3)], ids=str)
def test_arranged_layers_lie_where_they_run_and_come_back(schedule):
    """Only each device's own share is moved: no gather of the stack. Caught: an exchange left out."""
    mesh = _mesh(schedule.stages)
    blocks = {"a": jnp.arange(LAYERS * 3.0).reshape(LAYERS, 3), "b": jnp.arange(LAYERS, dtype=jnp.bfloat16)}
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("pipeline"))
    with jax.set_mesh(mesh):
        arrange = jax.jit(functools.partial(pipeline.arrange, schedule)).lower(
            {"blocks": jax.device_put(blocks, split)}
        )
        text = arrange.compile().as_text()
        moved = jax.jit(functools.partial(pipeline.arrange, schedule))({"blocks": jax.device_put(blocks, split)})
        back = jax.jit(functools.partial(pipeline.restore, schedule))(moved)
    assert "collective-permute(" in text and "all-gather" not in text and "all-reduce" not in text
    jax.tree.map(np.testing.assert_array_equal, back["blocks"], blocks)
    assert moved["blocks"]["a"].sharding.is_equivalent_to(split, 2)
    for stage, shard in enumerate(moved["blocks"]["b"].addressable_shards):
        piece = LAYERS // schedule.stages // schedule.repeats
        firsts = [(turn * schedule.stages + stage) * piece for turn in range(schedule.repeats)]
        assert np.asarray(shard.data, np.int32).tolist() == [first + k for first in firsts for k in range(piece)]


def test_a_decoder_with_adapters_in_a_pipeline(monkeypatch):
    """Hidden states and the adapters' gradient, without a schedule given; the base has none. Caught: adapters on
    a base of zeros; rows cut in another order than they are put together."""
    monkeypatch.undo()
    decoder, params = tiny_model(num_layers=4, windows=(None, 5, None, 3))
    decoder = decoder.with_lora(Lora(2, 4.0, ("q", "down")))
    base, adapters = params, decoder.init(jax.random.key(3))
    adapters = jax.tree.map(lambda leaf: leaf + 0.1, split_adapters(adapters)[1])
    tokens = np.random.default_rng(0).integers(0, 61, (8, 12))
    inputs = one_segment(tokens)
    weight = jax.random.normal(jax.random.key(4), (8, 12, decoder.config.hidden_size))

    def loss(adapters, base):
        return jnp.sum(decoder.hidden(merge_trees(base, adapters), *inputs, unroll=False) * weight)

    expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(adapters, base)
    mesh = _mesh(2, tensor=2)
    axes = decoder.logical_axes()
    base_axes, adapter_axes = split_adapters(axes)
    placed = (
        jax.device_put(adapters, TRAINING.shardings(mesh, {"blocks": adapter_axes["blocks"]})),
        jax.device_put(base, TRAINING.shardings(mesh, base_axes)),
    )
    with jax.set_mesh(mesh):
        value, gradient = jax.jit(jax.value_and_grad(loss))(*placed)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)
