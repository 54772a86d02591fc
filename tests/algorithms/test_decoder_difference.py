"""The decoder is compared with the trainer in every step that samples, also where no update of the policy tells it."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms import ippo, ppo
from jaxrl_llm.errors import RunStopped
from jaxrl_llm.trainer import Trainer
from tests.algorithms.fake_context import FakeContext, logprobs_of, make_rollouts
from tests.algorithms.fake_context import make_config as host_config
from tests.algorithms.test_ppo import longer, make_config

BROKEN = 0.1

RUNS = {
    "online_dpo": ({"rollout.temperature": 2.0}, "", "policy/grad_norm"),
    "ippo": ({"critic.warmup_steps": 2}, "_1", "critic_1/grad_norm"),
}
"""Changes of the configuration, the ending of the metrics of the policy that is broken, and what learns."""


@pytest.mark.parametrize("name", RUNS)
def test_a_decoder_that_disagrees_stops_the_run(name, monkeypatch):
    """First a sound step, then one in which the decoder tells 0.1 too much (of the second agent alone, where there are
    two). Caught: no figure of either algorithm."""
    changes, ending, learns = RUNS[name]
    trainer = Trainer(make_config(name, **changes), None, rewards={"longer": longer}, devices=jax.devices()[:1])
    mean, largest = f"rollout/logprob_diff_mean{ending}", f"rollout/logprob_diff{ending}_max"
    metrics, _ = trainer.step(next(trainer.data))
    assert metrics[learns] > 0 and ("policy/grad_norm" in metrics) == (name == "online_dpo")
    assert 0 < metrics[mean] <= metrics[largest] < 1e-4  # float rounding, the bound of `checks`
    complete = trainer.rollout.complete

    def too_likely(*args, draw=0, **kwargs):
        groups = complete(*args, draw=draw, **kwargs)
        if draw != len(ending) // 2:
            return groups
        return [[dataclasses.replace(one, logprobs=one.logprobs + BROKEN) for one in group] for group in groups]

    monkeypatch.setattr(trainer.rollout, "complete", too_likely)
    with pytest.raises(RunStopped, match=rf"({mean}|{largest}) is 0\.1, above its bound"):
        trainer.step(next(trainer.data))
    trainer.close()


@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.1, "kl_in": "reward", "mask_truncated": True}])
def test_the_difference_is_that_of_the_trained_tokens(options):
    """In a step of warm-up, on fixed numbers. Caught: tokens of prompts; those of samples that are left out as
    truncated, whose log-probs a KL in the reward needs; a second forward pass where that has made one."""
    context = FakeContext(host_config("ppo", critic={"warmup_steps": 1}, **options), memory={"kl_coef": 0.1})
    prepared = ppo.prepare(context, make_rollouts())
    assert list(prepared) == ["critic"] and context.asked.count("policy") == 1
    sequences = prepared["critic"]
    trained = [one[mask] for one, mask in zip(logprobs_of("policy", sequences), sequences.loss_mask, strict=True)]
    expected = np.abs(np.concatenate(trained) + 1.25)
    assert sequences.metrics["rollout/logprob_diff_mean"] == pytest.approx(expected.mean(), rel=1e-6)
    assert sequences.metrics["rollout/logprob_diff_max"] == pytest.approx(expected.max(), rel=1e-6)
    context.step, context.asked = 1, []
    prepared = ppo.prepare(context, make_rollouts())
    assert list(prepared) == ["policy", "critic"]  # from here the update tells
    assert "rollout/logprob_diff_mean" not in prepared["policy"].metrics


def test_a_warm_up_without_a_trained_token_has_no_difference():
    """Caught: the largest of no numbers."""
    rollouts = make_rollouts()
    rollouts = dataclasses.replace(rollouts, rewards=np.full(len(rollouts), np.nan, np.float32))
    rollouts.turns = [rollouts]
    context = FakeContext(host_config("ippo", critic={"warmup_steps": 1}, agents=1), memory={"kl_coef": 0.0})
    metrics = ippo.prepare(context, rollouts)["critic"].metrics
    assert metrics["rollout/logprob_diff_mean"] == metrics["rollout/logprob_diff_max"] == 0.0
