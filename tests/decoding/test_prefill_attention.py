"""Blocked attention of prompts in one row against a plain masked softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.prefill_attention import prefill_attention

ATTEND = jax.jit(prefill_attention, static_argnames=("scale", "window", "soft_cap"))


def plain(q, k, v, first, *, scale, window=None, soft_cap=None):
    """One query at a time in float64."""
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for i in range(len(q)):
        begin = int(first[i]) if window is None else max(int(first[i]), i - window + 1)
        for head in range(q.shape[1]):
            scores = k[begin : i + 1, head // group].astype(np.float64) @ q[i, head] * scale
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[begin : i + 1, head // group]
    return out


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((64,), {}),
        ((1, 2, 61), {}),
        ((100, 28, 200), {}),
        ((127, 1, 128, 129, 127), {}),
        ((300,), {"window": 1}),
        ((300, 40), {"window": 7}),
        ((10, 290), {"window": 128}),
        ((150, 150), {"window": 130, "soft_cap": 2.0}),
    ],
)
def test_equals_plain_attention(lengths, options):
    """Prompts across block borders. Seen to catch: prompts that see each other; the loop one block short; keys of
    the block before at the wrong distance; a window of W + 1."""
    random = np.random.default_rng(0)
    total = sum(lengths)
    q, k, v = (random.standard_normal((total, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    begins = np.cumsum((0, *lengths[:-1]))
    first = np.repeat(begins, lengths).astype(np.int32)
    got = ATTEND(q, k, v, first, scale=0.3, **options)
    np.testing.assert_allclose(got, plain(q, k, v, first, scale=0.3, **options), atol=2e-5)


def test_cost_follows_the_longest_prompt():
    """The number of key blocks visited is that of the longest prompt. Seen to catch: a loop over the whole row."""
    tokens = 1024
    short = jnp.repeat(jnp.arange(0, tokens, 128, dtype=jnp.int32), 128)
    q = jnp.ones((tokens, 2, 8))
    poisoned = q.at[:128].set(jnp.nan)  # 0 * NaN would show a visit to the first block from beyond its neighbour
    out = ATTEND(q, q, poisoned, short, scale=1.0)
    assert np.isfinite(np.asarray(out[128:])).all()
