"""The advantages and the losses of every on-policy algorithm, against what one would write down sample by sample."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.errors import UserError
from jaxrl_llm.packing import RowShape, pack
from jaxrl_llm.types import TokenOutputs, ValueOutputs
from tests.algorithms.fake_context import (
    LENGTHS,
    NAN,
    PROMPTS,
    TRUNCATED,
    FakeContext,
    make_config,
    make_rollouts,
)

GROUPS = np.repeat(np.arange(4), 4)


def prepared(name, *, memory=None, training=(), **algorithm):
    config = make_config(name, training=training, **algorithm)
    context = FakeContext(config, memory=memory or {})
    result = ALGORITHMS[name].prepare(context, make_rollouts())
    return (result["policy"] if isinstance(result, dict) else result), context


# --- oracles of the advantages: lists of one float64 array per sample, over its response ----------------------------


def spread(values):
    return [np.full(length, value) for length, value in zip(LENGTHS, values, strict=True)]


def by_group(rewards, one):
    """`one(scores of the group, place of the sample among them)` for each scored sample, 0 for the others."""
    found = np.zeros(16)
    for index in range(4):
        members = [n for n in range(16) if GROUPS[n] == index and not np.isnan(rewards[n])]
        for place, n in enumerate(members):
            found[n] = one(rewards[members].astype(np.float64), place)
    return found


def standardised(scores, place):
    if len(set(scores)) == 1:
        return 0.0
    return (scores[place] - scores.mean()) / (scores.std(ddof=1) + 1e-6)


def centred(scores, place):
    return scores[place] - scores.mean()


def against_the_others(scores, place):
    others = np.delete(scores, place)
    return scores[place] - others.mean() if len(others) else 0.0


def best_of_two(scores, place):
    pairs = list(itertools.combinations(range(len(scores)), 2))
    best = np.array([max(scores[list(pair)]) for pair in pairs])
    if not len(best) or best.std() == 0:
        return 0.0
    mine = [value for pair, value in zip(pairs, best, strict=True) if place in pair]
    return float(np.mean((np.array(mine) - best.mean()) / (best.std() + 1e-6)))


def whitened(values, mask):
    flat = np.concatenate([one[keep] for one, keep in zip(values, mask, strict=True)])
    return [
        np.where(keep, (one - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8), 0.0)
        for one, keep in zip(values, mask, strict=True)
    ]


def masks(rewards, mask_truncated=False):
    keep = ~np.isnan(rewards)
    if mask_truncated:
        keep[list(TRUNCATED)] = False
    return [np.full(length, one) for length, one in zip(LENGTHS, keep, strict=True)]


def response_kl(rollouts, estimator):
    """KL of each response's tokens, of the fixed log-probs."""
    found = []
    for ids in rollouts.responses:
        d = -0.1 * (ids % 5) + 0.07 * (ids % 5)
        found.append({"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimator])
    return found


def rewards_to_go(rollouts, kl_coef, gamma):
    """Of every token: what follows, discounted; the sum over pairs of tokens, not a recursion."""
    kl, found = response_kl(rollouts, "k1"), []
    for n, length in enumerate(LENGTHS):
        earned = -kl_coef * kl[n]
        earned[-1] += np.nan_to_num(rollouts.rewards[n])
        found.append(np.array([sum(gamma ** (s - t) * earned[s] for s in range(t, length)) for t in range(length)]))
    return found


def ppo_by_hand(rollouts, kl_coef, kl, gamma, lam):
    """GAE as the sum of discounted errors, (gamma lam)^(s-t) delta_s; values are those of the token before."""
    found = []
    for n, ids in enumerate(rollouts.responses):
        before = np.concatenate([PROMPTS[GROUPS[n]][-1:], ids])
        values = 0.25 * (before % 4)
        if n not in TRUNCATED:
            values[-1] = 0.0  # the episode is over
        earned = -kl_coef * kl[n]
        earned[-1] += np.nan_to_num(rollouts.rewards[n])
        delta = earned + gamma * values[1:] - values[:-1]
        length = len(ids)
        found.append(
            np.array([sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length)) for t in range(length)])
        )
    return found


def expected_advantages(case, rollouts):
    rewards, scored = rollouts.rewards, masks(rollouts.rewards)
    cases = {
        "standardised": lambda: spread(by_group(rewards, standardised)),
        "centred": lambda: spread(by_group(rewards, centred)),
        "others": lambda: spread(by_group(rewards, against_the_others)),
        "best of two": lambda: spread(by_group(rewards, best_of_two)),
        "greedy": lambda: spread(np.nan_to_num(rewards - np.array([0.25, 1.0, np.nan, 0.0])[GROUPS])),
        "to go": lambda: whitened(rewards_to_go(rollouts, 0.2, 0.9), scored),
        "whitened": lambda: whitened(spread(by_group(rewards, centred)), scored),
        "by component": lambda: whitened(
            spread(
                by_group(rollouts.components["first"], standardised)
                + 0.5 * by_group(rollouts.components["second"], standardised)
            ),
            scored,
        ),
        "gae": lambda: whitened(ppo_by_hand(rollouts, 0.0, response_kl(rollouts, "k1"), 0.9, 0.8), scored),
        "gae, kl": lambda: ppo_by_hand(rollouts, 0.3, response_kl(rollouts, "k3"), 1.0, 1.0),
    }
    return cases[case]()


CASES = [
    *[(name, "standardised", {}) for name in ("grpo", "dapo", "gspo", "gmpo", "cispo", "sapo")],
    ("grpo", "centred", {"advantage_normalization": "none"}),
    ("dr_grpo", "centred", {}),
    ("rloo", "others", {}),
    ("reinforce_plus_plus", "to go", {"kl_coef": 0.2, "gamma": 0.9}),
    ("reinforce_plus_plus_baseline", "whitened", {}),
    ("remax", "greedy", {}),
    ("pass_at_k", "best of two", {"k": 2}),
    ("gdpo", "by component", {}),
    ("ppo", "gae", {"gamma": 0.9, "lam": 0.8}),
    ("ppo", "gae, kl", {"kl_coef": 0.3, "kl_in": "reward", "whiten_advantages": False}),
]


@pytest.mark.parametrize(("name", "case", "algorithm"), CASES, ids=[f"{name}: {case}" for name, case, _ in CASES])
def test_advantages_are_those_of_the_formula(name, case, algorithm):
    """With a sample that is not scored, a group of equal rewards, a truncated response and a group without a score.

    Caught: an advantage that stands on the prompt; the biased deviation; RLOO's baseline with the sample itself;
    REINFORCE++ without its discount; whitening that counts unscored samples; GDPO's weights left out; a value read at
    its own token; a truncated response whose return ends in 0. Caught: a finished one whose does not; the wrong KL
    estimator.
    """
    sequences, _ = prepared(name, **algorithm)
    rollouts = make_rollouts()
    expected = expected_advantages(case, rollouts)
    for n, (got, mask) in enumerate(zip(sequences.advantages, sequences.loss_mask, strict=True)):
        start = len(PROMPTS[GROUPS[n]])
        assert mask.any() == (not np.isnan(rollouts.rewards[n])) and not mask[:start].any()
        wanted = np.where(mask, np.concatenate([np.zeros(start), expected[n]]), 0.0)
        np.testing.assert_allclose(got, wanted, atol=2e-6, err_msg=str(n))  # float32 of numbers of about 1


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "ppo", "gdpo"])
def test_truncated_responses_leave_the_loss_and_the_whitening(name):
    """Their rewards still count in the group. Caught: whitening over what is not trained; a mean without them."""
    sequences, _ = prepared(name, mask_truncated=True)
    rollouts = make_rollouts()
    assert [n for n in range(12) if not sequences.loss_mask[n].any()] == [3, 5, 9]
    if name == "grpo":
        pairs = zip(sequences.advantages, sequences.loss_mask, strict=True)
        got = [advantage[mask][0] for advantage, mask in pairs if mask.any()]
        wanted = by_group(rollouts.rewards, standardised)[[0, 1, 2, 4, 6, 7, 8, 10, 11]]
        np.testing.assert_allclose(got, wanted, atol=2e-6)
        return
    trained = np.concatenate([a[m] for a, m in zip(sequences.advantages, sequences.loss_mask, strict=True)])
    np.testing.assert_allclose([trained.mean(), trained.std(ddof=1)], [0.0, 1.0], atol=1e-5)


def test_the_weight_of_the_kl_is_the_controllers():
    """Caught: `algorithm.kl_coef` in place of the weight in memory."""
    options = {"kl_coef": 0.3, "kl_in": "reward", "whiten_advantages": False, "kl_estimator": "k1"}
    sequences, _ = prepared("ppo", memory={"kl_coef": 0.7}, **options)
    rollouts = make_rollouts()
    expected = ppo_by_hand(rollouts, 0.7, response_kl(rollouts, "k1"), 1.0, 1.0)
    np.testing.assert_allclose(sequences.advantages[0][2:], expected[0], atol=2e-6)
    assert sequences.metrics["kl/coef"] == 0.7


def test_ppo_tells_what_the_critic_explains():
    """Returns are advantage plus value. Caught: the whitened advantages in the returns; a variance over the prompt."""
    sequences, context = prepared("ppo")
    rollouts = make_rollouts()
    raw = ppo_by_hand(rollouts, 0.0, response_kl(rollouts, "k1"), 1.0, 1.0)
    values = [
        0.25 * (np.concatenate([PROMPTS[GROUPS[n]][-1:], ids[:-1]]) % 4) for n, ids in enumerate(rollouts.responses)
    ]
    returns = [one + value for one, value in zip(raw, values, strict=True)]
    np.testing.assert_allclose(sequences.extras["returns"][0][2:], returns[0], atol=1e-6)
    np.testing.assert_allclose(sequences.extras["values"][0][2:], values[0], atol=1e-6)
    scored = ~np.isnan(rollouts.rewards)
    flat = [
        np.concatenate([one for one, keep in zip(parts, scored, strict=True) if keep]) for parts in (values, returns)
    ]
    expected = 1 - np.var(flat[1] - flat[0]) / np.var(flat[1])
    assert sequences.metrics["critic/explained_variance"] == pytest.approx(expected, abs=1e-6)
    assert context.asked == ["values of critic"]


# --- losses -------------------------------------------------------------------------------------------------------


def clipped_by_hand(d, advantage, low, high, dual):
    """Loss and slope in the token's log-prob."""
    ratio = np.exp(d)
    loss, slope = -advantage * ratio, -advantage * ratio
    bound = -advantage * np.clip(ratio, 1 - low, 1 + high)
    slope = np.where(bound > loss, 0.0, slope)
    loss = np.maximum(loss, bound)
    if dual:
        far = (advantage < 0) & (loss > -advantage * dual)
        loss, slope = np.where(far, -advantage * dual, loss), np.where(far, 0.0, slope)
    return loss, slope


def token_losses(name, options, actor, old, advantage):
    """Of one sequence: token losses, and the gradient of their mean, times the length, in each token's log-prob."""
    d, length = actor - old, len(actor)
    if name == "gspo":
        loss, slope = clipped_by_hand(d.mean(), advantage.mean(), options.clip_low, options.clip_high, 0.0)
        return np.full(length, loss), np.full(length, slope)
    if name == "gmpo":
        a = advantage.mean()
        bounded = np.minimum(d, options.clip_high) if a > 0 else np.maximum(d, -options.clip_low)
        loss = -a * np.exp(bounded.mean())
        return np.full(length, loss), np.where(bounded == d, loss, 0.0)
    if name == "cispo":
        weight = np.clip(np.exp(d), 1 - options.clip_low, 1 + options.clip_high)
        return -weight * advantage * actor, -weight * advantage
    if name == "sapo":
        tau = np.where(advantage > 0, options.tau_pos, options.tau_neg)
        gate = 1 / (1 + np.exp(-tau * (np.exp(d) - 1)))
        return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * np.exp(d)
    return clipped_by_hand(d, advantage, options.clip_low, options.clip_high, options.dual_clip)


def packed(name, seed=1, share_prompts=True, **algorithm):
    """Rows of the fixed rollouts with log-probs of their own, several sequences in a row, and the sequences by
    segment: (row, columns) of each trained one."""
    sequences, context = prepared(name, **{"kl_coef": 0.1, **algorithm})
    generator = np.random.default_rng(seed)

    def noise(scale):
        return [
            np.where(mask, -1.5 + scale * generator.normal(size=len(mask)), 0).astype(np.float32)
            for mask in sequences.loss_mask
        ]

    sequences.old_logprobs, sequences.sampler_logprobs, sequences.ref_logprobs = noise(0.5), noise(0.5), noise(0.5)
    aggregation = ALGORITHMS[name].loss_aggregation(context.options)
    batch, placement = pack(
        sequences, RowShape(16, 8), aggregation=aggregation, max_response_tokens=4, max_micro_batches=1,
        share_prompts=share_prompts,
    )  # fmt: skip
    rows = jax.tree.map(lambda field: jnp.asarray(field[0]), batch.rows)
    actor = np.where(batch.rows.loss_mask[0], -1.5 + 0.5 * generator.normal(size=(8, 16)), 0.0).astype(np.float32)
    places = [(row, columns) for row, columns in zip(placement.row, placement.completion, strict=True) if row >= 0]
    trained = []
    for row, columns in places:
        inside = np.flatnonzero(batch.rows.loss_mask[0, row, columns]) + columns.start
        trained.append((row, inside))
    return rows, actor, trained, context.options, batch.denominator


def loss_and_gradient(name, options, rows, actor):
    entropy = jnp.where(rows.loss_mask, 0.3, 0.0)

    def total(logprobs):
        losses = ALGORITHMS[name].losses
        losses = losses["policy"] if isinstance(losses, dict) else losses
        objective = losses(options, TokenOutputs(logprobs, entropy), rows)
        return objective.total, objective

    (_, objective), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(actor))
    return jax.device_get(objective), np.asarray(gradient)


LOSSES = [
    *[(name, {}) for name in ("grpo", "dr_grpo", "dapo", "ppo", "gspo", "gmpo", "cispo", "sapo")],
    ("gspo", {"token_level": True}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.4}),  # wide enough that both kinds of sequences are there
]


@pytest.mark.parametrize("share_prompts", [True, False], ids=["prompts shared", "in its prompt's segment"])
@pytest.mark.parametrize(("name", "algorithm"), LOSSES, ids=str)
def test_loss_and_gradient_are_those_of_the_formula(name, algorithm, share_prompts):
    """On packed rows, with a KL to the reference (k3) and an entropy bonus.

    Caught: a sequence's mean over its row, or over its prompt too; the clip of the other sign; a stop_gradient left
    out or put too much; the KL of the old policy; the weights of another aggregation; the entropy's sign.
    """
    rows, actor, trained, options, denominator = packed(
        name, share_prompts=share_prompts, entropy_coef=0.05, **algorithm
    )
    objective, gradient = loss_and_gradient(name, options, rows, actor)
    total, policy, slopes = 0.0, 0.0, np.zeros(actor.shape)
    for row, columns in trained:
        one, old, ref, advantage = (
            np.asarray(field, np.float64)[row, columns]
            for field in (actor, rows.old_logprobs, rows.ref_logprobs, rows.advantages)
        )
        loss, slope = token_losses(name, options, one, old, advantage)
        weight = {"token-mean": 1.0, "seq-mean-token-mean": 1 / len(one), "seq-mean-token-sum-norm": 1 / 4}[
            options.loss_aggregation
        ]
        kl = np.exp(ref - one) - 1 - (ref - one)
        policy += weight * loss.sum()
        total += weight * (loss + 0.1 * kl - 0.05 * 0.3).sum()
        slopes[row, columns] = weight * (slope + 0.1 * (1 - np.exp(ref - one)))
    assert objective.total == pytest.approx(total, rel=1e-5)
    assert objective.weighted["loss/policy"] == pytest.approx(policy, rel=1e-5)
    np.testing.assert_allclose(gradient, slopes, atol=1e-5)  # float32 of numbers of up to about 5
    wanted = len(trained) if options.loss_aggregation.startswith("seq") else sum(len(columns) for _, columns in trained)
    assert denominator == wanted


def test_the_critics_loss_is_that_of_the_formula():
    """Caught: the values after the tokens; a clip that takes the smaller loss; the half left out."""
    rows, _, trained, options, _ = packed("ppo")
    generator = np.random.default_rng(3)
    values = np.where(rows.loss_mask, generator.normal(size=(8, 16)), 0.0).astype(np.float32)
    ends = jnp.full((8, 16), 9.0)

    def total(before):
        objective = ALGORITHMS["ppo"].losses["critic"](options, ValueOutputs(before, ends), rows)
        return objective.total, objective

    (got, objective), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(values))
    expected, clipped, slopes = 0.0, 0, np.zeros(values.shape)
    for row, columns in trained:
        for column in columns:
            value, old, goal = (
                float(field[row, column]) for field in (values, rows.extras["values"], rows.extras["returns"])
            )
            bounded = min(max(value, old - 0.5), old + 0.5)
            far = (bounded - goal) ** 2 > (value - goal) ** 2
            expected += 0.5 * max((value - goal) ** 2, (bounded - goal) ** 2)
            clipped += far
            slopes[row, column] = 0.0 if far else value - goal
    assert got == pytest.approx(expected, rel=1e-5) and clipped > 0
    assert objective.counted["critic/clip_fraction"][0] == clipped
    np.testing.assert_allclose(gradient, slopes, atol=1e-5)


# --- rollout correction -------------------------------------------------------------------------------------------

CORRECTIONS = [
    ({"rollout_is": "token", "rollout_is_threshold": 1.5}, lambda d: np.minimum(np.exp(d), 1.5)),
    ({"rollout_is": "sequence"}, lambda d: np.minimum(np.exp(np.full(len(d), d.sum())), 2.0)),
    ({"rollout_is": "geometric"}, lambda d: np.minimum(np.exp(np.full(len(d), d.mean())), 2.0)),
    ({"rollout_rs": "token_k1"}, lambda d: (np.exp(d) <= 2.0) & (np.exp(d) >= 0.5)),
    (
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.2, "rollout_rs_threshold_lower": 0.9},
        lambda d: np.full(len(d), 0.9 <= np.exp(d.mean()) <= 1.2),
    ),
    (
        {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.3},
        lambda d: np.full(len(d), (d * d / 2).max() <= 0.3),
    ),
    ({"rollout_token_veto_threshold": 0.4}, lambda d: np.full(len(d), np.exp(d).min() >= 0.4)),
    (
        {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_token_veto_threshold": 0.4},
        lambda d: np.minimum(np.exp(d), 2.0) * (np.exp(d) <= 2.0) * (np.exp(d) >= 0.5) * (np.exp(d).min() >= 0.4),
    ),
]


@pytest.mark.parametrize(("algorithm", "factor"), CORRECTIONS, ids=[str(options) for options, _ in CORRECTIONS])
def test_rollout_correction_weights_the_policys_loss_alone(algorithm, factor):
    """The KL term keeps its weight. Caught: sampler and trainer exchanged; a sequence told by its row;
    the veto by the mean; a corrected KL; the options not passed on."""
    rows, actor, trained, options, _ = packed("grpo", **algorithm)
    objective, gradient = loss_and_gradient("grpo", options, rows, actor)
    policy, slopes, factors = 0.0, np.zeros(actor.shape), []
    for row, columns in trained:
        one, old, ref, sampler, advantage = (
            np.asarray(field, np.float64)[row, columns]
            for field in (actor, rows.old_logprobs, rows.ref_logprobs, rows.sampler_logprobs, rows.advantages)
        )
        loss, slope = token_losses("grpo", options, one, old, advantage)
        factors.append(factor(old - sampler).astype(np.float64))
        policy += (factors[-1] * loss).sum()
        slopes[row, columns] = factors[-1] * slope + 0.1 * (1 - np.exp(ref - one))
    assert objective.weighted["loss/policy"] == pytest.approx(policy, rel=1e-5)
    np.testing.assert_allclose(gradient, slopes, atol=1e-5)
    flat = np.concatenate(factors)
    assert 0 < np.mean(flat != 1) < 1 or "rollout_is" in algorithm

    def told(name):
        total, count = objective.counted[f"rollout_corr/{name}"]
        return float(total / count)

    if "rollout_is" in algorithm and "rollout_rs" not in algorithm:
        assert told("rollout_is_mean") == pytest.approx(flat.mean(), rel=1e-5)
        assert objective.maxima["rollout_corr/rollout_is_max"] == pytest.approx(flat.max(), rel=1e-5)
    else:
        assert told("rollout_rs_masked_fraction") == pytest.approx(np.mean(flat == 0), abs=1e-6)
    assert np.isfinite(told("k3_kl"))


def test_metrics_of_the_correction_can_be_had_without_it():
    """Caught: metrics by default; none where they are asked for."""
    rows, actor, _, options, _ = packed("grpo")
    assert not any("rollout_corr" in name for name in loss_and_gradient("grpo", options, rows, actor)[0].counted)
    rows, actor, _, options, _ = packed("grpo", rollout_metrics=True)
    objective, _ = loss_and_gradient("grpo", options, rows, actor)
    assert {"rollout_corr/kl", "rollout_corr/chi2_seq"} <= objective.counted.keys()
    assert "rollout_corr/rollout_is_mean" not in objective.counted


def test_bounds_that_keep_nothing_are_refused():
    """Caught: a step in which every token is rejected."""
    with pytest.raises(UserError, match="rollout_rs_threshold"):
        make_config("grpo", rollout_rs="seq_mean_k1", rollout_rs_threshold=0.5)
    with pytest.raises(UserError, match="rollout_rs_threshold_lower"):
        make_config("grpo", rollout_rs="token_k1", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=3.0)
    make_config("grpo", rollout_rs="seq_mean_k2", rollout_rs_threshold=0.5)


# --- what a batch may hold besides ordinary samples -----------------------------------------------------------------

ON_POLICY = [
    name for name, algorithm in ALGORITHMS.items() if algorithm.generates and name not in ("distillation", "online_dpo")
]
ODD = {
    "first": (0.3, NAN, NAN, NAN, 0.3, 0.3, 0.3, 0.3, 0.0, 2.0, 1.0, 3.0, NAN, NAN, NAN, NAN),
    "second": (0.0,) * 16,
    "baselines": (0.3, 0.3, 0.1, NAN),
}
"""Of the prompts: one has a single scored sample, one equal rewards that no binary fraction is, one an empty response
(its first), one no score."""
KNOWS_NO_GROUP = ("ppo", "ippo", "reinforce_plus_plus", "gdpo")
"""Whose advantages are whitened over the batch, so that equal rewards of one prompt are still told from others'."""


def odd_rollouts():
    rollouts = make_rollouts()
    components = {name: np.array(ODD[name], np.float32) for name in ("first", "second")}
    rollouts.responses[8] = rollouts.responses[8][:0]
    rollouts.sampler_logprobs[8] = rollouts.sampler_logprobs[8][:0]
    changes = {"components": components, "rewards": components["first"], "finish_reasons": ["stop"] * 16}
    return dataclasses.replace(rollouts, baselines=np.array(ODD["baselines"], np.float32), **changes)


@pytest.mark.parametrize("name", ON_POLICY)
def test_odd_samples_are_exact_and_finite(name):
    """Prepared, packed and through the loss, with log-probs that are not finite, or overflow a ratio, where nothing is
    trained. Caught: a ratio of what is not trained."""
    context = FakeContext(make_config(name, **({"k": 2} if name == "pass_at_k" else {})))
    rollouts = odd_rollouts()
    if name == "ippo":
        rollouts = dataclasses.replace(rollouts, turns=[rollouts] * context.options.agents)
    result = ALGORITHMS[name].prepare(context, rollouts)
    sequences = result["policy"] if isinstance(result, dict) else result
    assert all(np.isfinite(value) for value in sequences.metrics.values())
    assert not any(sequences.loss_mask[n].any() for n in (1, 2, 3, 8, 12, 13, 14, 15))
    assert all(np.isfinite(one).all() for one in sequences.advantages)
    assert not any(sequences.advantages[n].any() for n in (1, 2, 3, 8, 12, 13, 14, 15))
    if name not in KNOWS_NO_GROUP and name != "reinforce_plus_plus_baseline":
        assert not any(sequences.advantages[n].any() for n in (0, 4, 5, 6, 7))
    assert any(sequences.advantages[n].any() for n in (9, 10, 11))
    batch, _ = pack(
        dataclasses.replace(sequences, extras={}),
        RowShape(16, 8),
        aggregation=ALGORITHMS[name].loss_aggregation(context.options),
        max_response_tokens=4,
        max_micro_batches=1,
    )
    rows = jax.tree.map(lambda field: jnp.asarray(field[0]), batch.rows)
    # Old log-probs of 0 and current ones of -1.3, and one token whose ratio is beyond every float.
    actor = np.where(rows.loss_mask, -1.3, 0.0).astype(np.float32)
    far = tuple(np.argwhere(rows.loss_mask)[0])
    actor[far] = 500.0
    expected, slopes = loss_and_gradient(name, context.options, rows, actor)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected)) and np.isfinite(slopes).all()
    for junk in (np.nan, np.inf, 500.0):
        found, gradient = loss_and_gradient(name, context.options, rows, np.where(rows.loss_mask, actor, junk))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_array_equal(gradient, slopes)
