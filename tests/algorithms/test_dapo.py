"""DAPO's dynamic sampling: what is drawn, kept and dropped, and that nothing of it has to outlive a step."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.dapo import DAPO, with_signal
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.trainer import Trainer
from jaxrl_llm.types import Example, Rollouts
from tests.algorithms.fake_context import NAN, FakeContext, make_config

SIGNAL, NONE, UNSCORED, ONE_SCORE = (1.0, 0.0), (1.0, 1.0), (NAN, NAN), (NAN, 1.0)


def rollouts_of(rewards: list[tuple[float, float]], first: int) -> Rollouts:
    """Two samples a prompt; the response's token names its sample."""
    count = 2 * len(rewards)
    flat = np.array(rewards, np.float32).reshape(-1)
    return Rollouts(
        examples=[
            Example(f"{first + row}@0", "p", np.array([5], np.int32), row=first + row) for row in range(len(rewards))
        ],
        group=np.repeat(np.arange(len(rewards), dtype=np.int32), 2),
        responses=[np.array([100 + 2 * first + n], np.int32) for n in range(count)],
        sampler_logprobs=[np.array([-float(2 * first + n)], np.float32) for n in range(count)],
        texts=[f"text {2 * first + n}" for n in range(count)],
        finish_reasons=["stop"] * count,
        rewards=flat,
        components={"first": flat} | ({"first/part": flat} if first else {}),
        metrics={"response/length_mean": float(first), "response/length_max": float(first)},
    )


def collected(calls: list[list[tuple[float, float]]], wanted: int, **algorithm):
    """The step's rollouts where the calls for completions give these rewards in turn, and how many were made."""
    made, first = [], 0
    for rewards in calls:
        made.append(rollouts_of(rewards, first))
        first += len(rewards)
    waiting = list(made)

    def generate(examples, **arguments):
        assert not arguments and [one.uid for one in examples] == [one.uid for one in waiting[0].examples]
        return waiting.pop(0)

    config = make_config("dapo", samples=2, batch=wanted, **algorithm)
    context = FakeContext(config, generate=generate, more=lambda: waiting[0].examples)
    return DAPO.collect(context, made[0].examples), len(calls) - len(waiting)


def test_prompts_are_drawn_until_there_are_enough_with_a_signal():
    """The surplus is dropped with its samples; all that belongs to a sample stays with it.

    Caught: a group that keeps its number from the call; responses in another order than rewards; the surplus kept;
    metrics of the first call alone.
    """
    calls = [[NONE, SIGNAL, UNSCORED], [SIGNAL, NONE, NONE], [(0.0, 2.0), SIGNAL, NONE], [SIGNAL] * 3]
    rollouts, made = collected(calls, 3)
    assert made == 3
    assert [one.uid for one in rollouts.examples] == ["1@0", "3@0", "6@0"]
    samples = [2, 3, 6, 7, 12, 13]
    assert [ids.tolist() for ids in rollouts.responses] == [[100 + n] for n in samples]
    assert [one.tolist() for one in rollouts.sampler_logprobs] == [[-float(n)] for n in samples]
    assert rollouts.texts == [f"text {n}" for n in samples] and len(rollouts.finish_reasons) == 6
    assert rollouts.group.tolist() == [0, 0, 1, 1, 2, 2] and rollouts.rewards.tolist() == [1, 0, 1, 0, 0, 2]
    np.testing.assert_array_equal(rollouts.components["first"], rollouts.rewards)
    np.testing.assert_array_equal(rollouts.components["first/part"], [NAN, NAN, 1, 0, 0, 2])
    assert rollouts.metrics["dapo/prompts_drawn"] == 9 and rollouts.metrics["dapo/signal_fraction"] == 4 / 9
    assert rollouts.metrics["response/length_mean"] == 3 and rollouts.metrics["response/length_max"] == 6
    sequences = DAPO.prepare(FakeContext(make_config("dapo", samples=2, batch=3)), rollouts)
    assert all(mask.any() for mask in sequences.loss_mask) and sequences.metrics["advantage/zero_fraction"] == 0


def test_a_full_batch_draws_nothing_more():
    """Caught: one batch more than is needed."""
    rollouts, made = collected([[SIGNAL, SIGNAL], [SIGNAL, SIGNAL]], 2, max_num_gen_batches=1)
    assert made == 1 and rollouts.metrics["dapo/signal_fraction"] == 1


def test_what_is_a_signal():
    """Caught: NaN compared like a reward; one score taken for a difference to the others, which have none."""
    rollouts = rollouts_of([NONE, SIGNAL, UNSCORED, ONE_SCORE], 0)
    assert with_signal(rollouts).tolist() == [1]


def test_the_limit_names_its_option():
    """Caught: a loop without an end; an error that does not say which option to change."""
    with pytest.raises(RunStopped, match=r"found 1 prompts .* among 6 in 3 batches \(algorithm\.max_num_gen_batches\)"):
        collected([[NONE, NONE], [SIGNAL, NONE], [NONE, ONE_SCORE], [SIGNAL] * 2], 2, max_num_gen_batches=3)


def test_it_can_be_switched_off():
    """Caught: a filter that stays on."""
    rollouts, made = collected([[NONE, SIGNAL], [SIGNAL, SIGNAL]], 2, dynamic_sampling=False)
    assert made == 1 and rollouts.rewards.tolist() == [1, 1, 1, 0]


def even(completion):
    """1 or 0 by the answer's text: many groups of two agree."""
    return float(sum(map(ord, completion)) % 2)


def run_config(steps):
    config = configs.default_config("dapo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["data"].update(train="builtin:addition/train", max_prompt_tokens=8)
    config["rewards"] = {"even": {}}
    config.update(num_steps=steps, train_batch_size=2)
    config["rollout"].update(samples_per_prompt=2, max_new_tokens=4, num_slots=4)
    config["training"].update(row_tokens=16, micro_batch_tokens=64)
    config["optimizer"].update(learning_rate=1e-3)
    config["checkpoint"].update(every_steps=2, save_final=False)
    config["mesh"].update(fsdp=1)
    return configs.resolve(config)


def test_a_resumed_run_draws_what_an_undisturbed_one_draws(tmp_path):
    """Case C13, bit for bit: nothing is held over to the next step, and the data goes on behind the last prompt drawn.

    Caught: a position in the data that counts steps.
    """

    def trained(folder, steps):
        trainer = Trainer(run_config(4), folder, rewards={"even": even}, devices=jax.devices()[:1])
        trainer.total_steps, drawn = steps, []
        collect = trainer.algorithm.collect

        def recorded(context, examples):
            rollouts = collect(context, examples)
            drawn.append((rollouts.metrics["dapo/prompts_drawn"], [one.uid for one in rollouts.examples]))
            return rollouts

        trainer.algorithm = dataclasses.replace(trainer.algorithm, collect=recorded)
        trainer.train()
        return trainer, drawn

    whole, expected = trained(tmp_path / "whole", 4)
    _, before = trained(tmp_path / "parts", 2)
    resumed, after = trained(tmp_path / "parts", 4)
    assert before + after == expected
    assert max(count for count, _ in expected[:2]) > 2  # more than a batch was drawn before the save
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole.roles), jax.device_get(resumed.roles))
    assert whole.data.state() == resumed.data.state()


def test_a_notebook_without_a_file_is_told(monkeypatch):
    """Caught: an AttributeError where more prompts are needed than a call was given."""
    config = run_config(1)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=""))
    trainer = Trainer(config, None, rewards={"even": lambda completion: 1.0}, devices=jax.devices()[:1])
    with pytest.raises(UserError, match="dapo asks for more prompts"):
        trainer.step(trainer.examples(["1+2=", "3+4="]))
    trainer.close()


# --- ReMax ----------------------------------------------------------------------------------------------------------


def test_remax_compares_with_the_greedy_answer_and_does_not_train_on_it():
    """Caught: a baseline at the rollout's temperature; the greedy answers among the samples; a baseline by sample."""
    asked = []

    def generate(examples, **arguments):
        asked.append(arguments)
        rollouts = rollouts_of([(1.0, 0.0), (0.5, NAN)], 0)
        if not arguments:
            return rollouts
        return dataclasses.replace(
            rollouts, rewards=np.array([0.25, 2.0], np.float32), responses=rollouts.responses[:2]
        )

    context = FakeContext(make_config("remax", samples=2, batch=2), generate=generate)
    remax = ALGORITHMS["remax"]
    rollouts = remax.collect(context, rollouts_of([SIGNAL, SIGNAL], 0).examples)
    assert asked == [{}, {"samples": 1, "temperature": 0.0}]
    assert len(rollouts) == 4 and rollouts.metrics["reward/greedy/mean"] == pytest.approx(1.125)
    sequences = remax.prepare(context, rollouts)
    assert [one.tolist() for one in sequences.advantages] == [[0, 0.75], [0, -0.25], [0, -1.5], [0, 0]]
    assert [mask.tolist() for mask in sequences.loss_mask] == [[False, True]] * 3 + [[False, False]]


def test_remax_penalises_the_greedy_answer_like_the_samples():
    """A penalty of half a token of ramp each. Caught: a baseline without the penalty, which makes long answers bad
    even where the greedy one is as long; the metric of the reward with the penalty in."""
    lengths = {"samples": (4, 3, 2, 4), "greedy": (4, 3)}

    def generate(examples, **arguments):
        rollouts = rollouts_of([(1.0, 0.0), (0.5, 1.0)], 0)
        responses = [np.full(length, 7, np.int32) for length in lengths["greedy" if arguments else "samples"]]
        sampled = [np.zeros(len(ids), np.float32) for ids in responses]
        rollouts = dataclasses.replace(rollouts, responses=responses, sampler_logprobs=sampled)
        return dataclasses.replace(rollouts, rewards=np.array([0.25, 2.0], np.float32)) if arguments else rollouts

    config = make_config("remax", samples=2, batch=2, overlong_buffer_tokens=2, overlong_penalty=1.0)  # of 4 tokens
    context, remax = FakeContext(config, generate=generate), ALGORITHMS["remax"]
    rollouts = remax.collect(context, rollouts_of([SIGNAL, SIGNAL], 0).examples)
    assert rollouts.metrics["reward/greedy/mean"] == pytest.approx(1.125)
    sequences = remax.prepare(context, rollouts)
    got = [float(one[-1]) for one in sequences.advantages]
    rewards, baselines = np.array([1 - 1.0, 0 - 0.5, 0.5, 1 - 1.0]), np.array([0.25 - 1.0, 2.0 - 0.5])
    np.testing.assert_allclose(got, rewards - np.repeat(baselines, 2), atol=1e-6)
