"""What a row of packed sequences means, and that every way through the decoder gives the same numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_kernels.row_attention.api import NO_WINDOW, row_attention
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.models import blocks
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.packing import RowShape, pack
from jaxrl_llm.sharding import GENERATION, TRAINING
from tests.cases import case
from tests.models.tiny import one_segment, tiny_config, tiny_model

VARIANTS = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "biases": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True, "head_size": 12},
}


def _tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, shape, dtype=np.int32)


def _randomized(params, seed: int = 1):
    """Every parameter random, so that no bias or norm is a neutral 0 or 1."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def test_a_packed_row_equals_separate_rows():
    """Hidden states and gradient of three sequences in one row (padding behind) against one row each, with a window
    in one layer. Seen to catch: segments ignored; positions that run on over the row; padding that attends to or is
    seen by a sequence."""
    decoder, params = tiny_model()
    count, length, total = 3, 9, 32
    sequences = _tokens(count, length)
    tokens, positions, segments = (np.zeros((1, total), np.int32) for _ in range(3))
    real = count * length
    tokens[0, :real] = sequences.reshape(-1)
    positions[0, :real] = np.tile(np.arange(length), count)
    segments[0, :real] = np.repeat(np.arange(1, count + 1), length)

    @jax.jit
    def run(params, *rows):
        def loss(params):
            hidden = decoder.hidden(params, *rows)
            return jnp.where((rows[2] > 0)[:, :, None], jnp.sin(hidden), 0.0).sum(), hidden

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, hidden), gradient = run(params, *map(jnp.asarray, (tokens, positions, segments)))
    (_, expected_hidden), expected = run(params, *one_segment(sequences))
    np.testing.assert_allclose(hidden[0, :real].reshape(count, length, -1), expected_hidden, atol=2e-5)
    norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(expected))))
    for leaf, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(leaf - wanted).max()) < 1e-5 * norm


def test_a_window_shorter_than_a_shared_prompt():
    """Hidden states of [prompt | c1 | c2 | c3], as rows are packed, against a row per sequence; both layers have a
    window that ends inside the prompt for the first tokens of a completion and within the completion for the last.

    Seen to catch: windows counted in columns, which put c1 between the prompt and c2; the prefix not seen; a prefix
    seen beyond the window."""
    decoder, params = tiny_model(windows=(4, 6))
    prompt, lengths = _tokens(10), (3, 8, 5)
    whole = [np.concatenate([prompt, _tokens(length, seed=length)]) for length in lengths]
    masks = [np.arange(len(tokens)) >= len(prompt) for tokens in whole]
    sequences = Sequences(whole, masks, np.zeros(len(whole), np.int32))
    batch, placement = pack(
        sequences, RowShape(30, 1), aggregation="token-mean", max_response_tokens=8, max_micro_batches=1
    )
    rows = batch.rows
    assert len({int(segment) for segment in rows.segment_ids.ravel()} - {0}) == 4, "the prompt is not shared"
    row = (jnp.asarray(getattr(rows, name)[0]) for name in ("tokens", "positions", "segment_ids", "prefix_ids"))
    hidden = np.asarray(jax.jit(decoder.hidden)(params, *row))[0]
    for n, tokens in enumerate(whole):
        expected = np.asarray(jax.jit(decoder.hidden)(params, *one_segment(tokens[None])))[0]
        shared = np.concatenate([hidden[placement.prompt[n]], hidden[placement.completion[n]]])
        np.testing.assert_allclose(shared, expected, atol=2e-5)


@pytest.mark.parametrize("before", [0, 7], ids=["padding_right", "padding_left"])
def test_padding_to_a_longer_width_changes_nothing_case_t25(before):
    """Log-probabilities and gradient of a batch in rows of width W and of W + 7. Seen to catch: padding seen by the
    tokens of its row, as a prefix numbered 0."""
    decoder, params = tiny_model()
    params = _randomized(params)
    lengths, width = (9, 6, 4), 9

    def batch(width, before):
        tokens, positions, segments, mask = (np.zeros((len(lengths), width), np.int32) for _ in range(4))
        for row, length in enumerate(lengths):
            columns = slice(before, before + length)
            tokens[row, columns] = _tokens(length, seed=length)
            positions[row, columns] = np.arange(length)
            segments[row, columns] = 1
            mask[row, before + 2 : before + length] = 1
        return tuple(map(jnp.asarray, (tokens, positions, segments, mask == 1)))

    @jax.jit
    def run(params, tokens, positions, segments, mask):
        def loss(params):
            hidden = decoder.hidden(params, tokens, positions, segments)
            logprobs = decoder.token_logprobs(params, hidden, tokens, mask, 1.0).logprobs
            return logprobs.sum() / mask.sum(), (hidden, logprobs)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (expected_loss, (expected_hidden, expected_logprobs)), expected = run(params, *batch(width, 0))
    (loss, (hidden, logprobs)), gradient = run(params, *batch(width + 7, before))
    assert abs(float(loss) - float(expected_loss)) < 1e-6
    for row, length in enumerate(lengths):
        columns = slice(before, before + length)
        np.testing.assert_allclose(hidden[row, columns], expected_hidden[row, :length], atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(logprobs[row, columns], expected_logprobs[row, :length], atol=1e-6, rtol=1e-6)
    for leaf, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-5)


def test_window_counts_the_token_itself_case_k09():
    """Seen to catch: one token more in the window (distance <= window)."""
    given, expected = case("K09")["input"], case("K09")["expected"]
    length = given["length"]
    keys, values = (jnp.asarray(given[name], jnp.float32)[None, :, None, :] for name in ("keys", "values"))
    queries = jnp.broadcast_to(jnp.asarray(given["query_at_every_position"])[None, None, None, :], (1, length, 1, 2))
    positions, segments = jnp.arange(length)[None], jnp.ones((1, length), jnp.int32)
    attended = row_attention(queries, keys, values, positions, segments, None, given["window"], scale=1 / np.sqrt(2))
    np.testing.assert_allclose(np.asarray(attended)[0, :, 0], expected["output_all"], atol=1e-6)


def test_query_scale_case_k23():
    """Seen to catch: 1/sqrt(head size) used although the config gives another."""
    for given, scale in zip(case("K23")["input"]["cases"], case("K23")["expected"]["scale"], strict=True):
        config = tiny_config(head_size=given["head_dim"], attention_scale=given["query_pre_attn_scalar"] ** -0.5)
        assert config.scale == pytest.approx(scale, rel=1e-6)
    head_sizes = zip(case("K17")["input"]["head_dim"], case("K17")["expected"]["scale"], strict=True)
    for head_size, scale in head_sizes:
        assert tiny_config(head_size=head_size).scale == pytest.approx(scale, rel=1e-6)
    tokens = one_segment(_tokens(1, 9))
    _, params = tiny_model()
    reference, plain, scaled = (
        jax.jit(Decoder(tiny_config(attention_scale=scale)).hidden)(params, *tokens) for scale in (None, 8**-0.5, 0.9)
    )
    np.testing.assert_allclose(plain, reference, atol=1e-6)
    assert float(jnp.abs(scaled - reference).max()) > 1e-2


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_generation_equals_training(monkeypatch, name, on_cpu):
    """The fused, unstacked arrangement against the stacked one, both forms of the MLP. Seen to catch: gate and up
    exchanged; the bias of q, k, v left out of the fused product; queries grouped by the wrong head."""
    monkeypatch.setattr(blocks, "compiles_for_cpu", lambda: on_cpu)
    decoder, params = tiny_model(**VARIANTS[name])
    params = _randomized(params)
    tokens, positions, segments = one_segment(_tokens(2, 11))

    def attend(layer, q, k, v):
        assert q.shape == (2, 11, decoder.config.num_heads, decoder.config.head_size)
        window = jnp.int32(decoder.config.windows[layer] or NO_WINDOW)
        return row_attention(q, k, v, positions, segments, None, window, scale=decoder.config.scale)

    @jax.jit
    def both(params):
        arranged = decoder.generation_params(params)
        generated = decoder.generation_hidden(arranged, tokens, positions, attend)
        return generated, decoder.hidden(params, tokens, positions, segments)

    np.testing.assert_allclose(*both(params), atol=2e-5)


def test_layers_in_a_loop_and_unrolled_are_the_same():
    """Value and gradient, with another window in each layer. Both gradients add the same products in the same order
    but for XLA's fusions: 1e-5 of the norm."""
    decoder, params = tiny_model(windows=(3, None))
    tokens = one_segment(_tokens(2, 11))

    def run(unroll):
        def loss(params):
            return jnp.sin(decoder.hidden(params, *tokens, unroll=unroll)).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    (value, gradient), (wanted_value, wanted) = run(True), run(False)
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-5)
    norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(wanted))))
    for leaf, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert float(jnp.abs(leaf - expected).max()) < 1e-5 * norm


def test_scores_of_a_long_row_never_exist_whole():
    """No array of the gradient's program has two dimensions of the row's length. Seen to catch: one block as long
    as the row."""
    decoder = Decoder(tiny_config(num_layers=1, windows=(None,)))
    length = 1536
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    program = jax.jit(jax.grad(lambda params, *row: decoder.hidden(params, *row).sum()))
    text = program.lower(decoder.abstract_params(), row, row, row).compile().as_text()
    assert str(length) in text
    assert not re.search(rf"\[[\d,]*{length},[\d,]*{length}[\d,]*\]", text)


def test_remat_changes_nothing():
    decoder, params = tiny_model()
    tokens = one_segment(_tokens(2, 9))

    def gradient(remat):
        return jax.jit(jax.grad(lambda params: jnp.sin(decoder.hidden(params, *tokens, remat=remat)).sum()))(params)

    expected = gradient("none")
    for remat in ("full", "dots"):
        for leaf, wanted in zip(*map(jax.tree.leaves, (gradient(remat), expected)), strict=True):
            np.testing.assert_allclose(leaf, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="remat is 'some'"):
        decoder.hidden(params, *tokens, remat="some")


def test_padding_rows_of_the_vocabulary_case_s15():
    """Logits, log-probabilities and entropy leave them out. Seen to catch: the mask of padded rows removed from
    either of the two projections."""
    given, expected = case("S15")["input"], case("S15")["expected"]
    real, padded = len(given["real_logits"]), len(given["real_logits"]) + given["pad_rows"]
    decoder = Decoder(tiny_config(vocab_size=real, padded_vocab_size=padded, hidden_size=1))
    weight = jnp.asarray([*given["real_logits"], *[given["pad_logit"]] * given["pad_rows"]], jnp.float32)[:, None]
    params = {"lm_head": {"weight": weight}}
    hidden = jnp.ones((1, 2, 1), jnp.float32)
    probabilities = jax.nn.softmax(decoder.logits(params, hidden[0, 0]))
    assert float(probabilities[real:].sum()) == expected["pad_probability"]
    mask = jnp.asarray([[False, True]])
    outputs = decoder.token_logprobs(params, hidden, jnp.zeros((1, 2), jnp.int32), mask, 1.0)
    assert float(outputs.logprobs[0, 1]) == pytest.approx(expected["logprob_token0"], abs=1e-6)
    entropy = -float((probabilities[:real] * jnp.log(probabilities[:real])).sum())
    assert float(outputs.entropy[0, 1]) == pytest.approx(entropy, abs=1e-6)


def _decoder_of_logits(logits):
    """A decoder, parameters and hidden states whose logits are the given ones: the weight is the identity."""
    count = len(logits[0])
    decoder = Decoder(tiny_config(vocab_size=count, padded_vocab_size=count, hidden_size=count))
    return decoder, {"lm_head": {"weight": jnp.eye(count)}}, jnp.asarray(logits, jnp.float32)[None]


def test_which_logits_predict_which_token_case_t11():
    """Seen to catch: a token's log-probability read from its own place; the first response token left out."""
    given, expected = case("T11")["input"], case("T11")["expected"]
    decoder, params, hidden = _decoder_of_logits(given["logits"])
    tokens = jnp.asarray([given["ids"]], jnp.int32)
    mask = jnp.arange(tokens.shape[1])[None] >= given["prompt_len"]
    logprobs = np.asarray(decoder.token_logprobs(params, hidden, tokens, mask, 1.0).logprobs)[0]
    np.testing.assert_allclose(logprobs[given["prompt_len"] :], expected["response_logprobs"], atol=1e-6)
    assert (logprobs[1:] != 0).tolist() == [bool(entry) for entry in expected["sft_target_mask_after_shift"]]


def test_logit_rows_of_a_response_case_l31():
    """The actor's half of the case, by the places that have a gradient. Seen to catch: states taken one later."""
    given, expected = case("L31")["input"], case("L31")["expected"]
    length = given["prompt_len"] + given["response_len"]
    decoder, params, hidden = _decoder_of_logits(np.random.default_rng(0).normal(size=(length, 3)))
    tokens, mask = jnp.zeros((1, length), jnp.int32), jnp.arange(length)[None] >= given["prompt_len"]
    gradient = jax.grad(lambda hidden: decoder.token_logprobs(params, hidden, tokens, mask, 1.0).logprobs.sum())(hidden)
    used = np.flatnonzero(np.abs(np.asarray(gradient)[0]).max(axis=-1))
    assert used.tolist() == expected["logit_rows_used"]


def test_logprobs_are_of_the_rows_own_tokens():
    """Alignment and temperature against a plain log-softmax. Seen to catch: states shifted the other way; the
    temperature multiplied instead of divided."""
    decoder, params = tiny_model()
    tokens, positions, segments = one_segment(_tokens(2, 10))
    hidden = jax.jit(decoder.hidden)(params, tokens, positions, segments)
    mask = (positions >= 4) & (positions < 9)
    outputs = decoder.token_logprobs(params, hidden, tokens, mask, 0.7, chunk_tokens=4)
    table = jax.nn.log_softmax(decoder.logits(params, hidden) / 0.7, axis=-1)
    expected = np.zeros((2, 10), np.float32)
    for row in range(2):
        for place in range(4, 9):
            expected[row, place] = table[row, place - 1, tokens[row, place]]
    np.testing.assert_allclose(outputs.logprobs, expected, atol=2e-5)
    assert outputs.entropy.shape == mask.shape


def test_dtype_of_the_parameters_is_the_dtype_of_compute():
    decoder, params = tiny_model()
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tokens, positions, segments = one_segment(_tokens(1, 6))
    hidden = jax.jit(decoder.hidden)(params, tokens, positions, segments)
    assert hidden.dtype == jnp.bfloat16
    outputs = decoder.token_logprobs(params, hidden, tokens, positions > 2, 1.0)
    assert outputs.logprobs.dtype == outputs.entropy.dtype == decoder.logits(params, hidden).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(2, 1, 2, 2), (1, 1, 4, 2)])
def test_a_sharded_model_equals_one_device(shape):
    """Value and gradient under the training layout, rows over data and fsdp; hidden states under the generation
    layout."""
    decoder, params = tiny_model(qkv_bias=True)
    params = _randomized(params)
    tokens, positions, segments = one_segment(_tokens(8, 12))
    mask = positions > 3

    def loss(params, tokens, positions, segments, mask):
        hidden = decoder.hidden(params, tokens, positions, segments)
        return decoder.token_logprobs(params, hidden, tokens, mask, 1.0, chunk_tokens=32).logprobs.sum()

    expected = jax.jit(jax.value_and_grad(loss))(params, tokens, positions, segments, mask)
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(shape), ("data", "pipeline", "fsdp", "tensor"))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
    placed = jax.device_put(params, TRAINING.shardings(mesh, decoder.logical_axes()))
    batch = jax.device_put((tokens, positions, segments, mask), rows)
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(loss))(placed, *batch)
    norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(expected[1]))))
    assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    for leaf, wanted in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.abs(np.asarray(leaf) - np.asarray(wanted)).max() < 1e-5 * norm

    arranged = jax.jit(decoder.generation_params, out_shardings=GENERATION.shardings(mesh, decoder.generation_axes()))(
        placed
    )

    def attend(layer, q, k, v):
        window = jnp.int32(decoder.config.windows[layer] or NO_WINDOW)
        return row_attention(q, k, v, positions, segments, None, window, scale=decoder.config.scale)

    hidden = jax.jit(lambda params: decoder.generation_hidden(params, tokens, positions, attend))(arranged)
    wanted = jax.jit(decoder.hidden)(params, tokens, positions, segments)
    np.testing.assert_allclose(np.asarray(hidden), np.asarray(wanted), atol=5e-5)


def test_each_logical_axis_lies_on_its_own_dimension():
    """Both arrangements, by sizes that differ from each other. Seen to catch: the axes of gate_up exchanged, which a
    mesh that divides both dimensions would accept."""
    decoder = Decoder(
        tiny_config(
            vocab_size=61,
            padded_vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_heads=10,
            num_kv_heads=5,
            head_size=14,
            num_layers=3,
            windows=(None,) * 3,
            qkv_bias=True,
            qk_norm=True,
        )
    )
    sizes = {"layers": 3, "vocab": 61, "embed": 32, "mlp": 48, "heads": 10, "kv_heads": 5, "head": 14}
    params = decoder.abstract_params()
    arranged = jax.eval_shape(decoder.generation_params, params)
    for tree, axes_tree in ((params, decoder.logical_axes()), (arranged, decoder.generation_axes())):
        axes = jax.tree.leaves(axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))
        for leaf, names in zip(jax.tree.leaves(tree), axes, strict=True):
            assert all(sizes[name] == size for name, size in zip(names, leaf.shape, strict=True) if name), names


def test_abstract_params_and_axes_have_the_structure_of_the_parameters():
    for changes in VARIANTS.values():
        decoder, params = tiny_model(**changes)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
        assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), decoder.abstract_params())

        def is_axes(leaf):
            return isinstance(leaf, tuple)

        assert jax.tree.structure(decoder.logical_axes(), is_leaf=is_axes) == jax.tree.structure(params)
        arranged = jax.eval_shape(decoder.generation_params, params)
        assert jax.tree.structure(decoder.generation_axes(), is_leaf=is_axes) == jax.tree.structure(arranged)
        layer = decoder.generation_layer(params["blocks"]["run_0"], 1)
        assert jax.tree.structure(layer) == jax.tree.structure(arranged["layers"][1])
    assert hash(decoder) == hash(Decoder(tiny_config(**changes)))
