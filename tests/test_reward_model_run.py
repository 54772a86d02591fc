"""From pairs to a reward: a model is trained, exported, and scores another run's answers as it was trained to."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm import roles
from jaxrl_llm.algorithms import pairs
from jaxrl_llm.algorithms.reward_model import REWARD_MODEL_TRAINING
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.observability.timing import PhaseTimer
from jaxrl_llm.rewards.model_scorer import ModelScorer
from jaxrl_llm.trainer import StepContext, Trainer
from tests.test_trainer import exact, make_config, rows_file

__all__ = ["rows_file"]  # the fixture

PAIRS = [(f"{a}+{b}=", str(a + b), str(a + b + 1)) for a in range(3, 7) for b in (4, 8)]


def start(config, workdir=None, devices=1):
    rewards = {"exact": exact} if config.rewards else None
    return Trainer(config, workdir, rewards=rewards, devices=jax.devices()[:devices])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The exported folder, the metrics of four steps, and the training's own scores of its pairs after three of them,
    which are those that are exported and that the fourth step reads."""
    folder = tmp_path_factory.mktemp("reward_model")
    file = folder / "pairs.jsonl"
    rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in PAIRS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"algorithm.name": "reward_model", "rewards": {}, "optimizer.learning_rate": 1e-2, "num_steps": 4}
    config = make_config(
        file, **changes, train_batch_size=8, **{"training.mini_batch_size": 0, "training.row_tokens": 0}
    )
    trainer = start(config)
    metrics = [trainer.step(next(trainer.data))[0] for _ in range(3)]
    trainer.export(folder / "exported")
    with pytest.raises(UserError, match="scores texts and writes none"):
        trainer.generate(["3+4="])
    context = StepContext(trainer, PhaseTimer())
    rollouts = REWARD_MODEL_TRAINING.collect(context, next(trainer.data))  # all of them
    sequences = pairs.sequences_of_pairs(rollouts, np.arange(len(rollouts)).reshape(-1, 2))
    scores = [float(values[-1]) for values in context.values("reward_model", sequences)]
    prompts = [example.prompt for example in rollouts.examples]
    metrics.append(trainer.step(next(trainer.data))[0])
    trainer.close()
    return folder / "exported", metrics, dict(zip(prompts, zip(scores[::2], scores[1::2], strict=True), strict=True))


def test_an_exported_model_scores_as_it_was_trained(trained):
    """Caught: the score read before the end of sequence; the head left out of the export; a loss that pushes the wrong
    way."""
    folder, metrics, scores = trained
    assert metrics[-1]["loss/total"] < metrics[0]["loss/total"] == pytest.approx(np.log(2), abs=1e-6)
    margin = np.mean([chosen - rejected for chosen, rejected in scores.values()])
    assert margin > 0.01 and metrics[-1]["rewards/margins"] == pytest.approx(margin, abs=1e-5)
    scorer = ModelScorer(folder, max_tokens=16)
    for place in (1, 2):
        found = scorer.score([pair[0] for pair in PAIRS], [pair[place] for pair in PAIRS])
        expected = [scores[pair[0]][place - 1] for pair in PAIRS]
        assert np.std(expected) > 1e-3
        np.testing.assert_allclose(found, expected, atol=1e-5)  # float32 sums in another order


def test_transformers_gives_the_same_scores_of_texts_that_end(trained):
    """Caught: a padding token in the folder that is the end of sequence, which transformers would skip."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, _, scores = trained
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, chosen, _ in PAIRS[:3]:
        ids = tokenizer(prompt + chosen).input_ids
        ids = ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
        with torch.no_grad():
            found = model(input_ids=torch.tensor([ids])).logits[0, 0].item()
        assert found == pytest.approx(scores[prompt][0], abs=1e-5)


def test_it_is_a_reward_alone_and_beside_functions(trained, rows_file, monkeypatch):
    """One step of GRPO; and scores alone, by a model on a block of its own, which splits it. Caught: a weight left out;
    a score that replaces the functions'; prompts and answers in another order; a model whose scores all failed taken
    for zeros; a model beside the policy in place of its block."""
    folder, _, _ = trained
    model = {"reward_model.path": str(folder), "reward_model.max_tokens": 16, "reward_model.weight": 0.5}
    shared = {**model, "training.mini_batch_size": 2, "num_steps": 1}
    trainer = start(make_config(rows_file, **shared))
    metrics, rollouts = trainer.step(next(trainer.data))
    prompts = [rollouts.examples[index].prompt for index in rollouts.group]
    expected = ModelScorer(folder, max_tokens=16).score(prompts, rollouts.texts)
    np.testing.assert_allclose(rollouts.components["reward_model"], expected, atol=1e-5)
    assert metrics["reward/reward_model/mean"] == pytest.approx(expected.mean(), abs=1e-5)
    assert metrics["reward_model/failures"] == 0
    np.testing.assert_allclose(rollouts.rewards, rollouts.components["exact"] + 0.5 * expected, atol=1e-5)
    trainer.close()

    alone = start(make_config(rows_file, **shared, rewards={}, **{"placement.reward_model.tensor": 2}), devices=3)
    assert alone.config.eval.accuracy_reward == ""
    placed = {device.id for leaf in jax.tree.leaves(alone.rollout.reward_model._params) for device in leaf.devices()}
    assert placed == {1, 2}
    result = alone.rollout._score(rollouts.examples, ["1"] * len(rollouts.examples))
    expected = ModelScorer(folder, max_tokens=16).score(
        [e.prompt for e in rollouts.examples], ["1"] * len(rollouts.examples)
    )
    np.testing.assert_allclose(result.components["reward_model"], expected, atol=1e-5)
    np.testing.assert_allclose(result.total, 0.5 * result.components["reward_model"], rtol=1e-6)
    nothing = np.full(len(rollouts.examples), np.nan, np.float32)
    monkeypatch.setattr(alone.rollout.reward_model, "score", lambda *_: nothing)
    with pytest.raises(RunStopped, match="gave no finite score for any of the 2 samples"):
        alone.rollout._score(rollouts.examples, ["1"] * len(rollouts.examples))
    alone.close()


def test_a_model_that_gives_no_score_is_refused_before_training(rows_file):
    with pytest.raises(UserError, match="can't score a text"):
        start(make_config(rows_file, **{"reward_model.path": "builtin:tiny_addition", "reward_model.max_tokens": 16}))
    with pytest.raises(UserError, match="rewards has one called 'reward_model'"):
        make_config(rows_file, **{"reward_model.path": "x", "rewards": {"reward_model": {}}})


def test_a_resumed_run_keeps_the_reference_that_it_began_with(rows_file, tmp_path):
    """Caught: the newest checkpoint of the other run again, where that has gone on."""
    other = start(make_config(rows_file, num_steps=2), tmp_path / "other")
    for done in (1, 2):
        norm = other.roles["policy"].params["final_norm"]
        other.roles["policy"].params["final_norm"] = jax.tree.map(lambda leaf: leaf + 0.5, norm)
        other.step_index = done
        other.save({})
        if done == 1:
            other.checkpoints.wait()
            config = make_config(
                rows_file, **{"algorithm.kl_coef": 0.1, "reference.path": str(tmp_path / "other"), "num_steps": 2}
            )
            first = start(config, tmp_path / "run")
            reference = jax.device_get(first.roles["reference"].params)
            first.step_index = 1
            first.save({})
            first.close()
    other.close()
    resumed = start(config, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.roles["reference"].params), reference)
    resumed.close()
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "1")
    with pytest.raises(UserError, match=r"reference\.path.*checkpoint after step 1, which this run has read"):
        start(config, tmp_path / "run")


def test_a_critic_starts_from_a_classifier_and_a_reference_from_an_earlier_run(
    trained, rows_file, tmp_path, monkeypatch
):
    """Caught: a new head in place of the classifier's; the policy's start in place of the checkpoint; a critic with
    another vocabulary."""
    folder, _, _ = trained
    first = start(make_config(rows_file, num_steps=1), tmp_path / "first")
    params = first.roles["policy"].params
    first.roles["policy"].params["final_norm"] = jax.tree.map(lambda leaf: leaf + 0.5, params["final_norm"])
    first.step_index = 1
    first.save({})
    first.close()
    changes = {"algorithm.name": "ppo", "algorithm.kl_coef": 0.1, "critic.path": str(folder)}
    trainer = start(make_config(rows_file, **changes, **{"reference.path": str(tmp_path / "first")}))
    reference = trainer.roles["reference"].params
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(reference), jax.device_get(first.roles["policy"].params))
    assert np.asarray(trainer.roles["critic"].params["value_head"]["weight"]).any()
    trainer.close()
    config = dataclasses.replace(trainer.decoder.config, vocab_size=17, padded_vocab_size=24)
    larger = dataclasses.replace(trainer.decoder, config=config)
    with monkeypatch.context() as patched:
        patched.setattr(roles, "load_classifier", lambda *_, **__: (larger, {}))
        with pytest.raises(UserError, match=r"critic\.path = .* has 17 vocabulary rows and the policy 16"):
            start(make_config(rows_file, **changes))
    lora = make_config(rows_file, **{"model.lora_rank": 2, "checkpoint.every_steps": 0})
    adapters = start(lora, tmp_path / "adapters")
    adapters.step_index = 1
    adapters.save({})
    adapters.close()
    with pytest.raises(UserError, match="of a run with adapters"):
        start(make_config(rows_file, **{"algorithm.kl_coef": 0.1, "reference.path": str(tmp_path / "adapters")}))
