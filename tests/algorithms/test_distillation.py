"""Distillation: the divergence in the update is that of the two models' whole distributions, and only the policy
learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels import token_chunks
from jaxrl_llm import packing
from jaxrl_llm.algorithms.distillation import DISTILLATION
from jaxrl_llm.algorithms.interface import Divergence, Sequences
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Rollouts, TokenOutputs
from jaxrl_llm.update import Forward
from tests.algorithms.compared_rows import FakeContext, make_config, over_rows
from tests.algorithms.compared_rows import preferences as make_preferences
from tests.models.tiny import tiny_model

TEMPERATURE = 0.7
CASES = [(0.0, 0), (0.5, 0), (1.0, 0), (0.3, 3)]
WEIGHTS = np.array([1.0, 2.0, -1.0, 0.5], np.float32)


def make_sequences():
    """Two samples of a prompt, so that one stands behind a prompt that it shares."""
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 61, 4)
    tokens = [np.concatenate([prompt, generator.integers(0, 61, n)]).astype(np.int32) for n in (5, 3)]
    return Sequences(tokens, [np.arange(len(ids)) >= 4 for ids in tokens], np.zeros(2, np.int32))


def written_down(models, student, teacher):
    """The divergence of all trained tokens by case; a sequence a row, whole softmaxes."""
    distributions = []
    sequences = make_sequences()
    tokens = jnp.stack([jnp.pad(ids, (0, 9 - len(ids))) for ids in sequences.tokens])
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    trained = np.stack([np.pad(mask, (0, 9 - len(mask))) for mask in sequences.loss_mask])[:, 1:]
    for (model, _), params in zip(models, (student, teacher), strict=True):
        hidden = model.hidden(params, tokens, positions, jnp.ones_like(positions))
        logits = model.logits(params, hidden)[:, :-1, :61]
        distributions.append(jax.nn.softmax(logits / TEMPERATURE)[trained])

    def divergence(beta, top_k):
        p, q = distributions
        if top_k:
            best = jnp.argsort(-q, axis=1)[:, :top_k]
            kept = [jnp.take_along_axis(one, best, 1) for one in (p, q)]
            p, q = (jnp.concatenate([one, 1 - one.sum(1, keepdims=True)], 1) for one in kept)
        middle = beta * q + (1 - beta) * p

        def kl(one, other):
            return (one * (jnp.log(one) - jnp.log(other))).sum()

        if beta in (0.0, 1.0):
            return kl(p, q) if beta else kl(q, p)
        return beta * kl(q, middle) + (1 - beta) * kl(p, middle)

    return jnp.stack([divergence(*case) for case in CASES])


def test_the_divergence_of_the_update_is_that_of_the_distributions():
    """Every case's value, and the gradient of their weighted sum. Caught: the two exchanged; the teacher's states a
    column early; no temperature; the k likeliest of the policy."""
    models = (
        tiny_model(0, num_layers=1, windows=(None,)),
        tiny_model(1, num_layers=1, windows=(None,), hidden_size=48, num_heads=6, tie_embeddings=True),
    )
    (policy, student), (frozen, teacher) = models
    shared = {"temperature": TEMPERATURE, "dtype": np.float32, "remat": "none", "chunk_tokens": 8}
    batch, _ = packing.pack(
        make_sequences(),
        packing.RowShape(16, 1),
        aggregation="token-mean",
        max_response_tokens=5,
        max_micro_batches=1,
    )
    rows = jax.tree.map(lambda field: jnp.asarray(field[0]), batch.rows)
    assert (batch.rows.prefix_ids > 0).any()

    def of_the_update(student, teacher):
        found = []
        for beta, top_k in CASES:
            divergence = Divergence("teacher", beta, top_k)
            forward = Forward(policy, **shared, divergence=divergence, teacher=Forward(frozen, **shared))
            found.append(jnp.where(rows.loss_mask, 1.0, 1e6) * forward.outputs(student, rows, teacher).divergence)
        return jnp.stack([one.sum() for one in found])

    def weighted(function, student, teacher):
        values = function(student, teacher)
        return (WEIGHTS * values).sum(), values

    compute = jax.jit(jax.value_and_grad(functools.partial(weighted, of_the_update), argnums=(0, 1), has_aux=True))
    (_, found), (gradient, of_teacher) = compute(student, teacher)
    expect = jax.jit(
        jax.value_and_grad(functools.partial(weighted, functools.partial(written_down, models)), has_aux=True)
    )
    (_, expected), wanted = expect(student, teacher)
    assert expected.min() > 0.1
    np.testing.assert_allclose(found, expected, rtol=2e-5)  # float32 sums over a vocabulary
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(wanted)))
    difference = jax.tree.map(lambda a, b: np.square(a - b).sum(), gradient, wanted)
    assert np.sqrt(sum(jax.tree.leaves(difference))) < 1e-5 * norm
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_teacher))


def test_likeliest_tokens_are_of_trained_columns_alone(monkeypatch):
    """Two rows of 12, of which 2 and 1 tokens are trained, in chunks of 3 columns a row. Caught: chunks without a
    trained token projected too."""
    model, params = tiny_model(0, num_layers=1, windows=(None,))
    generator = np.random.default_rng(2)
    hidden = jnp.asarray(generator.normal(size=(2, 12, model.config.hidden_size)), jnp.float32)
    mask = np.zeros((2, 12), bool)
    mask[0, [4, 9]] = mask[1, 11] = True
    runs, project = [], token_chunks.logits

    def counting(*arguments):
        jax.debug.callback(lambda: runs.append(1))
        return project(*arguments)

    monkeypatch.setattr(token_chunks, "logits", counting)
    ids, logprobs = model.top_k_logprobs(params, hidden, jnp.asarray(mask), TEMPERATURE, k=4, chunk_tokens=6)
    jax.effects_barrier()
    assert len(runs) == 1
    expected = jax.nn.log_softmax(model.logits(params, jnp.roll(hidden, 1, axis=1))[..., :61] / TEMPERATURE)
    best = np.argsort(-np.asarray(expected), axis=-1)[..., :4]
    np.testing.assert_array_equal(ids, np.where(mask[..., None], best, 0))
    wanted = np.where(mask[..., None], np.take_along_axis(np.asarray(expected), best, -1), 0)
    np.testing.assert_allclose(logprobs, wanted, atol=1e-5)  # float32 sums over a vocabulary


def test_the_loss_is_the_mean_divergence_of_what_the_policy_wrote():
    """Rewards play no part: a sample without one is trained. Caught: unscored samples left out; the prompt trained."""
    context = FakeContext(make_config("distillation", {"teacher": {"path": "builtin:tiny_addition"}}))
    examples = [dataclasses.replace(example, response_ids=None) for example in make_preferences()]
    responses = [np.arange(1, 2 + n, dtype=np.int32) for n in range(3)]
    rollouts = Rollouts(
        examples=examples,
        group=np.arange(3, dtype=np.int32),
        responses=responses,
        sampler_logprobs=[np.full(len(ids), -0.5, np.float32) for ids in responses],
        texts=[""] * 3,
        finish_reasons=["stop", "length", "stop"],
        rewards=np.array([np.nan, 1.0, np.nan], np.float32),
    )
    sequences = DISTILLATION.prepare(context, rollouts)
    assert [mask.sum() for mask in sequences.loss_mask] == [1, 2, 3]
    assert sequences.sampler_logprobs[2].tolist() == [0, 0, 0, -0.5, -0.5, -0.5]
    values = [np.linspace(0.1, 1.0, len(ids)).astype(np.float32) for ids in sequences.tokens]

    def outputs_of(divergence):
        return TokenOutputs(jnp.full_like(divergence, -1.0), jnp.full_like(divergence, 3.0), divergence=divergence)

    loss, metrics, gradient = over_rows("distillation", context.options, sequences, values, outputs_of)
    trained = np.concatenate([one[mask] for one, mask in zip(values, sequences.loss_mask, strict=True)])
    assert loss == pytest.approx(trained.mean(), rel=1e-6)
    assert metrics["distillation/divergence"] == pytest.approx(trained.mean(), rel=1e-6)
    for one, mask in zip(gradient, sequences.loss_mask, strict=True):
        np.testing.assert_allclose(one, mask / 6, rtol=1e-6)


@pytest.mark.parametrize(("mini_batch_size", "epochs"), [(3, 1), (1, 1), (3, 2)])
def test_the_decoder_is_compared_with_the_policy_that_sampled(mini_batch_size: int, epochs: int):
    """Where a later update meets a policy that has moved, its own log-probs would stop a healthy run.

    Caught: the difference to the policy that is being updated; old log-probs left out for a second epoch.
    """
    training = {"mini_batch_size": mini_batch_size, "epochs": epochs}
    changes = {"teacher": {"path": "builtin:tiny_addition"}, "training": training}
    context = FakeContext(make_config("distillation", changes))
    examples = [dataclasses.replace(example, response_ids=None) for example in make_preferences()]
    responses = [np.arange(1, 2 + n, dtype=np.int32) for n in range(3)]
    rollouts = Rollouts(
        examples=examples,
        group=np.arange(3, dtype=np.int32),
        responses=responses,
        sampler_logprobs=[np.zeros(len(ids), np.float32) for ids in responses],
        texts=[""] * 3,
        finish_reasons=["stop"] * 3,
        rewards=np.zeros(3, np.float32),
    )
    sequences = DISTILLATION.prepare(context, rollouts)
    if (mini_batch_size, epochs) == (3, 1):
        assert sequences.old_logprobs is None and context.asked == []  # the update's own are the sampler's
        return
    assert context.asked == ["policy"]

    def outputs_of(divergence):
        return TokenOutputs(jnp.full_like(divergence, -9.0), jnp.zeros_like(divergence), divergence=divergence)

    values = [np.ones(len(ids), np.float32) for ids in sequences.tokens]
    _, metrics, _ = over_rows("distillation", context.options, sequences, values, outputs_of)
    pairs = zip(sequences.old_logprobs, sequences.loss_mask, strict=True)
    expected = np.abs(np.concatenate([one[mask] for one, mask in pairs])).mean()
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(expected, rel=1e-6)  # the sampler's are 0


def test_a_teacher_is_needed():
    with pytest.raises(UserError, match=r"teacher\.path is empty"):
        make_config("distillation")
