"""Wrong arguments of the public Python calls: one paragraph with name, value and what is expected."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.arguments import checked
from jaxrl_llm.config import HybridEngineConfig, RolloutConfig, resolve
from jaxrl_llm.errors import UserError

MODEL = "builtin:tiny_addition"


def trainer(**arguments: Any) -> Any:
    return jaxrl_llm.RLTrainer(**{"model": MODEL, "reward": "exact_match", "rollout_len": 8, **arguments})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trainer(rollout_len="8"), "rollout_len = '8': expected a whole number, got str"),
        (lambda: trainer(rollout_len=True), "rollout_len = True: expected a whole number, got bool"),
        (lambda: trainer(model=None), "model = None: expected a string or a path, got NoneType"),
        (lambda: trainer(algo=3), "algo = 3: expected a string, got int"),
        (lambda: trainer(tokenizer=3), "tokenizer = 3: expected a string, a path, a PreTrainedTokenizerBase or None"),
        (lambda: trainer(reward=[len]), r"expected a string, a function, a dict \(a string: a function\) or None"),
        (lambda: trainer(reward={"a": None}), "reward = {'a': None}: expected"),
        (lambda: trainer(reward={"a.b": len}), r"rewards has one called 'a\.b': a name has no dot"),
        (lambda: trainer(options=[1]), r"options = \[1\]: expected a dict \(a string: anything\) or None, got list"),
        (lambda: trainer(options={1: 2}), "options = {1: 2}: expected a dict"),
        (lambda: trainer(options={"rollout.top_p": math.nan}), r"rollout\.top_p = nan is not allowed"),
        (lambda: trainer(options={"rollout.top_p": None}), r"rollout\.top_p = None: expected a number, got NoneType"),
        (lambda: trainer(workdir=3), "workdir = 3: expected a string, a Path or None, got int"),
        (lambda: jaxrl_llm.generate(MODEL, 5), "generate: prompts = 5: expected a list, got int"),
        (lambda: jaxrl_llm.generate(MODEL, np.array("1+1=")), "generate: prompts = .*expected a list, got ndarray"),
        (lambda: jaxrl_llm.generate(MODEL, {"a": "1+1="}), "generate: prompts = .*expected a list, got dict"),
        (lambda: jaxrl_llm.generate(MODEL, "1+1="), r"prompts = '1\+1=' is one text"),
        (lambda: jaxrl_llm.generate(MODEL, ["1+1="], max_new_tokens="3"), "max_new_tokens = '3': expected a whole num"),
        (lambda: jaxrl_llm.generate(MODEL, ["1+1="], temperature=math.nan), r"rollout\.temperature = nan"),
        (lambda: jaxrl_llm.chat(MODEL, max_new_tokens=1.5), "chat: max_new_tokens = 1.5: expected a whole number"),
        (lambda: jaxrl_llm.chat(MODEL, options={"rollout.max_new_tokens": "9"}), "= '9': expected a whole number"),
        (lambda: jaxrl_llm.chat(MODEL, options={"data": 3}), "data = 3: expected a group of options, got int"),
        (lambda: jaxrl_llm.chat(""), r"No model: set model\.path"),
        (lambda: jaxrl_llm.default_config(None), "default_config: algorithm = None: expected a string"),
        (lambda: resolve(None), "resolve: config = None: expected a ConfigDict or a dict"),  # pyright: ignore
        (lambda: HybridEngineConfig(bucket_bytes=-1), r"HybridEngineConfig\.bucket_bytes = -1 is not allowed"),
        (lambda: RolloutConfig(temperature=math.nan), r"RolloutConfig\.temperature = nan is not allowed"),
        (lambda: HybridEngineConfig(kv_cache_policy="dynamc"), r"kv_cache_policy = 'dynamc' .*Did you mean 'dynamic'"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_told_in_a_paragraph(call: Callable[[], Any], message: str):
    """Caught: no check at the entry (an error of the library's inside, or of another kind); an array without a length
    taken for a list."""
    with pytest.raises(UserError, match=message) as told:
        call()
    assert "\n" not in str(told.value)


def test_what_fits_is_passed_on():
    """Numpy's numbers are numbers, an array is a list. Caught: `isinstance(value, int)`, `Sequence` taken literally."""

    @checked
    def function(
        count: int, rate: float, items: Sequence[Any], more: Mapping[str, int] | None = None, *, flag: bool = False
    ) -> Any:
        return count, rate, len(items), more, flag

    assert function(np.int64(3), 1, np.array(["a", "b"]), {"a": 1}, flag=True) == (3, 1, 2, {"a": 1}, True)
    for wrong in ({"count": 1.0}, {"rate": "1"}, {"items": {1}}, {"items": b"a"}, {"more": {"a": "b"}}, {"flag": 1}):
        with pytest.raises(UserError, match=f"function: {next(iter(wrong))} = "):
            function(**{"count": 1, "rate": 1.0, "items": [], **wrong})
    assert type(RolloutConfig(temperature=1).temperature) is float
