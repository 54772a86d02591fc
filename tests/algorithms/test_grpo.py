"""GRPO's host side: which tokens are trained, with which advantage, against which log-probs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.grpo import GRPO, GRPOOptions
from jaxrl_llm.errors import UserError
from jaxrl_llm.packing import RowShape, pack
from jaxrl_llm.types import Example, Rollouts, TokenOutputs

LOGPROBS = {"policy": -1.0, "reference": -1.5}


@dataclasses.dataclass
class FakeContext:
    """Log-probs that are one constant per role."""

    options: GRPOOptions
    config: configs.RunConfig
    step: int = 0
    memory: dict = dataclasses.field(default_factory=dict)
    asked: list = dataclasses.field(default_factory=list)

    def rollouts(self, examples, **_):
        raise AssertionError("prepare does not generate")

    more_examples = values = rollouts

    def logprobs(self, role, sequences):
        self.asked.append(role)
        return [np.where(mask, LOGPROBS[role], 0).astype(np.float32) for mask in sequences.loss_mask]


def make_config(**algorithm):
    config = configs.default_config("grpo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["rewards"] = {"exact": {"function": "exact_match"}}
    config["train_batch_size"] = 2
    config["rollout"].update(samples_per_prompt=2, max_new_tokens=4)
    config["algorithm"].update(algorithm)
    return configs.resolve(config)


def make_rollouts(rewards=(1.0, 0.0, 1.0, 1.0), reasons=("stop", "stop", "length", "stop")):
    examples = [Example("0@0", "ab", np.array([5, 6], np.int32)), Example("1@0", "c", np.array([7], np.int32), row=1)]
    responses = [np.arange(1, 1 + n, dtype=np.int32) for n in (3, 2, 4, 1)]
    return Rollouts(
        examples=examples,
        group=np.array([0, 0, 1, 1], np.int32),
        responses=responses,
        sampler_logprobs=[np.full(len(ids), -1.0, np.float32) for ids in responses],
        texts=[""] * 4,
        finish_reasons=list(reasons),
        rewards=np.array(rewards, np.float32),
    )


def prepared(rollouts=None, **algorithm):
    config = make_config(**algorithm)
    context = FakeContext(config.algorithm.options, config)
    return GRPO.prepare(context, rollouts or make_rollouts()), context


def test_the_response_is_trained_eos_included_and_the_prompt_is_not():
    """T01, T03, T15: ids as sampled, masks from lengths. Caught: a mask shifted by one; training on the prompt."""
    sequences, _ = prepared()
    assert [ids.tolist() for ids in sequences.tokens] == [[5, 6, 1, 2, 3], [5, 6, 1, 2], [7, 1, 2, 3, 4], [7, 1]]
    assert [mask.tolist() for mask in sequences.loss_mask][:2] == [
        [False, False, True, True, True],
        [False, False, True, True],
    ]
    assert sequences.sampler_logprobs[3].tolist() == [0.0, -1.0]
    half = np.sqrt(0.5)
    np.testing.assert_allclose(sequences.advantages[0], [0, 0, half, half, half], atol=1e-5)
    np.testing.assert_allclose(sequences.advantages[1], [0, 0, -half, -half], atol=1e-5)
    assert not np.any(sequences.advantages[2]) and not np.any(sequences.advantages[3])


def test_a_sample_without_a_score_is_left_out():
    """R11, L45. Caught: training on it with the group's baseline."""
    sequences, _ = prepared(make_rollouts(rewards=(1.0, np.nan, 0.0, 1.0)))
    assert not sequences.loss_mask[1].any()
    assert sequences.loss_mask[0].any()
    assert not np.any(sequences.advantages[0])  # alone in its group


def test_truncated_responses_can_be_masked():
    """Caught: masking them by default; masking by length in place of the finish reason."""
    assert prepared()[0].loss_mask[2].any()
    assert not prepared(mask_truncated=True)[0].loss_mask[2].any()
    just_fits = make_rollouts(reasons=("stop",) * 4)  # the third ends with its EOS, at the budget
    assert prepared(just_fits, mask_truncated=True)[0].loss_mask[2].any()


def test_old_logprobs_only_where_there_are_several_updates():
    """Caught: a forward whose result would equal the update's own."""
    sequences, context = prepared()
    assert sequences.old_logprobs is None and context.asked == []
    sequences, context = prepared(on_policy=False)
    assert context.asked == ["policy"] and sequences.old_logprobs[3].tolist() == [0.0, -1.0]


def test_kl_in_the_reward_moves_the_advantage_and_not_the_loss():
    """L17 in the algorithm. Caught: KL in both places; a mean over the tokens in place of their sum.

    k1 is 0.5 a token, so with kl_coef 0.2 the shaped rewards are score - 0.1 x length.
    """
    sequences, context = prepared(kl_coef=0.2, kl_in="reward", kl_estimator="k1", advantage_normalization="none")
    assert sorted(context.asked) == ["policy", "reference"]
    shaped = np.array([1 - 0.3, 0 - 0.2, 1 - 0.4, 1 - 0.1])
    expected = shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2)
    got = [values[mask][0] for values, mask in zip(sequences.advantages, sequences.loss_mask, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert sequences.metrics["kl/mean"] == pytest.approx(0.5)

    batch, _ = pack(sequences, RowShape(8, 4), aggregation="token-mean", max_response_tokens=4, max_micro_batches=1)
    rows = jax.tree.map(lambda field: jnp.asarray(field[0]), batch.rows)
    outputs = TokenOutputs(jnp.where(rows.loss_mask, LOGPROBS["policy"], 0.0), jnp.zeros(rows.tokens.shape))
    objective = GRPO.losses(context.options, outputs, rows)
    assert objective.total == objective.weighted["loss/policy"] and "kl/mean" not in objective.counted


def test_a_truncated_response_out_of_the_loss_keeps_its_shaped_reward():
    """Its group's mean counts it, KL included. Caught: a reward of 0 in place of its own (advantage 0.45)."""
    sequences, _ = prepared(
        kl_coef=0.2, kl_in="reward", kl_estimator="k1", advantage_normalization="none", mask_truncated=True
    )
    assert not sequences.loss_mask[2].any()
    got = sequences.advantages[3][sequences.loss_mask[3]]
    np.testing.assert_allclose(got, ((1 - 0.1) - (1 - 0.4)) / 2, atol=1e-6)
    assert sequences.metrics["kl/mean"] == pytest.approx(0.5)


def test_overlong_penalty_shapes_the_reward():
    """Caught: a penalty that never reaches the reward; the prompt's tokens counted as well."""
    sequences, _ = prepared(overlong_buffer_tokens=2, advantage_normalization="none")
    got = [values[mask][0] for values, mask in zip(sequences.advantages, sequences.loss_mask, strict=True)]
    # Responses of 3 and 4 of 4 tokens lose a half and 1, the shorter ones nothing.
    np.testing.assert_allclose(got, [0.25, -0.25, -0.5, 0.5], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"samples_per_prompt": 1}}, "samples_per_prompt"),
        ({"algorithm": {"dual_clip": 0.9}}, "dual_clip"),
        ({"algorithm": {"clip_low": -0.1}}, "clip_low"),
        ({"algorithm": {"clip_low": 1.5}}, "clip_low"),
        ({"algorithm": {"overlong_buffer_tokens": 300}}, "overlong_buffer_tokens"),
        ({"algorithm": {"kl_coeff": 0.1}}, "kl_coef"),
        ({"rollout": {"temperature": 0.0}}, "temperature"),
    ],
    ids=lambda value: str(value),
)
def test_options_that_cannot_work_are_refused(changes, message):
    """G01, G07. Each message names the option. Caught: each check and each bound of grpo's options taken out."""
    config = configs.default_config("grpo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["rewards"] = {"exact": {"function": "exact_match"}}
    for section, values in changes.items():
        config[section].update(values)
    with pytest.raises(UserError, match=message):
        configs.resolve(config)


def test_registry_names_match():
    """Caught: an algorithm registered under another name than its own."""
    assert all(name == algorithm.name for name, algorithm in ALGORITHMS.items())


def test_a_model_can_be_used_greedily_without_what_training_needs():
    """Caught: `generate` at temperature 0 refused because GRPO needs groups."""
    config = configs.default_config("grpo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["rollout"].update(temperature=0.0, samples_per_prompt=1)
    with pytest.raises(UserError, match="samples_per_prompt"):
        configs.resolve(config)
    assert configs.resolve(config, training=False).rollout.samples_per_prompt == 1
