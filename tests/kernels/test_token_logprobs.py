"""The chunked projection against the dense reference, its skipping, its sharding and what it never holds."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels.token_logprobs import xla
from jaxrl_kernels.token_logprobs.api import token_logprobs
from jaxrl_kernels.token_logprobs.cases import CASES, VOCAB_CHUNKS, Case
from jaxrl_kernels.vocabulary_slices import Slices


def _inputs(case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    shape = (case.num_rows, case.num_tokens)
    hidden = jnp.asarray(rng.standard_normal((*shape, case.width)), case.dtype)
    weight = jnp.asarray(rng.standard_normal((case.weight_rows, case.width)) * 0.3, case.dtype)
    tokens = jnp.asarray(rng.integers(0, case.vocab_size, shape), jnp.int32)
    mask = jnp.asarray(rng.random(shape) < case.counted)
    return hidden, weight, tokens, mask


def _value_and_gradient(case: Case, inputs, implementation: str, temperature: float = 0.7, texts=None, **options):
    hidden, weight, tokens, mask = inputs
    wave = jnp.cos(jnp.arange(tokens.size, dtype=jnp.float32)).reshape(tokens.shape)

    @jax.jit
    def run(hidden, weight):
        def loss(hidden, weight):
            logprobs, entropy = token_logprobs(
                hidden, weight, tokens, mask, temperature, vocab_size=case.vocab_size,
                chunk_tokens=case.chunk_tokens, implementation=implementation, **options,
            )  # fmt: skip
            return (logprobs * wave).sum() + 0.3 * (entropy * wave[::-1]).sum(), (logprobs, entropy)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, weight)

    compiled = run.lower(hidden, weight).compile()
    if texts is not None:
        texts.append(compiled.as_text())
    (_, outputs), gradients = compiled(hidden, weight)
    return outputs, gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_dense_reference(case):
    """Value and gradient. Seen to catch: hidden[t] used for token t; the entropy's term left out of the gradient;
    the division by the temperature left out of the gradient; padded rows of the vocabulary not masked.

    The same for slices of the vocabulary. Caught: sums not multiplied for a larger logit; entries that two slices share
    counted twice, in the sums and in the gradient; the gradient of the states of the last slice alone.
    """
    inputs = _inputs(case)
    expected = jax.tree.leaves(_value_and_gradient(case, inputs, "reference"))
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-6
    for vocab_chunk in VOCAB_CHUNKS:
        values = jax.tree.leaves(_value_and_gradient(case, inputs, "xla", vocab_chunk=vocab_chunk))
        for value, wanted in zip(values, expected, strict=True):
            assert value.dtype == wanted.dtype
            value, wanted = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
            assert np.abs(value - wanted).max() <= tolerance * max(np.abs(wanted).max(), 1.0), vocab_chunk


def test_slices_are_even_and_of_whole_tiles_where_they_can_be():
    """Caught: a width above what is asked for; slices as wide as asked for, of which the last repeats most of another;
    no whole tiles."""

    def cut(num_entries, most):
        slices = Slices.of(num_entries, num_entries, most, None)
        return slices.width, slices.count

    assert cut(128256, 16384) == (16128, 8)  # 16,032 rounded up to tiles
    assert cut(640, 256) == (256, 3)
    assert cut(640, 220) == (214, 3)  # 256 would be more than was asked for
    assert cut(41, 20) == (14, 3)
    assert cut(100, 128) == (100, 1)


def test_gradient_of_the_weight_adds_up_in_float32():
    """Many chunks of a bfloat16 weight. Seen to catch: the sum over chunks carried in the weight's dtype."""
    case = Case("many_chunks", 1, 513, 8, 16, 16, 1, 1.0, "bfloat16")
    inputs = _inputs(case)
    _, (_, gradient) = _value_and_gradient(case, inputs, "xla")
    once = Case(**{**vars(case), "chunk_tokens": 513})
    _, (_, expected) = _value_and_gradient(once, inputs, "xla")
    gradient, expected = np.asarray(gradient, np.float64), np.asarray(expected, np.float64)
    assert np.abs(gradient - expected).max() <= 2 * 2**-8 * np.abs(expected).max()


def test_values_at_masked_places_are_never_used():
    """NaN there must reach neither a value nor a gradient. Seen to catch: the selection of hidden states removed."""
    case = CASES[1]
    hidden, weight, tokens, mask = _inputs(case)
    used = jnp.roll(mask, -1, axis=1).at[:, -1].set(False)  # the state before each counted token
    poisoned = jnp.where(used[:, :, None], hidden, jnp.nan)
    clean = _value_and_gradient(case, (hidden, weight, tokens, mask), "xla")
    dirty = _value_and_gradient(case, (poisoned, weight, tokens, mask), "xla")
    for value, expected in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected))


def test_per_token_temperature():
    case = CASES[1]
    hidden, weight, tokens, mask = _inputs(case)
    temperature = jnp.linspace(0.5, 1.5, tokens.size, dtype=jnp.float32).reshape(tokens.shape)
    both = [
        token_logprobs(hidden, weight, tokens, mask, temperature, chunk_tokens=8, implementation=name)
        for name in ("xla", "reference")
    ]
    np.testing.assert_allclose(np.asarray(both[0]), np.asarray(both[1]), atol=3e-6)


@pytest.mark.parametrize(("counted_per_row", "expected"), [((0, 0), 0), ((3, 1), 1), ((5, 2), 2), ((15, 0), 4)])
def test_chunks_without_a_counted_token_are_skipped(monkeypatch, counted_per_row, expected):
    """Four places per row and chunk: a row's counted tokens, wherever they stand, fill ceil(n / 4) chunks. Seen to
    catch: the condition always true. (Sorting by the mask left out is caught by the comparison above.)"""
    runs = []
    project = xla._logits

    def counting(*arguments):
        jax.debug.callback(lambda: runs.append(1))
        return project(*arguments)

    monkeypatch.setattr(xla, "_logits", counting)
    case = Case("skipping", 2, 16, 8, 12, 12, 8, 0.0)
    hidden, weight, tokens, _ = _inputs(case)
    mask = np.zeros((2, 16), bool)
    for row, count in enumerate(counted_per_row):
        mask[row, 16 - count :] = True  # at the end of the row: only compaction brings them into the first chunks
    jax.block_until_ready(token_logprobs(hidden, weight, tokens, jnp.asarray(mask), 1.0, chunk_tokens=8))
    jax.effects_barrier()
    assert len(runs) == expected


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_sharded_equals_unsharded(shape):
    """Rows over data and fsdp, the vocabulary over tensor, width over fsdp. Seen to catch: a per-device count of
    used chunks (max over the rows of one device only) by an error from the partitioner or other values."""
    case = Case("sharded", 8, 16, 16, 64, 61, 32, 0.5)
    hidden, weight, tokens, mask = _inputs(case)
    expected = _value_and_gradient(case, (hidden, weight, tokens, mask), "xla")
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(shape), ("data", "fsdp", "tensor"))

    def place(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    rows = ("data", "fsdp")
    inputs = place(hidden, rows), place(weight, "tensor", "fsdp"), place(tokens, rows), place(mask, rows)
    actual = _value_and_gradient(case, inputs, "xla")
    for value, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted), atol=5e-6)


@pytest.mark.parametrize("tensor", [2, 8])
def test_slices_of_a_split_vocabulary(tensor):
    """Each device walks over its own part, of which the last slice repeats some (of eight parts one is padding alone),
    and only gradients of the weight are added up over the devices of the rows within the walk. Caught: a token's entry
    counted from the start of its part; sums of parts added up as if relative to one logit; slices of the whole
    vocabulary in place of each part, whose largest logit devices then tell one another; gradients of states added up
    over parts in each slice.
    """
    case = Case("sharded", 8, 16, 16, 64, 55, 32, 0.5)
    inputs = _inputs(case)
    expected = _value_and_gradient(case, inputs, "reference")
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(8 // tensor, tensor), ("rows", "vocabulary"))
    specs = (PartitionSpec("rows"), PartitionSpec("vocabulary"), PartitionSpec("rows"), PartitionSpec("rows"))
    placed = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(inputs, specs, strict=True)]
    texts = []
    with jax.set_mesh(mesh):
        options = {"vocab_chunk": {2: 7, 8: 3}[tensor], "mesh_axes": ("rows", "vocabulary")}
        actual = _value_and_gradient(case, placed, "xla", texts=texts, **options)
    for value, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted), atol=5e-6)  # sums in another order
    # A loop within a loop; what jax writes between the two differs from release to release.
    walks = re.findall(r'= (\S+) all-reduce\(.*op_name="[^"]*/while/body/\w+/while/body/', texts[0])
    assert [shape.split("{")[0] for shape in walks] == {2: ["f32[1,7,16]"], 8: []}[tensor]


@pytest.mark.parametrize("vocab_chunk", [0, 100])
def test_logits_of_all_tokens_never_exist(vocab_chunk):
    """No array of the compiled step has R * T * V entries or more than a chunk's, nor, with slices, a chunk's. Seen to
    catch: one chunk of all. Caught: one slice of all entries."""
    case = Case("memory", 4, 64, 8, 512, 512, 16, 1.0)
    hidden, weight, tokens, mask = _inputs(case)

    def loss(hidden, weight):
        options = {"chunk_tokens": case.chunk_tokens, "vocab_chunk": vocab_chunk}
        logprobs, entropy = token_logprobs(hidden, weight, tokens, mask, 1.0, **options)
        return logprobs.sum() + entropy.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, weight).compile()
    logits_bytes = case.chunk_tokens * case.weight_rows * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits_bytes * (1.5 if vocab_chunk else 16)
    shapes = re.findall(r"[a-z]\w*\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    chunk = case.chunk_tokens * case.weight_rows
    assert largest < chunk if vocab_chunk else largest == chunk


def test_a_constant_weight_has_no_gradient_and_costs_none():
    """The gradient of the states is the same. Caught: the option not looked at; the accumulator, in float32 beside a
    bfloat16 weight, still carried over the chunks."""
    hidden, weight, tokens, mask = _inputs(Case("constant", 2, 8, 8, 24, 24, 4, 1.0, "bfloat16"))

    def gradients(weight_gradient, implementation="xla"):
        def loss(hidden, weight):
            options = {"implementation": implementation, "weight_gradient": weight_gradient}
            logprobs, entropy = token_logprobs(hidden, weight, tokens, mask, 1.0, chunk_tokens=4, **options)
            return logprobs.sum() + entropy.sum()

        function = jax.grad(loss, argnums=(0, 1))
        return function(hidden, weight), "f32[24,8]" in str(jax.make_jaxpr(function)(hidden, weight))

    (d_hidden, d_weight), accumulates = gradients(True)
    (d_hidden_alone, constant), accumulates_alone = gradients(False)
    assert np.any(np.float32(d_weight)) and accumulates
    assert not np.any(np.float32(constant)) and not accumulates_alone
    np.testing.assert_array_equal(np.float32(d_hidden), np.float32(d_hidden_alone))
    (_, constant), _ = gradients(False, "reference")
    assert not np.any(np.float32(constant))


def test_wrong_inputs_are_named():
    hidden, weight, tokens, mask = _inputs(CASES[0])
    with pytest.raises(ValueError, match=r"mask must be bool"):
        token_logprobs(hidden, weight, tokens, mask.astype(jnp.int32), 1.0)
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 40\]"):
        token_logprobs(hidden, weight, tokens, mask, 1.0, vocab_size=41)
    with pytest.raises(ValueError, match=r"vocab_chunk must be 0.*; got -1"):
        token_logprobs(hidden, weight, tokens, mask, 1.0, vocab_chunk=-1)
    with pytest.raises(ValueError, match="implementation is 'pallas'"):
        token_logprobs(hidden, weight, tokens, mask, 1.0, implementation="pallas")
    with pytest.raises(ValueError, match=r"weight \[V, D\]"):
        token_logprobs(hidden, weight.T, tokens, mask, 1.0)
