"""SFT on a chat with several turns of the assistant, from data row to loss and gradient."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.types import Example, TokenOutputs
from tests.algorithms.compared_rows import FakeContext, make_config, over_rows
from tests.cases import case


@pytest.mark.parametrize("row_tokens", [12, 40], ids=["a row each", "one row"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_l49_other_roles_turns_count_nowhere(mode, row_tokens):
    """The case's chat, and one of a single turn beside it. Caught: the response's tokens all trained; all counted in
    the denominator; the prompt trained."""
    spec = case("L49")
    written = np.array(spec["input"]["loss_mask"], bool)
    losses = [np.array([7, 7, *spec["input"]["token_losses"]], np.float32), np.array([7, 3.0, 0.5], np.float32)]
    examples = [
        Example(
            "0@0", "", np.array([4, 5], np.int32), response_ids=np.arange(8, dtype=np.int32), response_mask=written
        ),
        Example("1@0", "", np.array([6], np.int32), response_ids=np.arange(2, dtype=np.int32), row=1),
    ]

    def learned(rows):
        context = FakeContext(make_config("sft", {"train_batch_size": 2}, loss_aggregation=mode))
        sequences = SFT.prepare(context, SFT.collect(context, rows))
        given = [-one for one in losses[: len(rows)]]
        return over_rows(
            "sft", context.options, sequences, given, lambda values: TokenOutputs(values, jnp.ones_like(values)),
            row_tokens=row_tokens,
        )  # fmt: skip

    assert learned(examples[:1])[0] == pytest.approx(spec["expected"]["token_mean"], abs=1e-6)
    loss, metrics, gradient = learned(examples)
    by_token = mode == "token-mean"
    assert loss == pytest.approx((7 + 3.5) / 7 if by_token else (1.4 + 1.75) / 2, abs=1e-6)
    assert metrics["sft/nll_mean"] == pytest.approx((7 + 3.5) / 7, abs=1e-6)
    chat, single = (1 / 7, 1 / 7) if by_token else (1 / 10, 1 / 4)
    np.testing.assert_allclose(gradient[0], np.where([False, False, *written], -chat, 0), atol=1e-7)
    np.testing.assert_allclose(gradient[1], [0, -single, -single], atol=1e-7)
