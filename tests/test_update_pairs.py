"""One gradient for what is compared and labelled: DPO, KTO and reward-model updates don't depend on how pairs are
split, packed, ordered or placed on a mesh. Compared after one SGD step of rate 1, as in `test_update`."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm import optimizer, packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.value_head import add_value_head
from jaxrl_llm.sharding import TRAINING, batch_shards, make_mesh
from tests.test_update import CONFIG

MODEL = dataclasses.replace(CONFIG, num_layers=1, windows=(None,))
LONGEST, PAIRS = 14, 5
EXTRAS = {
    "dpo": ("chosen", "reference", "other_reference"),
    "kto": ("label", "reference", "kl"),
    "reward_model": ("chosen", "margin", "last"),
}


def make_sequences(name):
    """Five pairs, or as many rows with labels of prompts that repeat; the prompts of the last pair differ."""
    generator = np.random.default_rng(0)
    tokens, masks = [], []
    for pair in range(PAIRS):
        prompt = generator.integers(0, CONFIG.vocab_size, generator.integers(1, 6))
        for place in range(2):
            if pair == PAIRS - 1 and place:
                prompt = prompt[:-1] if len(prompt) > 1 else np.append(prompt, 3)
            response = generator.integers(0, CONFIG.vocab_size, generator.integers(1, 9))
            tokens.append(np.concatenate([prompt, response]).astype(np.int32))
            masks.append(np.arange(len(tokens[-1])) >= len(prompt))
    count = 2 * PAIRS
    reference = generator.normal(-12, 4, count).astype(np.float32)
    sign = np.tile(np.array([1.0, -1.0], np.float32), PAIRS)
    partner = np.arange(count, dtype=np.int32) ^ 1
    extras = {
        "chosen": sign,
        "label": sign,
        "reference": reference,
        "other_reference": reference[partner],
        "kl": np.full(count, 0.3, np.float32),
        "margin": np.repeat(generator.random(PAIRS).astype(np.float32), 2),
        "last": [(np.arange(len(mask)) == len(mask) - 1).astype(np.float32) for mask in masks],
    }
    return Sequences(
        tokens,
        masks,
        np.arange(count, dtype=np.int32) // (1 if name == "kto" else 2),
        partner=None if name == "kto" else partner,
        extras={key: extras[key] for key in EXTRAS[name]},
    )


@functools.cache
def initial_params(name):
    params = Decoder(MODEL).init(jax.random.key(1))
    if name == "reward_model":
        params = add_value_head(Decoder(MODEL), params)
        params["value_head"] = {"weight": 0.1 * jax.random.normal(jax.random.key(2), (MODEL.hidden_size,))}
    return jax.device_get(params)


def one_sgd_step(name, mesh_shape=(1, 1, 1), row_tokens=28, micro_batch_tokens=28, share_prompts=True, order=None):
    algorithm = ALGORITHMS[name]
    options = algorithm.options(**({"center_rewards_coefficient": 0.05} if name == "reward_model" else {"beta": 0.3}))
    data, fsdp, tensor = mesh_shape
    mesh = make_mesh(
        configs.MeshConfig(data=data, fsdp=fsdp, tensor=tensor, pipeline=1), jax.devices()[: data * fsdp * tensor]
    )
    decoder = Decoder(MODEL)
    axes = decoder.logical_axes()
    if name == "reward_model":
        axes = {**axes, "value_head": {"weight": (None,)}}
    params = jax.device_put(initial_params(name), TRAINING.shardings(mesh, axes))
    sgd = optimizer.make_optimizer(configs.OptimizerConfig(name="sgd", learning_rate=1.0), 1)
    role, shardings = update.init_role(params, sgd, jax.tree.map(lambda leaf: leaf.sharding, params), mesh)
    forward = update.Forward(
        decoder,
        temperature=1.0,
        dtype=np.float32,
        remat="none",
        chunk_tokens=8,
        head="values" if name == "reward_model" else "tokens",
    )
    step = update.make_update(forward, algorithm, options, sgd, 0.0, shardings, mesh)
    shape = packing.RowShape.of(row_tokens, micro_batch_tokens, batch_shards(mesh))
    sequences = make_sequences(name)
    batch, _ = packing.pack(
        sequences if order is None else packing.select(sequences, order),
        shape,
        aggregation=algorithm.loss_aggregation(options),
        max_response_tokens=10,
        max_micro_batches=packing.micro_batches_for(2 * PAIRS, LONGEST, shape),
        share_prompts=share_prompts,
    )
    role, metrics = step(
        role,
        update.put_rows(batch, mesh),
        np.int32(batch.num_micro_batches),
        np.float32(batch.denominator),
        old_is_actor=False,
    )
    return jax.device_get(role.params), {metric: float(value) for metric, value in metrics.items()}


@functools.cache
def reference_step(name):
    """A pair a row, a row at a time, nothing shared."""
    return one_sgd_step(name, share_prompts=False)


TURNED = np.array([7, 6, 0, 1, 9, 8, 3, 2, 4, 5])
"""Pairs in another order, some with the rejected completion first."""


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("dpo", {"row_tokens": 60, "micro_batch_tokens": 120}),
        ("dpo", {"order": TURNED}),
        ("dpo", {"mesh_shape": (2, 2, 2), "row_tokens": 60, "micro_batch_tokens": 60}),
        ("kto", {"row_tokens": 60, "micro_batch_tokens": 120, "order": TURNED}),
        ("kto", {"mesh_shape": (2, 2, 2), "share_prompts": False}),
        ("reward_model", {"row_tokens": 60, "micro_batch_tokens": 120, "order": TURNED}),
        ("reward_model", {"mesh_shape": (2, 2, 2), "share_prompts": False}),
    ],
    ids=["dpo packed", "dpo turned", "dpo mesh", "kto packed", "kto mesh", "reward packed", "reward mesh"],
)
def test_how_pairs_are_placed_does_not_change_the_update(name, split):
    """Caught: a partner named by its number in the batch; partners not renumbered with the order; a completion of a
    shared prompt that sees its pair's other one; KTO's point taken as a sum over tokens; a score read by column from
    the row's end."""
    params, metrics = one_sgd_step(name, **split)
    expected_params, expected = reference_step(name)
    assert expected["policy/grad_norm"] > 1e-2
    difference = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), params, expected_params)
    relative = np.sqrt(sum(jax.tree.leaves(difference))) / expected["policy/grad_norm"]
    assert relative < 1e-5  # float32 sums in another order
    for metric, value in expected.items():
        assert metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
