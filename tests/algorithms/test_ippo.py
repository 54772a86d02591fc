"""IPPO: one agent is PPO, several share an episode and nothing else."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import ippo
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.loading import load_model
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.trainer import StepContext, Trainer
from jaxrl_llm.types import Example, Rollouts
from tests.algorithms.fake_context import NAN, FakeContext
from tests.algorithms.fake_context import make_config as host_config
from tests.algorithms.test_ppo import longer, make_config, params_of, same

PROMPTS = ([5, 6], [7])


def fake_generate(calls):
    """Answers of one token, 20 + 10 agent + sample; rewards 1, 2, 3 … over all calls."""

    def generate(examples, *, role, samples, temperature, draw):
        samples = 2 if samples is None else samples
        count = samples * len(examples)
        start = sum(len(call["rollouts"]) for call in calls)
        rollouts = Rollouts(
            examples=list(examples),
            group=np.repeat(np.arange(len(examples), dtype=np.int32), samples),
            responses=[np.array([20 + 10 * draw + n], np.int32) for n in range(count)],
            sampler_logprobs=[np.array([-1.0], np.float32)] * count,
            texts=[f"{role} {n}" for n in range(count)],
            finish_reasons=["stop"] * count,
            rewards=np.arange(1, count + 1, dtype=np.float32) + start,
        )
        calls.append({"role": role, "temperature": temperature, "draw": draw, "rollouts": rollouts})
        return rollouts

    return generate


def episode_context(calls, **algorithm):
    config = host_config("ippo", samples=2, batch=2, training={"mini_batch_size": 2}, **algorithm)
    return FakeContext(config, generate=fake_generate(calls), memory={"kl_coef": 0.0})


def make_examples():
    return [Example(f"{row}@0", "p", np.array(ids, np.int32), row=row) for row, ids in enumerate(PROMPTS)]


def test_an_agent_reads_what_was_written_before_it():
    """Three agents: the prompt, the answers, and the prompt again before each. Caught: another sample's answer; the
    first prompt repeated with all that follows it; two samples of each reader; readers that can't be told apart."""
    calls = []
    context = episode_context(calls, agents=3)
    rollouts = ippo.collect(context, make_examples())
    assert [call["role"] for call in calls] == ["policy", "policy_1", "policy_2"]
    assert [call["draw"] for call in calls] == [0, 1, 2]
    assert [len(turn) for turn in rollouts.turns] == [4, 4, 4]
    second, third = (turn.examples for turn in rollouts.turns[1:])
    assert [one.prompt_ids.tolist() for one in second] == [[5, 6, 20, 5, 6], [5, 6, 21, 5, 6], [7, 22, 7], [7, 23, 7]]
    assert third[1].prompt_ids.tolist() == [5, 6, 21, 5, 6, 31, 5, 6]
    assert len({(one.row, one.epoch, one.sample) for one in third}) == 4
    assert rollouts.texts == [f"policy_2 {n}" for n in range(4)]


@pytest.mark.parametrize("shared", ["last", "mean"])
def test_the_reward_is_one_for_all(shared):
    """Caught: an agent's own reward; the sum."""
    calls = []
    rollouts = ippo.collect(episode_context(calls, agents=2, shared_reward=shared), make_examples())
    wanted = [5, 6, 7, 8] if shared == "last" else [3, 4, 5, 6]
    assert [turn.rewards.tolist() for turn in rollouts.turns] == [wanted, wanted]


def test_every_agent_learns_from_its_own_tokens_in_the_same_updates():
    """Mini-batches hold whole prompts of the episode; one update a rollout needs no old log-probs of any agent.

    Caught: an agent trained on another's tokens; one that updates once a sample, or computes old log-probs because
    its readers are more than a mini-batch; metrics that overwrite those of the first agent.
    """
    calls = []
    context = episode_context(calls, agents=2)
    rollouts = ippo.collect(context, make_examples())
    rollouts.turns[1].rewards[3] = NAN  # the episode's
    prepared = ippo.prepare(context, rollouts)
    assert list(prepared) == ["policy", "critic", "policy_1", "critic_1"]
    assert context.asked == ["values of critic", "values of critic_1"]
    for name in ("policy", "policy_1"):
        assert prepared[name].group.tolist() == [0, 0, 1, 1] and prepared[name].old_logprobs is None
        trained = [
            ids[mask].tolist() for ids, mask in zip(prepared[name].tokens, prepared[name].loss_mask, strict=True)
        ]
        first = 20 if name == "policy" else 30
        assert trained == [[first], [first + 1], [first + 2], []]
    assert "critic/return_mean" in prepared["policy"].metrics
    assert set(prepared["policy_1"].metrics) == {f"{metric}_1" for metric in prepared["policy"].metrics}


def test_evaluation_judges_the_last_answer_of_each_prompt():
    """Caught: the groups of the last agent's readers, one a sample, which make pass@k one of 1."""
    calls = []
    rollouts = ippo.answer(episode_context(calls, agents=2), make_examples(), 3, 0.7)
    assert [call["temperature"] for call in calls] == [0.7, 0.7]
    assert [one.uid for one in rollouts.examples] == ["0@0", "1@0"]
    assert rollouts.group.tolist() == [0, 0, 0, 1, 1, 1] and rollouts.texts[0] == "policy_1 0"
    assert rollouts.rewards.tolist() == [7, 8, 9, 10, 11, 12]


def test_metrics_keep_their_ending():
    """Caught: a largest value that is averaged over updates, because its name no longer ends so."""
    assert ippo.metric_name("policy_1", "rollout/logprob_diff_max") == "rollout/logprob_diff_1_max"
    assert ippo.metric_name("critic_12", "loss/value") == "loss/value_12"
    assert ippo.metric_name("critic", "loss/value") == "loss/value"


# --- with the tiny model --------------------------------------------------------------------------------------------


def make_trainer(name="ippo", workdir=None, **changes):
    config = make_config(name, **changes)
    return Trainer(config, workdir, rewards={"longer": longer}, devices=jax.devices()[:1])


def test_one_agent_is_ppo_to_the_bit():
    """Over two steps. Caught: other random numbers; the first agent's metrics under another name."""
    told, params = [], []
    for name, changes in (("ppo", {}), ("ippo", {"algorithm.agents": 1})):
        trainer = make_trainer(name, **changes)
        told.append([trainer.step(next(trainer.data)) for _ in range(2)])
        params.append(jax.device_get(trainer.roles))
        trainer.close()
    jax.tree.map(np.testing.assert_array_equal, *params)
    for (first, rollouts), (second, others) in zip(*told, strict=True):
        assert rollouts.texts == others.texts
        timed = {metric for metric in first if metric.startswith(("perf/", "time/", "compile/", "memory/"))}
        assert {m: v for m, v in first.items() if m not in timed} == {m: v for m, v in second.items() if m not in timed}


def test_nothing_crosses_between_agents(tmp_path):
    """On a fixed episode: another agent's parameters leave an agent's update as it is, bit for bit; every request for
    an answer has random numbers of its own; and what is compiled serves all agents.

    Caught: a critic that all agents read; one policy's log-probs for all; all agents drawing with the same seeds.
    """
    trainer = make_trainer(**{"training.epochs": 2})
    seeds, generate = [], trainer.rollout.engine.generate

    def recorded(params, requests, **arguments):
        seeds.extend(np.asarray(seed).tobytes() for request in requests for seed in request.seeds)
        return generate(params, requests, **arguments)

    trainer.rollout.engine.generate = recorded
    episode = trainer.algorithm.collect(StepContext(trainer, PhaseTimer()), next(trainer.data))
    assert len(seeds) == len(set(seeds)) == 16
    start = jax.device_get({name: trainer.roles[name] for name in trainer.roles})
    for name in ("critic", "critic_1"):  # fresh heads are zero, and every critic would say the same
        params, draw = start[name].params, np.random.default_rng(len(name))
        head = jax.tree.map(lambda leaf: draw.normal(0, 0.1, leaf.shape).astype(leaf.dtype), params["value_head"])  # noqa: B023
        start[name] = dataclasses.replace(start[name], params={**params, "value_head": head})

    def updated(changed):
        for name, state in start.items():
            params = state.params
            if name in changed:
                params = jax.tree.map(lambda leaf: leaf * np.float32(1.01), params)
            trainer.roles[name] = jax.tree.map(
                lambda new, old: jax.device_put(new, old.sharding) if hasattr(old, "sharding") else new,
                dataclasses.replace(state, params=params),
                trainer.roles[name],
            )
        context = StepContext(trainer, PhaseTimer())
        metrics = trainer._learn(dict(trainer.algorithm.prepare(context, episode)), PhaseTimer())
        return {name: params_of(trainer, name) for name in start}, metrics

    plain, metrics = updated(())
    second, _ = updated(("policy_1", "critic_1"))
    first, _ = updated(("policy", "critic"))
    trainer.close()
    for one, other in zip(ippo.names(0), ippo.names(1), strict=True):
        one, other = trainer.models[one], trainer.models[other]
        assert one.update.__wrapped__ is other.update.__wrapped__ and one.update is not other.update
        assert one.values is other.values and one.logprobs is other.logprobs
    assert {"loss/policy", "loss/policy_1", "loss/value_1", "policy_1/grad_norm"} <= metrics.keys()
    for agent, other, changed in ((0, 1, second), (1, 0, first)):
        for name, moved in zip(ippo.names(agent), ippo.names(other), strict=True):
            assert same(changed[name], plain[name]) and not same(changed[moved], plain[moved])


def test_a_saved_run_is_evaluated_with_all_its_agents(tmp_path):
    """And each of them can be exported. Caught: a reader that has the first agent alone, and stops at the second; the
    first agent written for the second."""
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "3+4=", "answer": "7"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data.eval": str(tmp_path / "rows.jsonl"), "rewards": {"longer": {}}}
    changes |= {"num_steps": 1, "checkpoint.save_final": True}
    given = {"rewards": {"longer": longer}, "devices": jax.devices()[:1]}
    trainer = Trainer(make_config("ippo", **changes), tmp_path / "run", **given)
    trainer.train()
    expected = trainer.evaluate()
    trainer.rollout.close()  # the rest was closed by `train`
    reader = Trainer(make_config("ippo", **changes), tmp_path / "run", read_only=True, **given)
    reader.restore()
    assert sorted(reader.roles) == ["policy", "policy_1"]
    assert not same(params_of(trainer, "policy"), params_of(trainer, "policy_1"))
    assert reader.evaluate() == expected
    jax.tree.map(
        np.testing.assert_array_equal, *[jax.device_get(one.roles["policy_1"].params) for one in (reader, trainer)]
    )
    for role in ("policy", "policy_1"):
        reader.export(tmp_path / role, role=role)
        written = jax.device_get(load_model(tmp_path / role)[1])
        assert same(written, {name: value for name, value in params_of(trainer, role).items() if name in written})
    with pytest.raises(UserError, match=r"role = 'critic_1': a run of ippo can export policy, policy_1\."):
        reader.export(tmp_path / "critic", role="critic_1")
    reader.close()


def test_the_decoder_is_compared_with_every_agent():
    """Caught: a second agent whose samples are of another policy, unnoticed."""
    trainer = make_trainer()
    fine = {"rollout/logprob_diff_mean": 0.0, "rollout/logprob_diff_max": 0.0}
    assert not trainer._problem({**fine, "rollout/logprob_diff_mean_1": 0.0, "rollout/logprob_diff_1_max": 1e-3})
    assert "logprob_diff_mean_1 is 1" in trainer._problem({**fine, "rollout/logprob_diff_mean_1": 1.0})
    assert "logprob_diff_1_max is 1" in trainer._problem({**fine, "rollout/logprob_diff_1_max": 1.0})
    trainer.close()


def test_an_adaptive_penalty_of_several_agents_is_refused():
    """Its one weight would follow the first agent's KL. Caught: the check taken out."""
    config = configs.default_config("ippo").to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["rewards"] = {"exact": {"function": "exact_match"}}
    config["algorithm"].update(kl_controller="adaptive", kl_in="reward", kl_coef=0.1, kl_horizon=10_000)
    with pytest.raises(UserError, match="which the first agent's KL would steer for all"):
        configs.resolve(config)
