"""A teacher on other devices teaches what it teaches beside the policy."""

import functools

import jax
import numpy as np
import pytest

from jaxrl_llm import optimizer, packing, update
from jaxrl_llm.algorithms.distillation import DISTILLATION
from jaxrl_llm.apart_teacher import ApartTeacher
from jaxrl_llm.config import MeshConfig, OptimizerConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import TRAINING, make_mesh
from tests.test_update import CONFIG
from tests.test_update_algorithms import SEQUENCES, whole_batch

ROWS = packing.RowShape(16, 4)


def placed(mesh, seed):
    decoder = Decoder(CONFIG)
    params = decoder.init(jax.random.key(seed))
    return jax.device_put(params, TRAINING.shardings(mesh, decoder.logical_axes()))


def mini_batch():
    limit = packing.micro_batches_for(SEQUENCES, 16, ROWS)
    batch, _ = packing.pack(
        whole_batch(), ROWS, aggregation="token-mean", max_response_tokens=10, max_micro_batches=limit
    )
    assert batch.num_micro_batches > 1
    return batch


def gradient_step(top_k, teacher_sizes):
    """The parameters after one step of SGD with rate 1 and the metrics; the teacher is on the policy's mesh where no
    other is given."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    options = DISTILLATION.options(beta=0.5, top_k=top_k)
    divergence = DISTILLATION.divergence(options)
    plain = update.Forward(Decoder(CONFIG), temperature=0.7, dtype=np.float32, remat="none", chunk_tokens=8)
    forward = update.Forward(Decoder(CONFIG), 0.7, np.float32, "none", 8, divergence=divergence, teacher=plain)
    sgd = optimizer.make_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0), 1)
    params = placed(mesh, 0)
    role, shardings = update.init_role(params, sgd, jax.tree.map(lambda leaf: leaf.sharding, params), mesh)
    step = update.make_update(forward, DISTILLATION, options, sgd, 0.0, shardings, mesh)
    batch = mini_batch()
    if teacher_sizes is None:
        teacher = placed(mesh, 1)
    else:
        block = make_mesh(teacher_sizes, jax.devices()[4:8])
        apart, own = ApartTeacher(plain, divergence, block, mesh), placed(block, 1)
        apart.read(own, batch)
        teacher = apart.read(own, batch)  # the second time with the weight that it has
        assert all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in jax.tree.leaves(teacher))
    counts = np.int32(batch.num_micro_batches), np.float32(batch.denominator)
    role, metrics = step(role, update.put_rows(batch, mesh), *counts, old_is_actor=False, teacher=teacher)
    return jax.device_get(role.params), {name: float(value) for name, value in metrics.items()}


beside = functools.cache(functools.partial(gradient_step, teacher_sizes=None))


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_update_is_the_same(top_k):
    """Over the whole vocabulary and of candidates alone; the teacher's four devices split other things than the
    policy's. Caught: the states of the first micro-batch for all; all rows' states to
    every index of the policy's `data`."""
    expected_params, expected = beside(top_k)
    params, metrics = gradient_step(top_k, MeshConfig(data=1, fsdp=2, tensor=2))
    assert expected["distillation/divergence"] > 1e-3 and expected["policy/grad_norm"] > 1e-3
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)  # float32 sums in another order
    difference = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), params, expected_params)
    assert np.sqrt(sum(jax.tree.leaves(difference))) < 1e-5 * expected["policy/grad_norm"]
