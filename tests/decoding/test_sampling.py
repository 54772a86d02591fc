"""The sampler: what it implies exactly, its filters, its determinism."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.decoding import sampling
from jaxrl_llm.decoding.sampling import SamplingRows, sample_tokens
from tests.cases import case

SAMPLE = jax.jit(sample_tokens, static_argnames="num_tokens")


def rows(count, *, seeds=None, stop_ids=(), **options):
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "generated": 0, "min_tokens": 0}
    integer = ("top_k", "generated", "min_tokens")
    fields = {
        name: jnp.broadcast_to(
            jnp.asarray(options.get(name, value), jnp.int32 if name in integer else jnp.float32), (count,)
        )
        for name, value in defaults.items()
    }
    seeds = np.arange(2 * count, dtype=np.uint32).reshape(count, 2) if seeds is None else seeds
    stops = np.full((count, 4), -1, np.int32)
    stops[:, : len(stop_ids)] = stop_ids
    return SamplingRows(seeds=jnp.asarray(seeds), stop_ids=jnp.asarray(stops), **fields)


def draw(logits, num_tokens=None, **options):
    logits = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    tokens, logprobs = SAMPLE(logits, rows(len(logits), **options), num_tokens=num_tokens or logits.shape[1])
    return np.asarray(tokens), np.asarray(logprobs)


def draw_many(logits, count=2000, **options):
    """Tokens of many keys for the same logits."""
    return draw(np.tile(np.asarray(logits, np.float32), (count, 1)), **options)[0]


def peaked(count, vocab, seed=0):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2.5, (count, vocab)).astype(np.float32)
    logits[:, random.integers(0, vocab, 20)] += 12
    return logits


def test_implied_distribution_is_exact():
    """The integer weights themselves, over every id: samples could not show a wrong tail at any test's size.

    Seen to catch: the rounding rest given to no one; weights of 23 bits; logits rounded to bfloat16.
    """
    vocab = 12_800
    logits = peaked(1, vocab)
    exact = np.exp(logits[0].astype(np.float64) - logits.max())
    exact /= exact.sum()
    _, weights = sampling._weights(jnp.asarray(logits).T, jnp.ones(1))
    chunks = weights.reshape(-1, sampling.CHUNK)
    outer = sampling.integer_weights(chunks.sum(-1)[None])
    inner = sampling.integer_weights(chunks)
    for weights in (outer, inner):
        assert (np.asarray(weights, np.uint64).sum(-1) == 2**31).all()
    implied = (np.asarray(outer, np.float64)[0][:, None] * np.asarray(inner, np.float64) / 2.0**62).reshape(-1)
    assert 0.5 * np.abs(implied - exact).sum() < 5e-7
    rare = (exact > 1e-9) & (exact < 1e-7)
    assert rare.sum() > 1000 and (implied[rare] > 0).all()
    np.testing.assert_allclose(implied[rare].sum(), exact[rare].sum(), rtol=1e-3)


def test_words_pick_by_interval():
    """Every border of the cumulative weights. Seen to catch: `<` for `<=`."""
    weights = jnp.array([[2**29, 0, 2**30, 2**29]], jnp.uint32)
    words = [0, 2**29 - 1, 2**29, 2**29 + 2**30 - 1, 2**29 + 2**30, 2**31 - 1]
    picked = [int(sampling._pick(weights, jnp.array([word << 1], jnp.uint32))[0]) for word in words]
    assert picked == [0, 0, 2, 2, 3, 3]


def test_samples_follow_the_distribution():
    """Seen to catch: one word used at both levels (they are then dependent)."""
    logits = np.log(np.tile([0.5, 0.2, 0.2, 0.1], 64))  # two chunks
    tokens = draw_many(logits, 20_000)
    np.testing.assert_allclose(np.bincount(tokens % 4, minlength=4) / 20_000, [0.5, 0.2, 0.2, 0.1], atol=0.015)
    np.testing.assert_allclose(np.mean(tokens < 128), 0.5, atol=0.015)
    np.testing.assert_allclose(np.mean((tokens % 128 < 64) == (tokens < 128)), 0.5, atol=0.015)


def test_temperature_zero():
    """S01. Seen to catch: division by 0."""
    tokens, logprobs = draw([1.0, 3.0, 3.0, 2.0], temperature=0.0)
    assert tokens[0] == 1
    np.testing.assert_allclose(logprobs[0], -0.9175758, atol=1e-6)
    tokens, logprobs = draw([1.0, 3.0, 3.0, 2.0], temperature=1e-6)
    assert tokens[0] in (1, 2) and np.isfinite(logprobs[0])


def test_greedy_is_argmax():
    """Seen to catch: the last of equal chunks; exp before argmax (it rounds to ties)."""
    logits = peaked(8, 1000)
    logits[3] = 0.0
    logits[3, 700] = 1e-9  # exp of both is 1
    logits[4, [5, 300, 301]] = 50.0  # ties within a chunk and across
    assert (draw(logits, temperature=0.0)[0] == logits.argmax(-1)).all()


def test_top_k_ties():
    """S03. Seen to catch: strict comparison with the k-th value."""
    assert set(draw_many([1.0, 1.0, 1.0, 0.0], top_k=2)) == {0, 1, 2}
    assert len(set(draw_many([0.0] * 4, top_k=1))) >= 1
    assert set(draw_many([3.0, 2.0, 1.0, 0.0], top_k=2)) == {0, 1}
    assert set(draw_many([0.0] * 4, top_k=100)) == {0, 1, 2, 3}


def test_top_p_border():
    """S05. Seen to catch: `>` for `>=`; every weight kept that equals the last one needed."""
    given, expected = case("S05")["input"], case("S05")["expected"]
    weights = jnp.asarray(given["probs"], jnp.float32)[None] * 2  # exact: the border cases are hit exactly
    for p, kept in zip(given["p"], expected["kept"], strict=True):
        left = np.asarray(sampling.keep_top_p(weights, jnp.array([p], jnp.float32)))[0]
        assert np.flatnonzero(left).tolist() == kept
        assert set(draw_many(np.log(given["probs"]), top_p=p)) == set(kept)


def test_top_p_among_equal_weights():
    """Against a stable sort on small whole numbers, which are exact. Seen to catch: all equal weights at the border
    kept; the highest ids; one row's border used for another."""
    weights = np.random.default_rng(0).integers(0, 4, (64, 128)).astype(np.float32)
    p = np.linspace(0.01, 0.99, 64).astype(np.float32)
    kept = np.asarray(sampling.keep_top_p(jnp.asarray(weights), jnp.asarray(p))) > 0
    for row in range(64):
        order = np.argsort(-weights[row], kind="stable")
        sums = np.cumsum(weights[row, order])
        count = np.searchsorted(sums, np.float32(p[row] * sums[-1])) + 1
        assert set(np.flatnonzero(kept[row])) == set(order[:count]), row


def test_top_k_then_top_p():
    """S07. Seen to catch: top-p of a sum other than what top-k left."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(draw_many(logits, top_k=2, top_p=0.5)) == {0}
    assert set(draw_many(logits, top_k=1, top_p=0.8)) == {0}
    assert set(draw_many(logits, top_k=2, top_p=0.6)) == {0, 1}


def test_min_p():
    """Seen to catch: min_p as an absolute probability."""
    assert set(draw_many(np.log([0.4, 0.3, 0.2, 0.1]), min_p=0.5)) == {0, 1, 2}
    assert set(draw_many(np.log([0.4, 0.3, 0.2, 0.1]), min_p=1.0)) == {0}


def test_filters_equal_sorting():
    """Against sort on many rows, options different per row. Seen to catch: fewer halvings than bits."""
    logits = peaked(32, 640, seed=3)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    k = np.arange(1, 33, dtype=np.int32)
    kept = np.asarray(sampling.keep_top_k(jnp.asarray(weights), jnp.asarray(k))) > 0
    order = np.argsort(-weights, axis=-1)
    for row in range(32):
        assert set(np.flatnonzero(kept[row])) == set(order[row, : k[row]])
    close = jnp.array([[np.nextafter(np.float32(1), np.float32(0)), 1.0]])
    assert np.asarray(sampling.keep_top_k(close, jnp.array([1]))).tolist() == [[0.0, 1.0]]
    p = np.linspace(0.05, 0.99, 32).astype(np.float32)
    kept = np.asarray(sampling.keep_top_p(jnp.asarray(weights), jnp.asarray(p))) > 0
    for row in range(32):
        sums = np.cumsum(weights[row, order[row]].astype(np.float64)) / weights[row].sum(dtype=np.float64)
        assert kept[row].sum() == np.searchsorted(sums, p[row]) + 1


def test_logprob_is_tempered_and_unfiltered():
    """S09. Seen to catch: a log-prob without 1/T; one renormalised after top-k."""
    logits = [2.0, 1.0, 0.0]
    for options in ({}, {"top_k": 2, "top_p": 0.99}):
        tokens, logprobs = draw(np.tile(logits, (200, 1)), temperature=0.5, **options)
        np.testing.assert_allclose(logprobs[tokens == 1], -2.1429316, atol=1e-6)
        assert (tokens == 1).any()


def test_ids_beyond_the_tokenizer():
    """S15 and the rows between tokenizer and vocabulary: never drawn, yet counted in the log-prob unless -inf.

    Seen to catch: the ids beyond left out of the normaliser.
    """
    padded = [1.0, 0, 0, 0, 0, -np.inf, -np.inf, -np.inf]
    tokens, logprobs = draw(np.tile(padded, (500, 1)), num_tokens=5)
    assert tokens.max() < 5
    np.testing.assert_allclose(logprobs[tokens == 0], -0.90483244, atol=1e-6)
    unused = [1.0, 0, 0, 0, 0, 7.0, 0, 0]  # an unused row of the model with most of the mass
    for temperature in (0.0, 1.0):
        tokens, logprobs = draw(np.tile(unused, (500, 1)), num_tokens=5, temperature=temperature)
        assert tokens.max() < 5
        want = np.asarray(unused) - np.log(np.exp(unused).sum())
        np.testing.assert_allclose(logprobs, want[tokens], rtol=1e-5)
    assert draw(np.tile(unused, (500, 1)), num_tokens=5, top_k=1)[0].max() == 0


def test_min_tokens_masks_every_stop_id():
    """T05 at the sampler, also where the stop ids hold all the mass. Seen to catch: only the first id masked;
    weights relative to a masked maximum (0 / 0)."""
    logits = np.zeros((3, 6), np.float32)
    logits[:, [2, 4]] = 200.0
    logits[:, 1] = 30.0
    for temperature in (0.0, 1.0):
        tokens, logprobs = draw(logits, temperature=temperature, stop_ids=(2, 4), generated=[0, 2, 3], min_tokens=3)
        assert set(tokens[:2].tolist()) == {1} and tokens[2] in (2, 4)
        assert np.isfinite(logprobs).all()
    assert draw(logits[:1], temperature=0.0, stop_ids=(2, 4), min_tokens=1)[0][0] == 1


def test_rows_do_not_depend_on_each_other():
    """Any batch, any order, filters elsewhere in the batch. Seen to catch: a key shared by the batch; the
    filters applied to every row once one row wants them."""
    logits = peaked(16, 512)
    seeds = np.random.default_rng(0).integers(0, 2**32, (16, 2), dtype=np.uint32)
    generated = np.arange(16, dtype=np.int32)
    tokens, _ = draw(logits, seeds=seeds, generated=generated)
    for some in ([5], [15, 3, 8], list(range(15, -1, -1))):
        again = draw(logits[some], seeds=seeds[some], generated=generated[some])
        assert (again[0] == tokens[some]).all()
    top_k = np.where(np.arange(16) % 2, 1, 0)
    mixed, _ = draw(logits, seeds=seeds, generated=generated, top_k=top_k, top_p=np.where(top_k, 0.5, 1.0))
    assert (mixed[::2] == tokens[::2]).all()
    assert (mixed[1::2] == logits[1::2].argmax(-1)).all()


def test_words_depend_on_seed_and_position():
    """S11, S13. Seen to catch: the position left out; both halves of a seed not used."""
    seeds = jnp.array([[1, 2], [1, 3], [2, 2], [1, 2]], jnp.uint32)
    words = np.asarray(sampling.random_words(seeds, jnp.array([0, 0, 0, 1], jnp.int32)))
    assert len({tuple(pair) for pair in words.tolist()}) == 4
    again = np.asarray(sampling.random_words(seeds[3:], jnp.array([1], jnp.int32)))
    assert (again == words[3:]).all()


def test_nothing_is_sorted():
    """XLA's CPU sort costs a hundred decode steps. Seen to catch: lax.top_k for the filter."""
    logits = jnp.zeros((4, 512))
    text = jax.jit(lambda x, r: sample_tokens(x, r, num_tokens=500)).lower(logits, rows(4)).as_text()
    assert "stablehlo.sort" not in text and "chlo.top_k" not in text
