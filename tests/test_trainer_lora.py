"""Runs with adapters: the base stays what it is and is shared; everything else is as without them."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm.models.arrangement import merge_trees, split_adapters
from jaxrl_llm.models.loading import load_model
from jaxrl_llm.trainer import Trainer
from tests.test_trainer import exact, make_config, rows_file

__all__ = ["rows_file"]  # the fixture

LORA = {
    "model.lora_rank": 4,
    "num_steps": 2,
    "training.mini_batch_size": 2,
    "optimizer.learning_rate": 1e-2,
    "optimizer.warmup_steps": 0,
    "checkpoint.every_steps": 1,
}


def leaves(tree):
    return jax.tree.leaves(tree)


def start(config, workdir=None):
    return Trainer(config, workdir, rewards={"exact": exact}, devices=jax.devices()[:1])


def test_a_run_trains_keeps_and_exports_adapters(rows_file, tmp_path):
    """Two steps of GRPO with a KL. Caught: a copy of the base for the reference; a base that is donated, or trained; a
    reference with the policy's adapters (KL of 0 in the second step); all of the model moved to the decoder again; the
    base, or the frozen reference, saved; adapters that start again; an export of the base."""
    trainer = start(make_config(rows_file, **LORA, **{"algorithm.kl_coef": 0.1}), tmp_path / "run")
    policy, reference = trainer.roles["policy"], trainer.roles["reference"]
    base, bits = leaves(policy.base), jax.device_get(policy.base)
    assert all(one is other for one, other in zip(base, leaves(reference.params), strict=True))
    assert not split_adapters(policy.base)[1] and not leaves(split_adapters(policy.params)[0])
    assert {leaf.dtype.name for leaf in leaves(policy.params)} == {"float32"}

    first, _ = trainer.step(next(trainer.data))
    trainer.save(first)
    assert abs(first["kl/mean"]) < 1e-9 and first["rollout/logprob_diff_max"] < 1e-4
    moved = trainer.rollout.hybrid_engine.last
    second, _ = trainer.step(next(trainer.data))
    assert second["kl/mean"] > 1e-6 and second["rollout/logprob_diff_max"] < 1e-4
    again = trainer.rollout.hybrid_engine.last
    assert 0 < again.copied_bytes < moved.copied_bytes / 4
    assert 0 <= again.moved_bytes == moved.moved_bytes == 0  # one device

    assert all(one is other for one, other in zip(base, leaves(trainer.roles["policy"].base), strict=True))
    jax.tree.map(np.testing.assert_array_equal, bits, jax.device_get(trainer.roles["policy"].base))
    assert all(np.asarray(leaf).any() for leaf in leaves(trainer.roles["policy"].params))

    # A checkpoint holds what is trained, and a run that goes on from it does the second step again, bit for bit.
    trainer.checkpoints.wait()
    state = ocp.StandardCheckpointer().metadata(tmp_path / "run" / "checkpoints" / "1" / "state").item_metadata
    assert set(state) == {"policy"}
    saved = jax.tree.map(lambda leaf: tuple(leaf.shape), dict(state["policy"]["params"]))
    assert saved == jax.tree.map(lambda leaf: leaf.shape, trainer.roles["policy"].params)
    trainer.close()
    resumed = start(trainer.config, tmp_path / "run")
    assert resumed.restore()
    resumed.step(next(resumed.data))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.roles), jax.device_get(resumed.roles))
    resumed.close()

    # What is exported computes the same as base and adapters apart.
    trainer.export(tmp_path / "exported")
    plain, folded = load_model(tmp_path / "exported")
    tokens = jnp.asarray([[1, 5, 9, 3, 12, 7]])
    positions = jnp.arange(6)[None]
    logits = []
    for decoder, params in ((trainer.decoder, trainer.roles["policy"].whole), (plain, folded)):
        hidden = jax.jit(decoder.hidden)(params, tokens, positions, jnp.ones_like(positions))
        logits.append(np.asarray(decoder.logits(params, hidden))[..., : plain.config.vocab_size])
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-4)  # float32; logits of size 10
    without = jax.jit(plain.hidden)(trainer.roles["policy"].base, tokens, positions, jnp.ones_like(positions))
    before = np.asarray(plain.logits(trainer.roles["policy"].base, without))[..., : plain.config.vocab_size]
    assert np.abs(before - logits[0]).max() > 0.01


def test_each_agent_has_adapters_and_a_critic_of_its_own_on_one_base(rows_file):
    """Two agents of IPPO: PPO's roles, twice.

    Caught: a base of its own for the critic; a value head that is left out of what is trained; equal adapters; the
    second agent's answers by the first one's adapters.
    """
    changes = {name: value for name, value in LORA.items() if name != "checkpoint.every_steps"}
    changes |= {"critic.optimizer.learning_rate": 1e-2, "training.row_tokens": 32, "algorithm.shared_reward": "mean"}
    trainer = start(make_config(rows_file, **{"algorithm.name": "ippo"}, **changes))
    names = ["policy", "critic", "policy_1", "critic_1"]
    assert sorted(trainer.roles) == sorted(names)
    base = trainer.roles["policy"].base
    bits = jax.device_get(base)
    assert "lm_head" not in trainer.roles["critic"].base
    for name in names:
        own = trainer.roles[name]
        assert all(one is other for one, other in zip(leaves(own.base), leaves(base), strict=True)), name
        assert set(own.params) == ({"blocks"} if "policy" in name else {"blocks", "value_head"})
        for other in names[: names.index(name)]:
            blocks = (leaves(one.params["blocks"]) for one in (own, trainer.roles[other]))
            assert any(np.asarray(a != b).any() for a, b in zip(*blocks, strict=True)), (name, other)
    for _ in range(2):
        metrics, _ = trainer.step(next(trainer.data))
        assert max(metrics["rollout/logprob_diff_max"], metrics["rollout/logprob_diff_1_max"]) < 1e-4
    for name in names:
        assert all(np.asarray(leaf).any() for leaf in leaves(trainer.roles[name].params)), name
    jax.tree.map(np.testing.assert_array_equal, bits, jax.device_get(trainer.roles["critic_1"].base))
    trainer.close()


def test_what_is_trained_is_float32_and_the_base_is_not(rows_file):
    """In bfloat16. Caught: a value head in the dtype of the base; a base in float32."""
    config = make_config(rows_file, **LORA, **{"algorithm.name": "ppo", "dtype": "bfloat16"})
    trainer = start(config)
    for name in ("policy", "critic"):
        state = trainer.roles[name]
        assert {leaf.dtype.name for leaf in leaves(state.params)} == {"float32"}
        assert {leaf.dtype.name for leaf in leaves(state.base)} == {"bfloat16"}
    merged = merge_trees(trainer.roles["critic"].base, trainer.roles["critic"].params)
    assert set(merged) == {*trainer.roles["critic"].base, "value_head"}
    trainer.close()
