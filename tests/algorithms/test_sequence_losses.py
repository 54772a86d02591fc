"""The losses beside PPO's: values and gradients against loops in float64 and their finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import policy_loss
from tests.cases import case
from tests.packed_rows import PackedRows, finite_differences

LENGTHS = [4, 1, 5, 2, 6]
MASKS = [
    np.array([False, True, True, True]),
    np.array([True]),
    np.array([False, True, True, False, True]),  # tool output in between
    np.array([False, False]),  # nothing of it is trained
    np.array([False, True, True, True, True, True]),
]
LAYOUTS = [[[0], [1], [2], [3], [4]], [[0, 1, 2], [3, 4]], [[4, 3, 2], [1, 0]]]

# What the losses use where the formula clips, given by name so that both signs and both bounds are on both sides.
OPTIONS = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "gspo_token": {"clip_low": 0.1, "clip_high": 0.15},
    "gmpo": {"clip_low": 0.1, "clip_high": 0.2},
    "cispo": {"clip_low": 0.1, "clip_high": 0.3},
    "sapo": {"tau_pos": 0.7, "tau_neg": 1.4},
}


def ppo(ratio, advantage, low, high):
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -min(advantage * ratio, advantage * clipped)


def oracle(name, actor, old, advantage, frozen):
    """Token losses of one sequence's trained tokens, one after the other. `frozen` is what the gradient stops at."""
    options, count = OPTIONS[name], len(actor)
    if count == 0:
        return []
    mean_advantage = sum(advantage) / count
    if name == "gspo":
        ratio = np.prod([np.exp(actor[t] - old[t]) for t in range(count)]) ** (1 / count)
        return [ppo(ratio, mean_advantage, options["clip_low"], options["clip_high"])] * count
    if name == "gmpo":
        product = 1.0
        for t in range(count):
            ratio = np.exp(actor[t] - old[t])
            if mean_advantage > 0:
                product *= min(ratio, np.exp(options["clip_high"]))
            else:
                product *= max(ratio, np.exp(-options["clip_low"]))
        return [-mean_advantage * product ** (1 / count)] * count
    losses = []
    for t in range(count):
        ratio = np.exp(actor[t] - old[t])
        if name == "gspo_token":
            sequence = np.prod([np.exp(frozen[u] - old[u]) for u in range(count)]) ** (1 / count)
            own = sequence * np.exp(actor[t]) / np.exp(frozen[t])
            losses.append(ppo(own, advantage[t], options["clip_low"], options["clip_high"]))
        elif name == "cispo":
            weight = min(max(np.exp(frozen[t] - old[t]), 1 - options["clip_low"]), 1 + options["clip_high"])
            losses.append(-weight * advantage[t] * actor[t])
        else:
            tau = options["tau_pos"] if advantage[t] > 0 else options["tau_neg"]
            losses.append(-advantage[t] * 4 / tau / (1 + np.exp(-tau * (ratio - 1))))
    return losses


def example(seed):
    """Ragged log-probs and advantages; ratios on both sides of every bound, junk where masked."""
    generator = np.random.default_rng(seed)
    old = [generator.normal(-1.5, 0.3, length) for length in LENGTHS]
    shift = [generator.normal(0, 0.1) for _ in LENGTHS]
    actor = [one + offset + generator.normal(0, 0.3, len(one)) for one, offset in zip(old, shift, strict=True)]
    advantages = [generator.normal(0, 1, length) for length in LENGTHS]
    coefficients = [np.where(mask, generator.normal(size=len(mask)), 0) for mask in MASKS]
    return actor, old, advantages, coefficients


def evaluate(name, rows, actor, old, advantages):
    arguments = [actor, rows.put(old), rows.put(advantages)]
    if name.startswith("g"):
        arguments += [rows.put(MASKS, bool), rows.ids]
    return getattr(policy_loss, name)(*arguments, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_do_not_depend_on_the_packing(name):
    """Two sequences in a row or a row each. Caught: signs, each bound and the side it is on, each mean's mask, a sum or
    the token's own value in place of a mean, each stopped gradient, 4 / tau, an arithmetic mean for the geometric one.

    The tolerance is float32's: sums of up to six terms of size 1, against float64.
    """
    sides = set()
    for seed in range(4):
        actor, old, advantages, coefficients = example(seed)
        trained = [[one[mask] for one, mask in zip(each, MASKS, strict=True)] for each in (actor, old, advantages)]

        def total(point, trained=trained, coefficients=coefficients):
            losses = [
                oracle(name, point[n][mask], trained[1][n], trained[2][n], trained[0][n])
                for n, mask in enumerate(MASKS)
            ]
            return sum(np.dot(losses[n], coefficients[n][mask]) for n, mask in enumerate(MASKS))

        expected = [oracle(name, *one) for one in zip(*trained, trained[0], strict=True)]
        slopes = finite_differences(total, actor)
        for layout in LAYOUTS:
            rows = PackedRows(LENGTHS, layout, columns=14)
            weights = rows.put(coefficients)

            def objective(x, rows=rows, weights=weights, old=old, advantages=advantages):
                losses, ratio = evaluate(name, rows, x, old, advantages)
                return jnp.sum(weights * losses), (losses, ratio)

            gradient, (losses, ratio) = jax.grad(objective, has_aux=True)(rows.put(actor))
            for n, mask in enumerate(MASKS):
                np.testing.assert_allclose(rows.take(losses)[n][mask], expected[n], rtol=1e-5, atol=2e-6)
                np.testing.assert_allclose(rows.take(gradient)[n], slopes[n], rtol=2e-5, atol=2e-5)
                sides |= {
                    (bool(a > 0), bool(r > 1)) for a, r in zip(trained[2][n], rows.take(ratio)[n][mask], strict=True)
                }
    assert len(sides) == 4  # both signs of the advantage with ratios above and below 1


def test_l19_gspo_keeps_what_ppo_clips():
    """Caught: token ratios; a sum in place of the mean in the exponent."""
    spec = case("L19")
    given, expected = spec["input"], spec["expected"]
    actor = jnp.log(jnp.array([given["token_ratio"]], jnp.float32))
    ones, ids = jnp.ones_like(actor), jnp.ones(actor.shape, jnp.int32)
    for loss in (policy_loss.gspo, policy_loss.gspo_token):

        def mean(x, loss=loss):
            losses, ratio = loss(
                x, 0 * ones, given["advantage"] * ones, ones > 0, ids, clip_low=given["eps"], clip_high=given["eps"]
            )
            return losses.mean(), ratio

        (value, ratio), gradient = jax.value_and_grad(mean, has_aux=True)(actor)
        np.testing.assert_allclose(ratio, expected["seq_ratio"], atol=1e-6)
        np.testing.assert_allclose(value, expected["gspo_loss"], atol=1e-6)
        np.testing.assert_allclose(gradient[0], expected["gspo_grad_per_token"], atol=1e-6)


def test_l47_the_advantage_of_a_sequence_leaves_masked_tokens_out():
    """Caught: a mean over the whole segment (5.5)."""
    spec = case("L47")
    advantages = jnp.array(spec["input"]["advantages"], jnp.float32)
    mask = jnp.array(spec["input"]["mask"], bool)
    same = jnp.zeros_like(advantages)
    for loss in (policy_loss.gspo, policy_loss.gmpo):
        losses, _ = loss(same, same, advantages, mask, jnp.ones(mask.shape, jnp.int32))
        np.testing.assert_allclose(losses[0], [spec["expected"]["loss"]] * 2 + [0.0] * 2, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_overflow_and_junk_stay_finite(name):
    """Caught: exp of an unclamped log-ratio; a masked NaN that reaches the sequence's mean."""
    rows = PackedRows(LENGTHS, LAYOUTS[1], columns=14)
    actor = [np.full(length, 300.0) for length in LENGTHS]
    old = [np.full(length, -300.0) for length in LENGTHS]
    for sign in (1.0, -1.0):
        advantages = [np.full(length, sign) for length in LENGTHS]
        for start in (actor, old):
            other = old if start is actor else actor

            def total(x, other=other, advantages=advantages):
                losses, ratio = evaluate(name, rows, x, other, advantages)
                return jnp.sum(losses), (losses, ratio)

            gradient, outputs = jax.grad(total, has_aux=True)(rows.put(start))
            assert all(np.isfinite(one).all() for one in (gradient, *outputs))
    if name.startswith("g"):
        dirty = [np.where(mask, -1.0, np.nan) for mask in MASKS]
        losses, _ = evaluate(name, rows, rows.put(dirty), dirty, advantages)
        assert np.isfinite(losses).all()


def test_defaults():
    """GSPO's, GMPO's, SAPO's and verl's CISPO bounds. Caught: each of the default numbers changed."""
    one = jnp.ones((1, 1), jnp.int32)

    def loss(name, log_ratio, sign, **options):
        actor, advantage = jnp.full((1, 1), log_ratio), jnp.full((1, 1), sign)
        sequence = (one > 0, one) if name.startswith("g") else ()
        return float(getattr(policy_loss, name)(actor, 0 * actor, advantage, *sequence, **options)[0][0, 0])

    for name in ("gspo", "gspo_token"):
        assert loss(name, 0.1, 1.0) == pytest.approx(-(1 + 4e-4), abs=1e-6)
        assert loss(name, -0.1, -1.0) == pytest.approx(1 - 3e-4, abs=1e-6)
    assert loss("gmpo", 1.0, 1.0) == pytest.approx(-np.exp(0.4), abs=1e-6)
    assert loss("gmpo", -1.0, -1.0) == pytest.approx(np.exp(-0.4), abs=1e-6)
    assert loss("cispo", 1.0, 1.0) == pytest.approx(-1.2, abs=1e-6)
    assert loss("cispo", -3.0, 1.0) == pytest.approx(3 * np.exp(-3), abs=1e-6)  # no lower bound
    assert loss("sapo", 0.5, 1.0) == loss("sapo", 0.5, 1.0, tau_pos=1.0, tau_neg=9.0)
    assert loss("sapo", 0.5, -1.0) == loss("sapo", 0.5, -1.0, tau_pos=9.0, tau_neg=1.05)


def test_the_gates_slope_is_one_where_the_policies_agree():
    """As REINFORCE's, whatever tau is. Caught: 1 or 1 / tau in place of 4 / tau."""
    zero = jnp.zeros((1, 2))
    advantages = jnp.array([[2.0, -3.0]])
    slope = jax.grad(lambda x: policy_loss.sapo(x, zero, advantages, tau_pos=0.3, tau_neg=5.0)[0].sum())(zero)
    np.testing.assert_allclose(slope, -advantages, rtol=1e-6)


def test_value_loss():
    """Hand values, old value 0 and c = 0.5. Caught: minimum; the factor; a clip around the return or around 0."""
    values = jnp.array([[0.25, 2.0, 2.0, -2.0, 1.75]])
    old = jnp.array([[0.0, 0.0, 0.0, 0.0, 1.0]])
    returns = jnp.array([[1.0, 3.0, 0.0, 1.0, 2.0]])
    # Inside: (0.25 - 1)^2. Clipped to 0.5: (0.5 - 3)^2 is above (2 - 3)^2. Plain: 2^2 is above 0.5^2, as is 3^2 above
    # 1.5^2. Clipped to 1.5 around 1: 0.5^2 is above 0.25^2.
    losses, clipped = policy_loss.value_loss(values, old, returns)
    np.testing.assert_allclose(losses[0], [0.5 * 0.5625, 0.5 * 6.25, 0.5 * 4.0, 0.5 * 9.0, 0.5 * 0.25], rtol=1e-6)
    assert clipped.tolist() == [[False, True, False, False, True]]
    gradient = jax.grad(lambda x: policy_loss.value_loss(x, old, returns)[0].sum())(values)
    np.testing.assert_allclose(gradient[0], [-0.75, 0.0, 2.0, -3.0, 0.0], rtol=1e-6)
    free, _ = policy_loss.value_loss(values, old, returns, cliprange_value=float("inf"))
    np.testing.assert_allclose(free, 0.5 * np.square(values - returns), rtol=1e-6)
