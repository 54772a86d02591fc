"""Decode with weights of 8 bits equals a forward of the weights that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import HybridEngineConfig, MeshConfig
from jaxrl_llm.decoding.engine import Engine
from jaxrl_llm.hybrid_engine import HybridEngine
from jaxrl_llm.models.low_precision import dequantize, quantize
from jaxrl_llm.sharding import TRAINING, make_mesh

MESHES = {
    "1": MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1),
    "fsdp 2 x tensor 2": MeshConfig(data=1, fsdp=2, tensor=2, pipeline=1),
}
OUTPUTS = {  # the dimensions of a stacked training matrix that its product sums over
    "attention": {"q": (1,), "k": (1,), "v": (1,), "o": (1, 2)},
    "mlp": {"gate": (1,), "up": (1,), "down": (1,)},
}


@pytest.fixture
def biased(make_model):
    """Every kind of parameter that a layer can have, biases not zero."""
    model = make_model(qkv_bias=True, qk_norm=True)
    keys = iter(jax.random.split(jax.random.key(5), 100))
    model.params = jax.tree.map(
        lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape) if leaf.ndim < 5 else leaf, model.params
    )
    return model


def arranged(model, rollout, weight_dtype, mesh_name="1"):
    """An engine and its parameters by way of the hybrid engine."""
    sizes = MESHES[mesh_name]
    mesh = make_mesh(sizes, jax.devices()[: sizes.fsdp * sizes.tensor])
    hybrid = HybridEngine(model.decoder, mesh, HybridEngineConfig(), jnp.float32, weight_dtype=weight_dtype)
    params = jax.device_put(model.params, TRAINING.shardings(mesh, model.decoder.logical_axes()))
    return Engine(model.decoder, mesh, rollout), hybrid.to_generation(params)


def rounded(params, weight_dtype):
    """The training parameters with every matrix of a layer replaced by what its 8 bits stand for, matrix by matrix in
    the training arrangement: the scales of q, k, v, gate and up are the fused matrices'."""
    blocks = params["blocks"]["run_0"]
    out = {part: dict(value) for part, value in blocks.items()}
    for part, matrices in OUTPUTS.items():
        for name, contracted in matrices.items():
            values, scale = quantize(blocks[part][name], contracted, weight_dtype)
            out[part][name] = dequantize(values, scale, contracted)
    return {**params, "blocks": {"run_0": out}}


@pytest.mark.parametrize(("weight_dtype", "mesh_name"), [("int8", "1"), ("float8", "1"), ("int8", "fsdp 2 x tensor 2")])
def test_decode_equals_forward_of_the_dequantized_weights(biased, rollout, mixed_requests, weight_dtype, mesh_name):
    """Log-probs within 1e-4, as without (float32 rounding through two layers); and the weights really are others. The
    cache has the compute dtype. On one device the decode loop of the compiled program carries each matrix once, in 8
    bits.

    Caught: a product without its barrier, whose conversion XLA:CPU takes out of the loop.
    """
    requests = mixed_requests[1:4]
    engine, params = arranged(biased, rollout(num_slots=8), weight_dtype, mesh_name)
    completions = engine.generate(params, requests)
    assert {pool.dtype for pool in jax.tree.leaves(engine._pools)} == {jnp.dtype(jnp.float32)}
    assert difference(biased, requests, completions) > 1e-2
    biased.params = rounded(biased.params, weight_dtype)
    assert difference(biased, requests, completions) < 1e-4
    if mesh_name == "1":
        assert_loop_carries(engine.decode_text(params), weight_dtype, params["layers"])


def difference(model, requests, completions):
    """The largest, between what the decoder reported and a full forward with the model's parameters."""
    pairs = [
        (completion.logprobs, model.logprobs(request, completion))
        for request, group in zip(requests, completions, strict=True)
        for completion in group
    ]
    return max(np.abs(reported - forward).max() for reported, forward in pairs)


def assert_loop_carries(text, weight_dtype, layers):
    loops = [line.partition(" while(")[0] for line in text.splitlines() if " while(" in line]
    carried = max(loops, key=len)  # that of the tokens
    stored = {"int8": "s8", "float8": "f8e4m3fn"}[weight_dtype]
    for part, name in (("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down")):
        sizes = list(layers[0][part][name].shape)
        forms = [sizes] if name != "o" else [sizes, [sizes[0], sizes[1] * sizes[2]]]  # heads and head size as one axis
        shapes = [str(form).replace(" ", "") for form in forms]
        assert sum(carried.count(f"{stored}{shape}") for shape in shapes) == len(layers), name
        assert not any(f"f32{shape}" in carried for shape in shapes), name
