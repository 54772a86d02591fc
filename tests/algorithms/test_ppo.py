"""PPO's critic: which state a value is of, what it learns, and what is kept between steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm import optimizer, packing, update
from jaxrl_llm.algorithms import ppo
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.value_head import token_values
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.trainer import StepContext, Trainer
from jaxrl_llm.types import Rollouts
from tests.algorithms.fake_context import FakeContext
from tests.algorithms.fake_context import make_config as host_config


def longer(completion):
    return float(len(completion)) + sum(map(ord, completion)) % 3


def make_config(name="ppo", **changes):
    config = configs.default_config(name).to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["data"].update(train="builtin:addition/train", max_prompt_tokens=8)
    config["rewards"] = {"longer": {}}
    config.update(num_steps=4, train_batch_size=2)
    config["rollout"].update(samples_per_prompt=4, max_new_tokens=4, num_slots=8)
    config["training"].update(row_tokens=32, micro_batch_tokens=64)
    config["optimizer"].update(learning_rate=1e-3)
    config["critic"]["optimizer"].update(learning_rate=1e-2)
    config["checkpoint"].update(every_steps=0, save_final=False)
    config["mesh"].update(fsdp=1)
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        section[last] = value
    return configs.resolve(config)


def make_trainer(workdir=None, **changes):
    return Trainer(make_config(**changes), workdir, rewards={"longer": longer}, devices=jax.devices()[:1])


def params_of(trainer, role):
    return jax.device_get(trainer.roles[role].params)


def same(first, second):
    return jax.tree.all(jax.tree.map(np.array_equal, first, second))


def fixed_rollouts(trainer) -> Rollouts:
    """Four answers to each of two prompts, whose reward is the prompt's; some finished, some cut."""
    examples = trainer.examples(["1+2=", "31+4="])
    generator = np.random.default_rng(0)
    responses = [generator.integers(4, 14, length).astype(np.int32) for length in (3, 2, 4, 1, 2, 3, 4, 2)]
    return Rollouts(
        examples=examples,
        group=np.repeat(np.arange(2, dtype=np.int32), 4),
        responses=responses,
        sampler_logprobs=[np.full(len(ids), -1.0, np.float32) for ids in responses],
        texts=[""] * 8,
        finish_reasons=["stop"] * 8,
        rewards=np.repeat(np.array([1.0, -1.0], np.float32), 4),
    )


@pytest.fixture(scope="module")
def trainer():
    made = make_trainer()
    yield made
    made.close()


def test_a_value_is_that_of_the_state_its_token_was_chosen_in(trainer):
    """Prompts shared in packed rows, against one forward pass of each sequence alone; in the values that the
    advantages read as in those that the critic's loss reads.

    Caught: the value of the token's own column; the value of the column before, which at a completion that shares its
    prompt is another completion's last; the value after the token in the loss.
    """
    rollouts = fixed_rollouts(trainer)
    model = trainer.models["critic"]
    head = jnp.asarray(np.random.default_rng(1).normal(size=params_of(trainer, "critic")["value_head"]["weight"].shape))
    state = trainer.roles["critic"]
    params = {**state.params, "value_head": {"weight": head.astype(jnp.float32)}}
    trainer.roles["critic"] = update.RoleState(params, state.opt_state)
    sequences = ppo.on_policy.trained_sequences(rollouts, np.ones(8, bool))
    try:
        got = StepContext(trainer, PhaseTimer()).values("critic", sequences)
        batch, placement = trainer._pack(sequences)
        outputs = [
            jax.jit(model.forward.outputs)(params, jax.tree.map(lambda field, m=m: jnp.asarray(field[m]), batch.rows))
            for m in range(batch.num_micro_batches)
        ]
    finally:
        trainer.roles["critic"] = state
    before = packing.unpack(
        np.stack([one.values for one in outputs]), placement, [len(ids) for ids in sequences.tokens]
    )
    shared = {(int(row), one.start) for row, one in zip(placement.row, placement.prompt, strict=True) if one.stop}
    assert len(shared) < 8  # prompts stand once for several

    @jax.jit
    def alone(tokens):
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return token_values(params, model.decoder.hidden(params, tokens, place, jnp.ones_like(tokens)))

    for n, ids in enumerate(sequences.tokens):
        after = np.asarray(alone(jnp.asarray(np.pad(ids, (0, 12 - len(ids))))[None]))[0, : len(ids)]
        start = len(ids) - len(rollouts.responses[n])
        np.testing.assert_allclose(got[n][start:], after[start - 1 :], atol=1e-4)  # float32 sums in another order
        np.testing.assert_allclose(before[n][start:], after[start - 1 : -1], atol=1e-4)


@pytest.mark.parametrize("goes_on", [True, False])
def test_only_a_response_that_was_cut_goes_on(trainer, goes_on):
    """Caught: a bootstrap of 0 for one that was cut; a value for one that ended; the value of the wrong state; the
    option that takes it for finished not read."""
    config = host_config("ppo", whiten_advantages=False, bootstrap_truncated=goes_on)

    class Known(FakeContext):
        def values(self, role, sequences):  # of the state before token t: t
            return [np.arange(len(ids) + 1, dtype=np.float32) for ids in sequences.tokens]

    rollouts = fixed_rollouts(trainer)
    rollouts.finish_reasons[0] = "length"
    sequences = ppo.prepare(Known(config), rollouts)["policy"]
    for n, ids in enumerate(rollouts.responses):
        length = len(sequences.tokens[n])
        state = np.arange(length - len(ids), length)
        goal = rollouts.rewards[n] + (length if n == 0 and goes_on else 0)
        np.testing.assert_allclose(sequences.extras["returns"][n][-len(ids) :], goal)
        np.testing.assert_allclose(sequences.advantages[n][-len(ids) :], goal - state)


def test_the_critic_learns_alone_in_its_first_steps(monkeypatch):
    """Bit for bit; each role's schedule is as long as its own updates. Caught: a policy that is updated too; a
    policy's schedule of the whole run, whose decay its updates never end; a critic's that is shorter."""
    lengths, make = {}, optimizer.make_optimizer

    def recorded(settings, updates):
        lengths[type(settings)] = updates
        return make(settings, updates)

    monkeypatch.setattr(optimizer, "make_optimizer", recorded)
    warm = make_trainer(**{"critic.warmup_steps": 1, "training.epochs": 2, "num_steps": 2})
    assert lengths == {configs.OptimizerConfig: 2, configs.CriticOptimizerConfig: 4}
    policy, critic = params_of(warm, "policy"), params_of(warm, "critic")
    metrics, _ = warm.step(next(warm.data))
    assert same(params_of(warm, "policy"), policy) and not same(params_of(warm, "critic"), critic)
    assert int(warm.roles["policy"].opt_state[0].count) == 0
    assert "loss/value" in metrics and "loss/policy" not in metrics
    metrics, _ = warm.step(next(warm.data))
    warm.close()
    assert not same(params_of(warm, "policy"), policy)
    assert "loss/value" in metrics and metrics["policy/ratio_mean"] != 1.0
    counts = {name: int(warm.roles[name].opt_state[0].count) for name in warm.roles}
    assert counts == {"policy": lengths[configs.OptimizerConfig], "critic": lengths[configs.CriticOptimizerConfig]}


def test_the_critic_comes_to_explain_the_returns(trainer):
    """On fixed rollouts whose return is told by the prompt. A head that starts at 0 explains nothing.

    Caught: a loss of the wrong sign.
    """
    rollouts = fixed_rollouts(trainer)
    state = trainer.roles["critic"]
    trainer.roles["critic"] = jax.tree.map(jnp.copy, state)  # the update takes its buffers
    context, explained = StepContext(trainer, PhaseTimer()), []
    for _ in range(13):
        sequences = ppo.prepare(context, rollouts)["critic"]
        explained.append(sequences.metrics["critic/explained_variance"])
        trainer._learn({"critic": sequences}, PhaseTimer())
    trainer.roles["critic"] = state
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert explained[-1] > 0.5, explained


def test_the_adaptive_weight_is_kept_with_the_run(tmp_path):
    """The first KL is 0, below its target, so the weight falls by the most it may. Caught: a controller that is not
    called; a weight that starts again with a resumed run, or that the next step does not use."""
    changes = {
        "algorithm.kl_coef": 0.5,
        "algorithm.kl_in": "reward",
        "algorithm.kl_controller": "adaptive",
        "algorithm.kl_horizon": 100,
        "checkpoint.every_steps": 1,
    }
    first = make_trainer(tmp_path / "run", **changes)
    assert first.memory == {"kl_coef": 0.5}
    metrics, _ = first.step(next(first.data))
    assert metrics["kl/coef"] == 0.5 and metrics["kl/mean"] == pytest.approx(0.0, abs=1e-6)
    expected = 0.5 * (1 - 0.2 * 8 / 100)
    assert first.memory["kl_coef"] == pytest.approx(expected)
    first.save(metrics)
    first.close()
    second = make_trainer(tmp_path / "run", **changes)
    assert second.restore() and second.memory == first.memory
    metrics, _ = second.step(next(second.data))
    second.close()
    assert metrics["kl/coef"] == pytest.approx(expected)


def test_a_shared_trunk_learns_both(tmp_path):
    """One role with a value head, which generates and is exported; where its log-probs are read, the values come from
    the same pass.

    Caught: a head without a gradient; a critic made all the same; another pass for the values; log-probs in their
    place; values of other parameters, or of other tokens than are asked for.
    """
    shared = make_trainer(**{"algorithm.shared_trunk": True})
    assert list(shared.roles) == ["policy"]
    before = params_of(shared, "policy")
    assert not before["value_head"]["weight"].any()
    metrics, _ = shared.step(next(shared.data))
    after = params_of(shared, "policy")
    sequences = ppo.on_policy.trained_sequences(fixed_rollouts(shared), np.arange(8) != 3)
    fewer = dataclasses.replace(sequences, loss_mask=[mask & (n != 5) for n, mask in enumerate(sequences.loss_mask)])
    passes, per_token, context = [], shared.per_token, StepContext(shared, PhaseTimer())
    shared.per_token = lambda *arguments: passes.append(arguments[2]) or per_token(*arguments)
    logprobs = context.logprobs("policy", sequences)
    for asked, kinds in ((sequences, ["both"]), (sequences, ["values"]), (fewer, ["both", "values"])):
        if asked is fewer:
            context.logprobs("policy", sequences)
        values = context.values("policy", asked)
        assert passes == kinds
        passes.clear()
        for one, expected in zip(values, per_token("policy", asked, "values"), strict=True):
            np.testing.assert_allclose(one[1:], expected, atol=1e-5)  # float32 sums in another order
    for one, expected in zip(logprobs, per_token("policy", sequences, "logprobs"), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)
    context.logprobs("policy", sequences)
    shared.roles["policy"] = dataclasses.replace(shared.roles["policy"], params=dict(shared.roles["policy"].params))
    context.values("policy", sequences)
    assert passes == ["both", "values"]
    shared.close()
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), after, before)
    assert min(jax.tree.leaves(moved)) > 0
    expected = metrics["loss/policy"] + shared.options.value_coef * metrics["loss/value"]
    assert metrics["loss/total"] == pytest.approx(expected, rel=1e-5)
    shared.export(tmp_path / "model")
    again = make_config("grpo", **{"model.path": str(tmp_path / "model")})
    loaded = Trainer(again, None, rewards={"longer": longer}, devices=jax.devices()[:1])
    loaded.close()
    np.testing.assert_array_equal(params_of(loaded, "policy")["embed"]["weight"], after["embed"]["weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.kl_controller": "adaptive"}, "steers a KL in the reward"),
        (
            {
                "algorithm.kl_controller": "adaptive",
                "algorithm.kl_coef": 0.1,
                "algorithm.kl_in": "reward",
                "algorithm.kl_horizon": 1,
            },
            "kl_horizon=1 is too short for 8 samples",
        ),
        ({"algorithm.shared_trunk": True, "critic.warmup_steps": 3}, "makes no critic of its own"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, message):
    """Caught: each of the checks taken out."""
    with pytest.raises(UserError, match=message):
        make_config(**changes)


def test_sequences_are_shared_by_policy_and_critic(trainer):
    """Caught: a batch packed and sent twice, for each role."""
    prepared = ppo.prepare(StepContext(trainer, PhaseTimer()), fixed_rollouts(trainer))
    assert isinstance(prepared["policy"], Sequences) and prepared["policy"] is prepared["critic"]
