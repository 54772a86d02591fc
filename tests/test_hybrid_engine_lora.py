"""With LoRA a layout change moves the base once, and from then on the adapters alone."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.hybrid_engine import HybridEngine
from jaxrl_llm.models import lora
from jaxrl_llm.models.lora import LORA_TARGETS, Lora, merge_trees, split_adapters
from jaxrl_llm.observability.timing import CompileCounter
from jaxrl_llm.sharding import TRAINING
from tests.test_hybrid_engine import engine_and_params

ADAPTERS = Lora(4, 8.0, LORA_TARGETS)


def setup(shape, **options):
    """An engine of a decoder with adapters, the base and the adapters, both in the training layout."""
    plain, base = engine_and_params(shape, **options)
    shardings = TRAINING.shardings(plain.mesh, lora.logical_axes(plain.decoder, ADAPTERS))
    adapters = jax.device_put(lora.init(plain.decoder, ADAPTERS, jax.random.key(1)), shardings)
    decoder = plain.decoder.with_lora(ADAPTERS)
    return HybridEngine(decoder, plain.mesh, plain.config, plain.dtype), base, adapters


def base_of(generation):
    rest = {name: value for name, value in generation.items() if name != "layers"}
    return [*jax.tree.leaves(rest), *jax.tree.leaves([split_adapters(layer)[0] for layer in generation["layers"]])]


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2)], ids=str)
def test_only_the_adapters_move_again(shape):
    """The second change, of adapters that an update has replaced: the base's arrays are the same objects, the values
    are right, what was copied is as much as the adapters' shards, and nothing compiles. Caught: all moved again; the
    adapters of the first change returned again."""
    engine, base, adapters = setup(shape)
    first = engine.to_generation(merge_trees(base, adapters))
    whole = engine.last
    changed = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(adapters)
    params = merge_trees(base, changed)
    with CompileCounter() as compiles:
        second = engine.to_generation(params)
    assert compiles.count == 0
    assert all(a is b for a, b in zip(base_of(first), base_of(second), strict=True))
    expected = engine.decoder.generation_params(jax.device_put(jax.device_get(params)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(second), jax.device_get(expected))
    moved = [split_adapters(layer)[1] for layer in second["layers"]]
    shards = sum(shard.data.nbytes for leaf in jax.tree.leaves(moved) for shard in leaf.addressable_shards)
    assert 0 < engine.last.copied_bytes == shards < whole.copied_bytes
    assert engine.last.moved_bytes < whole.moved_bytes or shape == (1, 1, 1)


def test_moved_bytes_of_adapters_are_the_theoretical_minimum():
    """fsdp 4: a device holds a quarter of every array that carries `embed` and receives the rest of it. qkv_lora_b and
    down_lora_a carry none and stay."""
    engine, base, adapters = setup((1, 4, 1))
    engine.to_generation(merge_trees(base, adapters))
    generation = engine.to_generation(merge_trees(base, adapters))
    carriers = ("qkv_lora_a", "o_lora_b", "gate_up_lora_a", "down_lora_b")
    split = sum(
        leaf.nbytes
        for layer in generation["layers"]
        for part in split_adapters(layer)[1].values()
        for name, leaf in part.items()
        if name in carriers
    )
    assert engine.last.moved_bytes == split * 3 // 4 * 4


def test_another_base_is_moved_and_the_old_one_let_go():
    """Caught: the base known by equal shapes; an old base held beside the new one; the training base kept alive by the
    engine."""
    engine, base, adapters = setup((1, 1, 1), dtype=jnp.bfloat16)
    first = engine.to_generation(merge_trees(base, adapters))
    old = weakref.ref(base_of(first)[-1])
    source = weakref.ref(jax.tree.leaves(base)[0])
    other = jax.tree.map(lambda leaf: leaf + 1, base)
    del first, base
    gc.collect()
    assert source() is None
    second = engine.to_generation(merge_trees(other, adapters))
    gc.collect()
    assert old() is None
    expected = jax.jit(engine.decoder.generation_params)(
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), merge_trees(other, adapters))
    )
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(second), jax.device_get(expected))
    held = weakref.ref(base_of(second)[-1])
    del second
    gc.collect()
    assert held() is not None
    engine.forget_base()
    gc.collect()
    assert held() is None


def test_equal_layouts_share_the_base_and_adapters_must_be_there():
    """Caught: a model's adapters silently left out of its generation."""
    engine, base, adapters = setup((1, 1, 1))
    generation = engine.to_generation(merge_trees(base, adapters))
    assert generation["embed"]["weight"] is base["embed"]["weight"]
    with pytest.raises(ValueError, match="params have no adapters"):
        engine.to_generation(base)
    plain, _ = engine_and_params((1, 1, 1))
    with pytest.raises(ValueError, match="is None, but params have adapters"):
        plain.to_generation(merge_trees(base, adapters))
