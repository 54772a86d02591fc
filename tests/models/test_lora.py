"""LoRA adapters: what they compute in training and in generation, and what they leave alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from jaxrl_kernels.row_attention.api import NO_WINDOW, row_attention
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import blocks, lora
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import LORA_TARGETS, Lora, merge_trees, split_adapters
from jaxrl_llm.sharding import GENERATION, TRAINING
from tests.models.tiny import one_segment, tiny_config, tiny_model

ALL = Lora(3, 12.0, LORA_TARGETS)


def adapted_model(adapters: Lora = ALL, **changes):
    """The decoder with adapters, its base and adapters of which A and B are random."""
    decoder, base = tiny_model(**changes)
    fresh = lora.init(decoder, adapters, jax.random.key(1))
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return decoder.with_lora(adapters), base, jax.tree.unflatten(tree, noisy)


def tokens_of(*shape: int):
    return one_segment(np.random.default_rng(0).integers(0, 61, shape, dtype=np.int32))


def test_fresh_adapters_change_nothing_and_draw_nothing_from_the_base():
    """Hidden states are the base's bit for bit, for A is not zero but B is. Caught: B drawn as A is; adapters drawn
    between the weights of the base, which gives it other numbers."""
    decoder, base = tiny_model(num_layers=1, windows=(None,))
    adapters = lora.init(decoder, ALL, jax.random.key(1))
    tokens = tokens_of(2, 9)
    expected = jax.jit(decoder.hidden)(base, *tokens)
    hidden = jax.jit(decoder.with_lora(ALL).hidden)(merge_trees(base, adapters), *tokens)
    np.testing.assert_array_equal(hidden, expected)
    both = jax.jit(decoder.with_lora(ALL).init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, split_adapters(both)[0], base)


def test_a_is_normal_with_the_deviation_of_its_inputs():
    """The deviation of n draws lies within 5 / sqrt(2 n) of the right one in all but one of a million. Caught: the
    rank or the outputs in place of the inputs; o's inputs counted as one head's."""
    config = tiny_config(hidden_size=64, num_heads=8, num_kv_heads=2, head_size=32, intermediate_size=96)
    adapters = lora.init(Decoder(config), Lora(32, 1.0, LORA_TARGETS), jax.random.key(0))["blocks"]["run_0"]
    inputs = {"q": 64, "k": 64, "v": 64, "o": 256, "gate": 64, "up": 64, "down": 96}
    for part in adapters.values():
        for name, leaf in part.items():
            if name.endswith("_lora_a"):
                relative = float(leaf.std()) * inputs[name.removesuffix("_lora_a")] ** 0.5
                assert relative == pytest.approx(1.0, abs=5 / np.sqrt(2 * leaf.size)), name
            else:
                assert not leaf.any(), name


@functools.cache
def folded_gradient():
    """Loss and its gradient by the adapters through the folded weights: another program for the same function."""
    decoder, base, adapters = adapted_model(qkv_bias=True)
    plain = decoder.with_lora(None)

    def loss(adapters):
        folded = lora.fold(merge_trees(base, adapters), ALL)
        return jnp.sin(plain.hidden(folded, *tokens_of(2, 9), unroll=False)).sum()

    return jax.jit(jax.value_and_grad(loss))(adapters)


@pytest.mark.parametrize("remat, unroll", [("none", True), ("full", False), ("dots", False)])
def test_value_and_gradient_are_those_of_the_folded_model(remat, unroll):
    """Every target, biases, layers unrolled and in a loop. Caught: the scale left out or used twice; o's branch fed the
    queries.

    Both add the same products in another order: 1e-5 of the norm."""
    decoder, base, adapters = adapted_model(qkv_bias=True)

    def loss(adapters):
        hidden = decoder.hidden(merge_trees(base, adapters), *tokens_of(2, 9), remat=remat, unroll=unroll)
        return jnp.sin(hidden).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(adapters)
    wanted_value, wanted = folded_gradient()
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-5)
    norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(wanted))))

    def close(leaf, expected):
        assert float(jnp.abs(expected).max()) > 1e-4 * norm, "an adapter without a gradient would prove nothing"
        assert float(jnp.abs(leaf - expected).max()) < 1e-5 * norm

    jax.tree.map(close, gradient, wanted)


def equations(jaxpr):
    """All of a program's, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_no_product_has_the_size_of_a_weight(tied, unroll):
    """Forward and backward: neither A B nor the gradient of a base weight is ever made, the output matrix included.
    Caught: the branch computed as x (A B); unstacking with one custom gradient for all leaves; the output matrix's
    gradient added up in the loop over chunks."""
    decoder, base, adapters = adapted_model(tie_embeddings=tied)
    base, adapters = jax.eval_shape(lambda: (base, adapters))

    def loss(adapters, base):
        params = merge_trees(base, adapters)
        tokens, positions, segments = tokens_of(2, 9)
        hidden = decoder.hidden(params, tokens, positions, segments, unroll=unroll)
        return decoder.token_logprobs(params, hidden, tokens, positions > 2, 1.0, chunk_tokens=6).logprobs.sum()

    program = jax.make_jaxpr(jax.grad(loss))(adapters, base)
    products = [
        equation.outvars[0].aval.shape
        for equation in equations(program.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    config = decoder.config
    matrices = {leaf.size // config.num_layers for leaf in jax.tree.leaves(base["blocks"]) if leaf.ndim > 2}
    matrices |= {config.padded_vocab_size * config.hidden_size}
    assert len(products) > 50
    assert not [shape for shape in products if int(np.prod(shape)) in matrices]


def test_a_layer_that_keeps_its_products_keeps_no_wide_one_of_a_branch():
    """With remat 'dots' and adapters at gate and up, a layer keeps as many arrays [N, F] as without: the two of the
    base. Caught: the product with B kept as well."""
    decoder, base, adapters = adapted_model(Lora(3, 6.0, ("gate", "up")))
    tokens = tokens_of(2, 9)

    def kept(adapters):
        return jax.vjp(
            lambda adapters: decoder.hidden(merge_trees(base, adapters), *tokens, remat="dots", unroll=False), adapters
        )[1]

    config = decoder.config
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(kept, adapters))]
    assert shapes.count((config.num_layers, 18, config.intermediate_size)) == 2


@pytest.mark.parametrize(
    "targets, on_cpu",
    [
        (LORA_TARGETS, True),
        (LORA_TARGETS, False),
        (("q", "v"), True),
        (("k", "up"), False),
        (("o", "gate", "down"), True),
    ],
)
def test_generation_equals_training(monkeypatch, targets, on_cpu):
    """The fused branch against the training one, both forms of the MLP. Caught: k's part of the fused B read by v; the
    branch of a lone up added to gate; the scale left out; the branch of down fed gate alone.

    Within 1e-4, the project's bound for any decode against its forward."""
    monkeypatch.setattr(blocks, "compiles_for_cpu", lambda: on_cpu)
    decoder, base, adapters = adapted_model(Lora(3, 12.0, targets), qkv_bias=True)
    tokens, positions, segments = tokens_of(2, 11)

    def attend(layer, q, k, v):
        window = jnp.int32(decoder.config.windows[layer] or NO_WINDOW)
        return row_attention(q, k, v, positions, segments, None, window, scale=decoder.config.scale)

    @jax.jit
    def both(params):
        generated = decoder.generation_hidden(decoder.generation_params(params), tokens, positions, attend)
        return generated, decoder.hidden(params, tokens, positions, segments, unroll=False)

    np.testing.assert_allclose(*both(merge_trees(base, adapters)), atol=1e-4)


def test_a_sharded_model_equals_one_device():
    """Value and gradient of the adapters under the training layout, and hidden states under that of generation, on
    fsdp 2, tensor 2. Caught: the rank split over a mesh axis, which does not divide it. 1e-5 of the norm: sums over
    devices add in another order."""
    decoder, base, adapters = adapted_model(qkv_bias=True)
    tokens, positions, segments = tokens_of(4, 12)

    def loss(adapters, base, *rows):
        return jnp.sin(decoder.hidden(merge_trees(base, adapters), *rows, unroll=False)).sum()

    program = jax.value_and_grad(loss)
    expected = jax.jit(program)(adapters, base, tokens, positions, segments)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(1, 1, 2, 2), ("data", "pipeline", "fsdp", "tensor"))
    plain = decoder.with_lora(None)
    placed = jax.device_put(adapters, TRAINING.shardings(mesh, lora.logical_axes(plain, ALL)))
    placed_base = jax.device_put(base, TRAINING.shardings(mesh, plain.logical_axes()))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
    batch = jax.device_put((tokens, positions, segments), rows)
    with jax.set_mesh(mesh):
        actual = jax.jit(program)(placed, placed_base, *batch)
    norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(expected[1]))))
    assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    for leaf, wanted in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.abs(np.asarray(leaf) - np.asarray(wanted)).max() < 1e-5 * norm

    params = merge_trees(placed_base, placed)
    shardings = GENERATION.shardings(mesh, decoder.generation_axes())
    arranged = jax.jit(decoder.generation_params, out_shardings=shardings)(params)
    b = arranged["layers"][0]["attention"]["qkv_lora_b"]
    assert b.sharding.shard_shape(b.shape)[1] == b.shape[1] // 2

    def attend(layer, q, k, v):
        window = jnp.int32(decoder.config.windows[layer] or NO_WINDOW)
        return row_attention(q, k, v, positions, segments, None, window, scale=decoder.config.scale)

    hidden = jax.jit(lambda params: decoder.generation_hidden(params, tokens, positions, attend))(arranged)
    wanted = jax.jit(decoder.hidden)(merge_trees(base, adapters), tokens, positions, segments)
    np.testing.assert_allclose(np.asarray(hidden), np.asarray(wanted), atol=1e-4)


def test_each_logical_axis_lies_on_its_own_dimension():
    """Both arrangements, by sizes that differ from each other. Caught: the axes of gate_up_lora_b in the order of
    gate_up."""
    config = tiny_config(num_heads=10, num_kv_heads=5, head_size=14, num_layers=6, windows=(None,) * 6)
    sizes = {"layers": 6, "embed": 32, "mlp": 48, "heads": 10, "kv_heads": 5, "head": 14}
    decoder = Decoder(config).with_lora(Lora(7, 1.0, LORA_TARGETS))
    arranged = jax.eval_shape(decoder.generation_params, decoder.abstract_params())["layers"][0]
    adapters = lora.abstract_adapters(Decoder(config), decoder.lora)
    pairs = [
        (adapters, lora.logical_axes(Decoder(config), decoder.lora)),
        (split_adapters(arranged)[1], split_adapters(decoder.generation_axes()["layers"][0])[1]),
    ]
    counts = []
    for tree, axes_tree in pairs:
        axes = jax.tree.leaves(axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))
        counts.append(len(axes))
        for leaf, names in zip(jax.tree.leaves(tree), axes, strict=True):
            assert len(names) == leaf.ndim
            for name, size in zip(names, leaf.shape, strict=True):
                assert size == sizes[name] if name else size not in sizes.values(), names
    assert counts == [14, 8]


def test_trees_come_apart_and_together_without_copies():
    decoder, base, adapters = adapted_model()
    merged = merge_trees(base, adapters)
    again = split_adapters(merged)
    for tree, wanted in zip(again, (base, adapters), strict=True):
        assert jax.tree.structure(tree) == jax.tree.structure(wanted)
        assert all(a is b for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True))
    assert jax.tree.structure(merged) == jax.tree.structure(decoder.abstract_params())
    with pytest.raises(ValueError, match="both trees have a leaf"):
        merge_trees(merged, adapters)


@pytest.mark.parametrize(
    "values, words",
    [
        ((0, 1.0, ("q",)), "rank of the LoRA adapters is 0"),
        ((1, 0.0, ("q",)), "alpha of the LoRA adapters is 0"),
        ((1, 1.0, ()), "are none; give"),
        ((1, 1.0, ("q", "query")), "'q', 'query'"),
        ((1, 1.0, ("q", "q")), "each once"),
    ],
)
def test_impossible_adapters_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        Lora(*values)


def test_equal_targets_make_equal_decoders():
    """Which are then one static argument of a jit. Caught: targets kept in the order given."""
    assert hash(Lora(2, 1.0, ("v", "q"))) == hash(Lora(2, 1.0, ("q", "v")))
    assert Lora(2, 1.0, ("v", "q")) == Lora(2, 1.0, ("q", "v"))
