"""The KL controller against the published update."""

import math

import pytest

from jaxrl_llm.algorithms.kl_controller import next_kl_coef


def adapted(kl, kl_coef=0.1, **options):
    return next_kl_coef(
        kl_coef, kl, **{"kl_controller": "adaptive", "target_kl": 2.0, "horizon": 1000, "n_steps": 100} | options
    )


def test_the_fixed_controller_changes_nothing():
    assert next_kl_coef(0.3, 99.0, n_steps=100) == 0.3


def test_the_adaptive_controller():
    """Caught: the error's sign; kl - target in place of kl / target - 1; each bound; n_steps or horizon left out."""
    assert adapted(2.2) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted(1.9) == pytest.approx(0.1 * (1 - 0.05 * 0.1))
    assert adapted(20.0) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert adapted(-1.0) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert adapted(20.0, n_steps=50) == pytest.approx(0.1 * (1 + 0.2 * 0.05))
    assert adapted(20.0, horizon=500) == pytest.approx(0.1 * (1 + 0.2 * 0.2))
    assert next_kl_coef(1.0, 9.0, kl_controller="adaptive") == pytest.approx(1 + 0.2 / 10_000)
    assert next_kl_coef(1.0, 0.11, kl_controller="adaptive", horizon=10) == pytest.approx(1.01)  # target 0.1


def test_it_settles_where_the_kl_is_the_target():
    """A KL that falls with the weight. Caught: an update that runs away (the error's sign)."""
    coefficient = 0.1
    for _ in range(400):
        coefficient = adapted(1.0 / coefficient, coefficient)
    assert 1.0 / coefficient == pytest.approx(2.0, rel=1e-3)


def test_what_cannot_work():
    """Caught: a KL that is not finite taken into the weight; a step that turns the weight's sign."""
    assert adapted(math.nan) == 0.1 and adapted(math.inf) == 0.1
    with pytest.raises(ValueError, match="horizon=1000"):
        adapted(1.0, n_steps=5000)
    with pytest.raises(ValueError, match="target_kl"):
        adapted(1.0, target_kl=0.0)
    with pytest.raises(ValueError, match="fixed, adaptive"):
        adapted(1.0, kl_controller="linear")
