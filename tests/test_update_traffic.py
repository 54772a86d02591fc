"""What an update sends between devices where both ``data`` and ``fsdp`` split it, read from the compiled program."""

import collections
import dataclasses

import jax
import jaxtyping
import pytest

from jaxrl_kernels import gpu_compile
from jaxrl_llm import config as configs
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.plan.abstract_roles import model_shape
from jaxrl_llm.plan.collectives import collectives
from jaxrl_llm.plan.device_kinds import DEVICE_KINDS, planned_devices
from jaxrl_llm.plan.setup import Setup

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def abstract_arguments():
    """Annotations are not checked here: jax builds `Rows` of its own records about arguments, which are no arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def sent_by(kind, data, fsdp, tensor):
    """Bytes that a device receives by (kind, axes, whether in the loop of micro-batches), and the setup."""
    values = configs.default_config("grpo")
    values.model.architecture, values.tokenizer.path = SHAPE, "builtin:tiny_addition"
    values.model.remat, values.model.layers = "full", "loop"
    values.rewards = {"exact": {"function": "exact_match"}}
    values.data.max_prompt_tokens, values.rollout.max_new_tokens = 8, 8
    values.training.row_tokens = values.training.micro_batch_tokens = 16
    values.dtype = "float32" if kind == "cpu" else "bfloat16"
    values.mesh = dataclasses.asdict(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))
    config = configs.resolve(values, data * fsdp * tensor)
    planned = planned_devices(DEVICE_KINDS[kind], data * fsdp * tensor)
    setup = Setup.of(config, model_shape(config), planned)
    found = collections.Counter()
    for one in collectives(setup.update("policy").compile().text, setup.mesh):
        found[one.kind, one.axes, one.in_loop] += one.bytes
    return found, setup


def matrices(setup, itemsize):
    """Bytes of all matrices, of which ``tensor`` splits each."""
    params = jax.tree.leaves(setup.states["policy"].params)
    return sum(leaf.size for leaf in params if leaf.size > 10_000) * itemsize / setup.mesh.shape["tensor"]


LITTLE = 50_000
"""Bytes beside: norms, activations of the 16 tokens of a row, losses; a matrix has 65,536 elements or more."""


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(2, 4, 1), (2, 2, 2)])
def test_gradients_cross_data_once_and_fsdp_alone_in_the_loop(data, fsdp, tensor):
    """XLA:CPU scatters by a sum of all and a cut, so that twice the bytes of a scatter cross ``fsdp``.

    Caught: `data` left to the partitioner, which adds up over both axes in the loop."""
    found, setup = sent_by("cpu", data, fsdp, tensor)
    assert not [key for key in found if "data" in key[1] and key[2]]
    over_data = sum(size for (_, axes, _), size in found.items() if "data" in axes)
    whole = setup.gradient_bytes("policy")
    assert 2 * whole * (data - 1) / data <= over_data <= 2 * whole * (data - 1) / data + 200  # sums of losses
    sums = sum(size for (kind, axes, _), size in found.items() if kind != "all-gather" and axes == ("fsdp",))
    assert sums <= 2 * matrices(setup, 4) * (fsdp - 1) / fsdp + LITTLE


@pytest.mark.skipif(gpu_compile.missing() is not None, reason="XLA's compiler for NVIDIA GPUs is not installed")
def test_on_a_gpu_gradients_are_scattered_over_fsdp():
    """Each device receives its share of every matrix's gradient alone, in bfloat16, and no byte more. Where they are
    added up XLA finds by where the parameters lie: also without `at_rest`.

    Caught: `data` left to the partitioner, which adds most matrices up whole, over both axes; gradients of float32
    (parameters that are not cast); sums kept whole on each device from one micro-batch to the next; weights left to the
    partitioner, which gathers more than it needs."""
    found, setup = sent_by("H200", 2, 2, 2)
    assert found["reduce-scatter", ("fsdp",), True] == matrices(setup, 2) / 2
    assert found["all-reduce", ("fsdp",), True] <= LITTLE
    # At most all weights for the forward pass and once more for the backward pass; half of each are there.
    assert found["all-gather", ("fsdp",), True] <= 2 * matrices(setup, 2) / 2
    assert not [key for key in found if "data" in key[1] and key[2]]
