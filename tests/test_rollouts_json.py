"""Rollouts through JSON and back, as a checkpoint keeps them."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.rollouts_json import from_json, to_json
from jaxrl_llm.types import Example, Rollouts

ROWS = [
    Example(f"{row}@0", "p", np.array([1, 5], np.int32), answer={"any": (row,)}, metadata={"day": row}, row=row)
    for row in range(3)
]


def row_of(row, epoch):
    return dataclasses.replace(ROWS[row], uid=f"{row}@{epoch}", epoch=epoch)


def assert_same(first, second):
    for field in dataclasses.fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, field.name
            np.testing.assert_array_equal(one, other)
        elif field.name in ("responses", "sampler_logprobs") and one is not None:
            assert [array.dtype for array in one] == [array.dtype for array in other], field.name
            assert [array.tobytes() for array in one] == [array.tobytes() for array in other], field.name
        elif field.name == "components":
            assert list(one) == list(other)
            assert [values.tobytes() for values in one.values()] == [values.tobytes() for values in other.values()]
        elif field.name in ("examples", "turns"):
            assert len(one) == len(other), field.name
            for a, b in zip(one, other, strict=True):
                assert_same(a, b)
        else:
            assert one == other, field.name


def make_rollouts(**changes):
    values = {
        "examples": [
            row_of(2, 4),
            dataclasses.replace(row_of(0, 4), uid="0@4/7", prompt="p q", sample=7, own_tokens=1),
        ],
        "group": np.array([0, 0, 1], np.int32),
        "responses": [np.array([3, 2], np.int32), np.array([], np.int32), np.array([2**31 - 1], np.int32)],
        # numbers whose decimal form is long, the smallest one that is not 0, and a negative zero
        "sampler_logprobs": [np.array([-1 / 3, -0.0], np.float32), np.array([], np.float32), np.array([-1e-45], "f4")],
        "texts": ["3", "", "\u2713"],
        "finish_reasons": ["stop", "length", "stop"],
        "rewards": np.array([0.1, np.nan, 1.0], np.float32),
        "components": {"exact": np.array([np.nan, 0.0, 1.0], np.float32)},
        "metrics": {"reward/mean": 1 / 3},
    }
    return Rollouts(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"baselines": np.array([0.5, np.nan], np.float32)},
        {"sampler_logprobs": None},
        {"turns": [make_rollouts()]},
        {"examples": [], "group": np.zeros(0, np.int32), "responses": [], "sampler_logprobs": [], "texts": []},
    ],
    ids=["plain", "baselines", "nothing sampled", "turns", "none"],
)
def test_every_field_and_bit_comes_back(changes):
    """Caught: numbers written with six digits; a prompt that an algorithm has extended read from its row again; a
    field left out (baselines, turns)."""
    rollouts = make_rollouts(**changes)
    text = json.dumps(to_json(rollouts))
    assert_same(rollouts, from_json(json.loads(text), row_of))
