"""Phases add up to the step, and every compiled program is counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.observability.timing import CompileCounter, PhaseTimer, peak_memory, peak_memory_bytes


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_do_not_overlap_and_the_rest_is_named():
    """Caught: the outer phase counting its inner one again (the sum then exceeds the step)."""
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 1
    with timer("generation"):
        clock.now += 2
        with timer("layout"):
            clock.now += 4
        clock.now += 8
    with timer("layout"):
        clock.now += 16
    clock.now += 32
    assert timer.seconds == {"generation": 10.0, "layout": 20.0}
    assert timer.metrics() == {
        "time/generation_s": 10.0,
        "time/layout_s": 20.0,
        "time/other_s": 33.0,
        "time/step_s": 63.0,
    }


def test_a_phase_that_fails_is_still_ended():
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(ZeroDivisionError), timer("a"):
        clock.now += 1
        raise ZeroDivisionError
    clock.now += 5
    with timer("b"):
        clock.now += 2
    assert timer.seconds == {"a": 1.0, "b": 2.0}


def test_compiles_are_counted_once_per_program():
    """Caught: traces counted for compiled programs."""
    jitted = jax.jit(lambda x: x * 3 + 1)
    first, second, third = jnp.zeros(3), jnp.zeros(5), jnp.zeros(6)
    with CompileCounter() as counter:
        jitted(first)
        jitted(first)
        assert counter.count == 1
        jitted.lower(third)  # traced, not compiled
        assert counter.count == 1
        jitted(second)
        assert counter.count == 2 and counter.seconds > 0
        assert counter.take()["compile/count"] == 2.0
        assert counter.take() == {"compile/count": 0.0, "compile/seconds": 0.0}
    jitted(third)
    assert counter.count == 0


def test_peak_memory_says_what_it_is():
    peak = peak_memory()
    assert "resident set" in peak.source  # a CPU has no allocator to ask
    held = bytearray(2**26)
    assert peak_memory_bytes() >= peak.num_bytes > 2**26 > len(held) - 1
