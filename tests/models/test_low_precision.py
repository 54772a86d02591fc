"""Matrices of 8 bits: how far they are from the weights, and products with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import low_precision
from jaxrl_llm.models.low_precision import CONTRACTED, FORMATS, dequantize, product, quantize
from tests.models.tiny import tiny_model

WEIGHTS = np.random.default_rng(0).normal(size=(6, 40, 5)).astype(np.float32)
WEIGHTS *= np.logspace(-6, 3, 5, dtype=np.float32)  # channels of very different sizes
CHANNEL = (0, 1)  # contracted


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_each_weight_is_off_by_half_a_step_at_most(weight_dtype):
    """And the bound is met: some weight is nearly half a step off. The division by the scale rounds, up to 127 or 448
    times 2**-24: 3e-5 steps.

    Caught: rounding down; one scale for the whole matrix; a range of 128.
    """
    values, scale = quantize(jnp.asarray(WEIGHTS), CHANNEL, weight_dtype)
    dtype, largest = FORMATS[weight_dtype]
    assert values.dtype == dtype and scale.dtype == jnp.float32 and scale.shape == (5,)
    error = np.abs(np.asarray(dequantize(values, scale, CHANNEL)) - WEIGHTS)
    step = np.broadcast_to(np.asarray(scale), WEIGHTS.shape)
    if weight_dtype == "float8":
        power = np.exp2(np.floor(np.log2(np.abs(WEIGHTS) / step)))
        step = step * np.maximum(power, 2.0**-6) / 8
    assert 0.45 < (error / step).max() <= 0.5 + 3e-5
    # The largest weight of a channel is kept: it is the end of the range.
    peak = np.abs(WEIGHTS).max(axis=CHANNEL)
    assert np.abs(np.asarray(values, np.float32)).max(axis=CHANNEL) == pytest.approx(np.full(5, largest))
    np.testing.assert_allclose(np.asarray(scale) * largest, peak, rtol=1e-6)  # a division and a product round


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_channels_of_zeros_tiny_weights_and_nan(weight_dtype):
    """Zeros stay zeros; a diverged weight shows in its channel and in no other.

    Caught: 0 / 0; a NaN that the conversion to int8 makes 0; an infinite weight clipped to a finite one.
    """
    weights = np.zeros((3, 4), np.float32)
    weights[:, 1] = 1e-38, -2e-38, 0
    weights[:, 2] = 1, np.nan, 0
    weights[:, 3] = 1, np.inf, 0
    out = np.asarray(dequantize(*quantize(jnp.asarray(weights), (0,), weight_dtype), (0,)))
    assert (out[:, 0] == 0).all()
    assert np.abs(out[:, 1] - weights[:, 1]).max() < 2e-38
    assert np.isnan(out[:, 2:]).all()


@pytest.mark.parametrize("weight_dtype", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: jnp.dtype(dtype).name)
def test_a_product_multiplies_by_the_dequantized_matrix(weight_dtype, dtype):
    """In bfloat16 only the result is rounded (2**-8): the values are exact in it, and sums and scales are float32.

    Caught: the scale of another axis; a scale cast to bfloat16 (its rounding adds up with that of the result).
    """
    values, scale = quantize(jnp.asarray(WEIGHTS), CHANNEL, weight_dtype)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 6, 40)), dtype)
    out = jax.jit(lambda *arguments: product("nij,ijd->nd", *arguments))(x, values, scale[None])
    assert out.dtype == dtype
    matrix = np.asarray(dequantize(values, scale, CHANNEL), np.float64)
    wanted = np.einsum("nij,ijd->nd", np.asarray(x, np.float64), matrix)
    size = np.einsum("nij,ijd->nd", np.abs(np.asarray(x, np.float64)), np.abs(matrix))
    rounding = 2.0**-8 * np.abs(wanted) if dtype == jnp.bfloat16 else 0
    assert (np.abs(np.asarray(out, np.float64) - wanted) <= rounding + 240 * 2.0**-24 * size).all()


@pytest.mark.parametrize("weight_dtype", FORMATS)
def test_a_layer_holds_every_matrix_in_8_bits_and_nothing_else(weight_dtype):
    """Caught: a matrix forgotten; biases or norms quantized; scales cast to the compute dtype."""
    decoder, params = tiny_model(qkv_bias=True, qk_norm=True)
    layer = decoder.generation_layer(params["blocks"]["run_0"], 1, weight_dtype)
    layer = low_precision.cast_rest(layer, jnp.dtype(jnp.bfloat16))
    dtypes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype for path, leaf in _leaves(layer)}
    matrices = {f"{part}/{name}" for part, names in CONTRACTED.items() for name in names}
    assert {name for name, dtype in dtypes.items() if dtype == FORMATS[weight_dtype][0]} == matrices
    assert {name for name, dtype in dtypes.items() if dtype == jnp.float32} == {f"{name}_scale" for name in matrices}
    rest = {name for name, dtype in dtypes.items() if dtype == jnp.bfloat16}
    assert rest == {f"{part}_norm/scale" for part in ("attention", "mlp")} | {
        f"attention/{name}" for name in ("q_norm/scale", "k_norm/scale", "qkv_bias")
    }


def _leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)
