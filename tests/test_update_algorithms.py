"""One gradient for the losses that read more than a token: neither split, packing, order nor mesh changes an update.

As in `test_update`: one SGD step of rate 1, no clipping, since Adam hides or magnifies a difference.
"""

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm import optimizer, packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.config import MeshConfig, OptimizerConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import TRAINING, batch_shards, make_mesh
from tests.test_update import CONFIG, SEQUENCES, initial_params, make_sequences

CASES = {
    "ppo, critic": ("ppo", "critic", "values", {"loss_aggregation": "seq-mean-token-mean"}),
    "ppo, shared trunk": ("ppo", "policy", "both", {"shared_trunk": True, "value_coef": 0.5}),
    # Bounds that some of the sequences are beyond, and a correction by sequence.
    "gspo": ("gspo", "policy", "tokens", {"clip_low": 0.02, "clip_high": 0.02, "rollout_is": "sequence"}),
    "gmpo": ("gmpo", "policy", "tokens", {"clip_low": 0.2, "clip_high": 0.2}),
}
SPLITS = {
    "packed, shared prompts, reversed": {
        "row_tokens": 40,
        "micro_batch_tokens": 80,
        "share_prompts": True,
        "order": range(SEQUENCES)[::-1],
    },
    "a mesh of 8": {
        "mesh_shape": (1, 4, 2),
        "row_tokens": 23,
        "micro_batch_tokens": 23,
        "share_prompts": True,
        "order": (5, 0, 11, 3, 7, 1, 8, 2, 10, 4, 9, 6),
    },
}


def whole_batch():
    """The sequences of `test_update`, with values and returns as a critic's loss reads them."""
    sequences = make_sequences()
    generator = np.random.default_rng(4)
    for name in ("values", "returns"):
        sequences.extras[name] = [
            np.where(mask, generator.normal(size=len(mask)), 0).astype(np.float32) for mask in sequences.loss_mask
        ]
    return sequences


def params_of(head):
    params = initial_params()
    if head == "tokens":
        return params
    weight = np.random.default_rng(5).normal(size=CONFIG.hidden_size).astype(np.float32)
    return {**params, "value_head": {"weight": weight}}


def one_sgd_step(
    case, mesh_shape=(1, 1, 1), row_tokens=16, micro_batch_tokens=64, share_prompts=False, order=range(SEQUENCES)
):
    name, role_name, head, changes = CASES[case]
    algorithm = ALGORITHMS[name]
    options = algorithm.options(**changes)
    data, fsdp, tensor = mesh_shape
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    decoder = Decoder(CONFIG)
    axes = decoder.logical_axes()
    params = params_of(head)
    if head != "tokens":
        axes = {**axes, "value_head": {"weight": (None,)}}
    params = jax.device_put(params, TRAINING.shardings(mesh, {key: axes[key] for key in params}))
    sgd = optimizer.make_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0), 1)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    role, role_shardings = update.init_role(params, sgd, shardings, mesh)
    forward = update.Forward(decoder, temperature=0.7, dtype=np.float32, remat="none", chunk_tokens=8, head=head)
    step = update.make_update(forward, algorithm, options, sgd, 0.0, role_shardings, mesh, name=role_name)
    shape = packing.RowShape.of(row_tokens, micro_batch_tokens, batch_shards(mesh))
    batch, _ = packing.pack(
        packing.select(whole_batch(), np.array(order)),
        shape,
        aggregation=algorithm.loss_aggregation(options),
        max_response_tokens=10,
        max_micro_batches=packing.micro_batches_for(SEQUENCES, row_tokens, shape),
        share_prompts=share_prompts,
    )
    counts = np.int32(batch.num_micro_batches), np.float32(batch.denominator)
    role, metrics = step(role, update.put_rows(batch, mesh), *counts, old_is_actor=False)
    return jax.device_get(role.params), {metric: float(value) for metric, value in metrics.items()}


@functools.cache
def reference_step(case):
    return one_sgd_step(case, micro_batch_tokens=16 * SEQUENCES)  # a row a sequence, all rows at once


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_neither_split_nor_packing_nor_mesh_changes_the_update(case, split):
    """Caught: a sequence's mean over its row; values at the column before where a prompt is shared; a denominator of
    the micro-batch; extras that are not packed with their sequence."""
    expected_params, expected = reference_step(case)
    params, metrics = one_sgd_step(case, **SPLITS[split])
    norm = expected[f"{CASES[case][1]}/grad_norm"]
    assert norm > 1e-2 and expected[f"{CASES[case][1]}/update_skipped"] == 0
    difference = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), params, expected_params)
    # float32 sums in another order
    assert np.sqrt(sum(jax.tree.leaves(difference))) < 1e-5 * norm
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_cases_are_beyond_their_bounds():
    """Without this the equalities above might be of losses that clip nothing. Caught: a clip that is wide."""
    for case in ("gspo", "gmpo", "ppo, shared trunk"):
        _, metrics = reference_step(case)
        assert metrics["policy/clip_fraction_high"] > 0.02 and metrics["policy/clip_fraction_low"] > 0.02, case
    assert 0.02 < reference_step("ppo, critic")[1]["critic/clip_fraction"] < 0.9
