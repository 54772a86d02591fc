"""Token losses: values and gradients against the numeric cases and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import policy_loss
from jaxrl_llm.algorithms.policy_loss import clipped_surrogate, kl_penalty
from tests.cases import case


def surrogate(ratio, advantage, *, clip_low=0.2, clip_high=0.2, dual_clip=0.0):
    """Token losses, and each one's gradient with respect to its own new log-prob."""
    actor = jnp.log(jnp.array([ratio], jnp.float32))
    advantages = jnp.broadcast_to(jnp.array(advantage, jnp.float32), actor.shape)

    def losses(actor):
        return clipped_surrogate(
            actor, jnp.zeros_like(actor), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        )[0]

    return np.asarray(losses(actor))[0], np.asarray(jax.grad(lambda x: losses(x).sum())(actor))[0]


def test_l01_clip_for_both_signs_of_the_advantage():
    """Caught: minimum in place of maximum; clipping both sides for each sign."""
    spec = case("L01")
    ratio, expected = spec["input"]["ratio"], spec["expected"]
    for sign, name in ((1.0, "pos"), (-1.0, "neg")):
        loss, gradient = surrogate(ratio, sign)
        np.testing.assert_allclose(loss, expected[f"loss_{name}"], atol=1e-6)
        np.testing.assert_allclose(gradient, expected[f"grad_{name}"], atol=1e-6)


def test_l03_dual_clip_acts_only_on_negative_advantages():
    """Caught: the bound for every sign."""
    spec = case("L03")
    given = spec["input"]
    loss, gradient = surrogate(given["ratio"], [given["advantage"]], dual_clip=given["c"])
    np.testing.assert_allclose(loss, spec["expected"]["loss"], atol=1e-6)
    np.testing.assert_allclose(gradient, spec["expected"]["grad"], atol=1e-6)


def test_clip_higher_has_its_own_bound():
    """Caught: clip_low used on both sides."""
    loss, gradient = surrogate([1.25, 1.3], 1.0, clip_high=0.28)
    np.testing.assert_allclose(loss, [-1.25, -1.28], atol=1e-6)
    np.testing.assert_allclose(gradient, [-1.25, 0.0], atol=1e-6)


@pytest.mark.parametrize("estimator", policy_loss.KL_ESTIMATORS)
def test_l15_kl_estimators(estimator):
    """Caught: k3 with the ratio the wrong way round; a gradient of the wrong sign."""
    spec = case("L15")
    logprobs = jnp.array([spec["input"]["logp"]], jnp.float32)
    reference = jnp.array([spec["input"]["ref_logp"]], jnp.float32)
    value = kl_penalty(logprobs, reference, estimator)
    gradient = jax.grad(lambda x: kl_penalty(x, reference, estimator).sum())(logprobs)
    np.testing.assert_allclose(value[0], spec["expected"][estimator], atol=1e-6)
    np.testing.assert_allclose(gradient[0], spec["expected"][f"grad_{estimator}"], atol=1e-6)


def test_a_ratio_that_overflows_stays_finite():
    """Caught: exp of an unclamped log-ratio (inf, and inf * 0 = NaN in the gradient)."""
    loss, gradient = jax.value_and_grad(
        lambda x: clipped_surrogate(
            x, jnp.zeros_like(x), -jnp.ones_like(x), clip_low=0.2, clip_high=0.2, dual_clip=3.0
        )[0].sum()
    )(jnp.array([[200.0]]))
    assert loss == 3.0 and gradient[0, 0] == 0.0
    far = jnp.array([[-500.0]])
    for estimator in policy_loss.KL_ESTIMATORS:
        assert np.isfinite(kl_penalty(far, jnp.zeros_like(far), estimator)).all()
