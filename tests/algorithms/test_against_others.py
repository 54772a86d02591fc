"""Losses, margins and gradients against TRL's trainers on one batch of a tiny model, and GRPO's loss against TRL's and
against the formulas of verl's core algorithms.

TRL's numbers are kept in `tests/reference/trl_numbers.json`; where trl is installed they are made again.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm import config as configs
from jaxrl_llm import optimizer, packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.loading import load_model
from jaxrl_llm.sharding import TRAINING, make_mesh
from jaxrl_llm.types import Example, Rollouts, TokenOutputs
from tests.algorithms.compared_rows import make_config
from tests.packed_rows import finite_differences
from tests.reference import trl_numbers as reference

SCRIPT = pathlib.Path(reference.__file__)
STORED = json.loads(SCRIPT.with_suffix(".json").read_text(encoding="utf-8"))
SHAPE = packing.RowShape(24, 2)


class Models:
    """The policy and the reference of the tiny model, and what an algorithm asks of them."""

    def __init__(self, folder, config):
        self.mesh = make_mesh(configs.MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1), jax.devices()[:1])
        self.params = {}
        for role in ("policy", "reference"):
            path = reference.write_model(folder / role, role)
            self.decoder, self.params[role] = load_model(path, mesh=self.mesh, layout=TRAINING)
        self.forward = update.Forward(self.decoder, temperature=1.0, dtype=np.float32, remat="none", chunk_tokens=8)
        self.config, self.options, self.step, self.memory = config, config.algorithm.options, 0, {}

    def rollouts(self, examples, **_):
        raise AssertionError("what is given needs no sampling")

    more_examples = values = rollouts

    def pack(self, sequences):
        algorithm = ALGORITHMS[self.config.algorithm.name]
        return packing.pack(
            sequences,
            SHAPE,
            aggregation=algorithm.loss_aggregation(self.options),
            max_response_tokens=8,
            max_micro_batches=4,
        )

    def logprobs(self, role, sequences):
        batch, placement = self.pack(dataclasses.replace(sequences, extras={}, partner=None))
        program = update.make_logprobs(self.forward, self.mesh)
        values = program(self.params[role], update.put_rows(batch, self.mesh), jnp.int32(batch.num_micro_batches))
        return packing.unpack(np.asarray(values), placement, [len(ids) for ids in sequences.tokens])

    def step_of_rate_one(self, sequences, folder):
        """Metrics and the gradient by Hugging Face names: what plain gradient descent takes off the parameters."""
        before = jax.device_get(self.params["policy"])
        sgd = optimizer.make_optimizer(configs.OptimizerConfig(name="sgd", learning_rate=1.0), 1)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.params["policy"])
        role, shardings = update.init_role(self.params["policy"], sgd, shardings, self.mesh)
        algorithm = ALGORITHMS[self.config.algorithm.name]
        program = update.make_update(self.forward, algorithm, self.options, sgd, 0.0, shardings, self.mesh)
        batch, _ = self.pack(sequences)
        counts = jnp.int32(batch.num_micro_batches), jnp.float32(batch.denominator)
        role, metrics = program(role, update.put_rows(batch, self.mesh), *counts, old_is_actor=False)
        gradient = jax.tree.map(lambda old, new: jnp.asarray(old - np.asarray(new)), before, role.params)
        export_model(folder / "gradient", self.decoder, gradient, None)
        tensors = safetensors.numpy.load_file(folder / "gradient" / "model.safetensors")
        return {name: float(value) for name, value in metrics.items()}, tensors


def examples(**fields):
    """One for each prompt of the reference's batch; `fields` has a list for each."""
    arrays = {name: [np.array(one, np.int32) for one in fields[name]] for name in fields if name.endswith("_ids")}
    return [
        Example(
            f"{n}@0",
            "",
            np.array(prompt, np.int32),
            row=n,
            **{name: values[n] for name, values in {**fields, **arrays}.items()},
        )
        for n, prompt in enumerate(reference.PROMPTS)
    ]


def compare(name, options, rows, expected, folder):
    models = Models(folder, make_config(name, {"train_batch_size": len(rows)}, **options))
    algorithm = ALGORITHMS[name]
    sequences = algorithm.prepare(models, algorithm.collect(models, rows))
    metrics, gradient = models.step_of_rate_one(sequences, folder)
    assert metrics["loss/total"] == pytest.approx(expected["loss"], abs=1e-5)
    for metric, value in expected["metrics"].items():
        assert {**metrics, **sequences.metrics}[metric] == pytest.approx(value, abs=1e-5), metric
    size = np.sqrt(sum(norm**2 for norm, _ in expected["gradient"].values()))
    assert size > 0.1
    for tensor, numbers in reference.summary(gradient).items():
        # float32, summed in another order; relative to the whole gradient
        np.testing.assert_allclose(numbers, expected["gradient"][tensor], rtol=0, atol=1e-5 * size, err_msg=tensor)


@pytest.mark.parametrize("loss_type", reference.DPO)
def test_dpo_is_trls_on_a_tiny_model(loss_type, tmp_path):
    """Caught: the pair turned round; beta or the division by ``1 - 2 e`` left out; sums for IPO; the prompt trained."""
    rows = examples(response_ids=reference.CHOSEN, rejected_ids=reference.REJECTED)
    expected = STORED["dpo"][loss_type]
    if loss_type == "ipo":
        # TRL trains on token means and tells rewards of sums; here both are of means.
        expected = {**expected, "metrics": {}}
    compare("dpo", reference.DPO[loss_type], rows, expected, tmp_path)


def test_kto_is_trls_on_a_tiny_model(tmp_path):
    """Caught: the point of the rows' own completions, or none; the weights exchanged; EOS not trained."""
    rows = examples(response_ids=reference.COMPLETIONS, label=reference.LABELS)
    expected = STORED["kto"]
    metrics = {name: expected["metrics"][name] for name in ("rewards/chosen", "rewards/rejected")}
    metrics["kl/reference_point"] = expected["metrics"]["kl"]
    assert metrics["kl/reference_point"] > 0.01  # the bound at 0 would hide it
    compare("kto", reference.KTO, rows, {**expected, "metrics": metrics}, tmp_path)


# --- GRPO on fixed arrays -------------------------------------------------------------------------------------------

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def over_packed_rows(options, sequences, actor, aggregation):
    """GRPO's loss over packed rows and its gradient in the policy's log-probs, by sequence."""
    batch, placement = packing.pack(
        dataclasses.replace(sequences, sampler_logprobs=actor),
        packing.RowShape(20, 1),
        aggregation=aggregation,
        max_response_tokens=reference.MOST_TOKENS,
        max_micro_batches=len(actor),
    )
    # The policy's log-probs come in the sampler's place, to be laid into rows like the rest.
    values = jnp.asarray(batch.rows.sampler_logprobs)

    def total(given):
        found = 0.0
        for index in range(batch.num_micro_batches):
            rows = jax.tree.map(lambda field, index=index: jnp.asarray(field[index]), batch.rows)
            found += GRPO.losses(options, TokenOutputs(given[index], jnp.zeros_like(given[index])), rows).total
        return found / batch.denominator

    loss, gradient = jax.value_and_grad(total)(values)
    return float(loss), packing.unpack(np.asarray(gradient), placement, [len(ids) for ids in sequences.tokens])


def sequences_of_responses(advantages):
    """A prompt token and a response each."""

    def after_prompt(values):
        return [np.concatenate([[0.0], one]).astype(np.float32) for one in values]

    masks = [np.arange(length + 1) > 0 for length in reference.LENGTHS]
    return Sequences(
        [np.arange(length + 1, dtype=np.int32) for length in reference.LENGTHS],
        masks,
        np.arange(len(masks), dtype=np.int32),
        advantages=[np.where(mask, one, 0).astype(np.float32) for mask, one in zip(masks, advantages, strict=True)],
        old_logprobs=after_prompt(reference.responses("old")),
        ref_logprobs=after_prompt(reference.responses("ref")),
    ), after_prompt(reference.responses("actor"))


def grpo_options(**changes):
    given = reference.GRPO
    return GRPO.options(
        clip_low=given["epsilon_low"],
        clip_high=given["epsilon_high"],
        dual_clip=given["delta"],
        kl_coef=given["beta"],
        kl_estimator="k3",
        **changes,
    )


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_grpo_is_trls_on_fixed_arrays(loss_type):
    """TRL's `delta` bounds the ratio as the dual clip does. Tokens beyond each of the three bounds are there. Caught:
    no dual clip; the lower bound for both; the KL of the reference from the policy."""
    sequences, actor = sequences_of_responses(reference.ADVANTAGES)
    ratio = np.exp(np.concatenate(actor) - np.concatenate(sequences.old_logprobs))
    sign = np.sign(np.concatenate(sequences.advantages))
    assert ((ratio > 1.28) & (sign > 0)).any() and ((ratio < 0.8) & (sign < 0)).any()
    assert ((ratio > 3.0) & (sign < 0)).any()
    loss, gradient = over_packed_rows(grpo_options(), sequences, actor, AGGREGATIONS[loss_type])
    expected = STORED["grpo"][loss_type]
    assert loss == pytest.approx(expected["loss"], abs=1e-5)
    for found, values in zip(gradient, expected["gradient"], strict=True):
        np.testing.assert_allclose(found, [0.0, *values], rtol=0, atol=1e-6)


REWARDS, GROUP = np.array([1.0, 0.0, 0.3, 0.5, 0.5, -1.0]), np.array([0, 0, 0, 1, 1, 1])


def verl_advantages():
    """Of outcome rewards: minus the group's mean, by its unbiased deviation plus 1e-6."""
    found = np.zeros(len(REWARDS))
    for number in set(GROUP.tolist()):
        scores = REWARDS[number == GROUP]
        found[number == GROUP] = (scores - scores.mean()) / (np.sqrt(np.var(scores, ddof=1)) + 1e-6)
    return found


def verl_loss(actor, aggregation, advantages):
    """Policy loss plus KL loss (``low_var_kl``), each aggregated over padded arrays and a mask, in float64."""
    width = reference.MOST_TOKENS

    def padded(values):
        return np.array([np.pad(np.float64(one), (0, width - len(one))) for one in values])

    mask = padded([np.ones(length) for length in reference.LENGTHS])
    new, old, ref = padded(actor), padded(reference.responses("old")), padded(reference.responses("ref"))
    weight = advantages[:, None]
    ratio = np.exp(np.clip(new - old, -20, 20))
    losses = np.maximum(-weight * ratio, -weight * np.clip(ratio, 0.8, 1.28))
    losses = np.where(weight < 0, np.minimum(losses, -weight * 3.0), losses)
    log_ratio = np.clip(ref - new, -20, 20)
    kl = np.clip(np.exp(log_ratio) - log_ratio - 1, -10, 10)

    def aggregated(values):
        sums, counts = (values * mask).sum(1), mask.sum(1)
        return {
            "token-mean": sums.sum() / counts.sum(),
            "seq-mean-token-sum": sums.mean(),
            "seq-mean-token-mean": (sums / counts).mean(),
            "seq-mean-token-sum-norm": (sums / width).mean(),
        }[aggregation]

    return aggregated(losses) + reference.GRPO["beta"] * aggregated(kl)


def prepared_from_rewards():
    """What GRPO makes of scored samples with these log-probs."""

    class Context:
        config = make_config(
            "grpo",
            {"train_batch_size": 2, "rewards": {"exact": {"function": "exact_match"}},
             "rollout": {"samples_per_prompt": 3, "max_new_tokens": reference.MOST_TOKENS}},
            clip_high=0.28, kl_coef=0.3, on_policy=False,
        )  # fmt: skip
        options, step, memory = config.algorithm.options, 0, {}

        def logprobs(self, role, sequences):
            values = reference.responses({"policy": "old", "reference": "ref"}[role])
            return [np.concatenate([[0.0], one]).astype(np.float32) for one in values]

        def rollouts(self, examples, **_):
            raise AssertionError("the samples are given")

        more_examples = values = rollouts

    samples = Rollouts(
        [Example(f"{n}@0", "", np.array([n], np.int32), row=n) for n in range(2)],
        GROUP.astype(np.int32),
        [np.arange(length, dtype=np.int32) for length in reference.LENGTHS],
        None,
        [""] * 6,
        ["stop"] * 6,
        REWARDS.astype(np.float32),
    )
    return GRPO.prepare(Context(), samples), Context.options


@pytest.mark.parametrize("aggregation", sorted({*AGGREGATIONS.values(), "seq-mean-token-sum"}))
def test_grpo_is_verls_formula_from_rewards_to_gradient(aggregation):
    """Caught: the population's deviation; the smaller of the two losses; a denominator that counts other things; a
    KL weight of twice the size."""
    sequences, options = prepared_from_rewards()
    actor = reference.responses("actor")
    placed = [np.concatenate([[0.0], one]).astype(np.float32) for one in actor]
    loss, gradient = over_packed_rows(options, sequences, placed, aggregation)
    formula = functools.partial(verl_loss, aggregation=aggregation, advantages=verl_advantages())
    assert loss == pytest.approx(formula(actor), rel=2e-6)
    for found, expected in zip(gradient, finite_differences(formula, actor), strict=True):
        np.testing.assert_allclose(found, [0.0, *expected], rtol=0, atol=2e-6)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_the_kept_numbers_are_trls():
    """In a process of its own: what trl and its libraries warn of is theirs."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    found = json.loads(done.stdout)
    assert jax.tree.structure(found) == jax.tree.structure(STORED)
    for kind in ("dpo", "kto", "grpo"):
        for new, old in zip(jax.tree.leaves(found[kind]), jax.tree.leaves(STORED[kind]), strict=True):
            assert new == pytest.approx(old, abs=2e-5), kind
