"""What an algorithm's functions give back is checked where it comes back."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.interface import POLICY, Objective, Sequences
from jaxrl_llm.algorithms.returned import check_losses, check_sequences, checked_memory
from jaxrl_llm.errors import UserError

GRPO = ALGORITHMS["grpo"]
OPTIONS = GRPO.options()


@pytest.mark.parametrize("memory", [None, 3, {"a": "b"}, {"a": [1.0]}, {1: 2.0}, {"a": lambda: 0}, {"a": None}])
def test_a_memory_that_no_checkpoint_holds(memory: Any):
    """Caught: no check (the first save fails, and with it all steps so far)."""
    with pytest.raises(UserError, match=r"grpo: after_step gives .*; it must be a dict of numbers by name"):
        checked_memory(GRPO, "after_step", memory)


def test_a_memory_of_any_numbers_becomes_floats():
    told = checked_memory(GRPO, "init", {"a": np.float32(0.5), "b": jnp.float32(2.0), "c": 3})
    assert told == {"a": 0.5, "b": 2.0, "c": 3.0} and {type(value) for value in told.values()} == {float}


def sequences(**fields: Any) -> Sequences:
    """Two of five and of three tokens."""
    lengths = (5, 3)
    own: dict[str, Any] = {
        "tokens": [np.ones(length, np.int32) for length in lengths],
        "loss_mask": [np.arange(length) > 1 for length in lengths],
        "group": np.array([0, 1], np.int32),
    }
    return Sequences(**own | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"advantages": [np.ones(3), np.ones(1)]}, r"advantages .* has the shape \(3,\) for sequence 0, which has 5"),
        ({"advantages": [np.ones(5), np.ones((3, 1))]}, r"advantages .* has the shape \(3, 1\) for sequence 1"),
        ({"advantages": [np.ones(5)]}, "advantages .* has 1 entries for 2 sequences"),
        ({"old_logprobs": [np.ones(5), np.array(0.0)]}, r"old_logprobs .* has the shape \(\) for sequence 1"),
        ({"loss_mask": [np.ones(5, bool), np.ones(4, bool)]}, r"loss_mask .* has the shape \(4,\) for sequence 1"),
        ({"group": np.zeros(3, np.int32)}, "group .* has 3 entries"),
        ({"extras": {"bonus": [np.ones(4), 1.0]}}, r"extras\['bonus'\] .* has the shape \(4,\) for sequence 0"),
    ],
)
def test_lists_that_are_not_aligned(fields: dict[str, Any], words: str):
    """A list of the response's length would broadcast where a response has one token. Caught: only the number of
    entries compared."""
    with pytest.raises(UserError, match=words):
        check_sequences(GRPO, {"policy": sequences(**fields)}, (POLICY,))


def test_what_prepare_may_give():
    """One number for all tokens of a sequence, in `extras`."""
    good = sequences(advantages=[np.ones(5), np.ones(3)], extras={"bonus": [np.ones(5), 1.0]})
    check_sequences(GRPO, {"policy": good}, (POLICY,))
    for wrong in ({"polcy": good}, {"policy": None}):
        with pytest.raises(UserError, match=r"it must give Sequences, or a dict of them by trained role \(policy\)"):
            check_sequences(GRPO, wrong, (POLICY,))  # pyright: ignore[reportArgumentType]


def summed(options: Any, outputs: Any, rows: Any) -> Objective:
    return Objective(jnp.sum(outputs.logprobs), {}, {"m": (jnp.sum(rows.weights), jnp.float32(1))}, {})


def untouched(options: Any, outputs: Any, rows: Any) -> Objective:
    return Objective(outputs.logprobs * rows.weights, {}, {}, {})


def metric(options: Any, outputs: Any, rows: Any) -> Objective:
    return Objective(jnp.float32(0), {}, {"m": (rows.weights, jnp.float32(1))}, {"most": rows.advantages})


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (lambda options, outputs, rows: rows.extras["bonus"], "the loss of policy fails on rows of zeros: KeyError"),
        (lambda options, outputs, rows: outputs.logprobs.sum(), "gives a ShapeDtypeStruct; it must give an Objective"),
        (untouched, r"gives total \(2, 8\); all must be sums"),
        (metric, r"gives most \(2, 8\), m \(sum\) \(2, 8\)"),
    ],
)
def test_losses_that_fail_or_give_no_sums(losses: Any, words: str):
    """Told before weights are read, by the name of the function."""
    with pytest.raises(UserError, match=words):
        check_losses(dataclasses.replace(GRPO, losses=losses), OPTIONS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_losses_of_the_project_pass(name: str):
    """The trace has the outputs and extras that each reads."""
    algorithm = ALGORITHMS[name]
    check_losses(algorithm, algorithm.options())
    if name == "grpo":
        check_losses(dataclasses.replace(algorithm, losses=summed), OPTIONS)
