"""Weights of generation in 8 bits: int8, or the short floats of float8_e4m3fn.

Every matrix of a layer in the generation arrangement is kept as 8-bit values with one float32 scale for each output
channel: ``matrix = values * scale``, symmetric, the channel's largest weight at the end of the range. A product
multiplies by the values, which every compute dtype holds exactly, and applies the scale to its output: no matrix in the
compute dtype outlives the product that reads it.

Norms and biases stay as they are, and so do the embedding and the output projection. What rounds the output projection
goes into every log-probability with no norm behind it, and where a model ties the two, as small models do, an 8-bit
projection would be one more array beside the embedding, whose rows are looked up exactly.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Params

COMPUTE = "compute"
"""The ``rollout.weight_dtype`` that changes nothing: weights in the compute dtype."""

FORMATS = {"int8": (jnp.dtype(jnp.int8), 127.0), "float8": (jnp.dtype(jnp.float8_e4m3fn), 448.0)}
"""The 8-bit choices of ``rollout.weight_dtype``: how values are stored, and the largest of them."""

CONTRACTED = {"attention": {"qkv": (0,), "o": (1, 2)}, "mlp": {"gate_up": (2,), "down": (1,)}}
"""The matrices of a layer, and which of their dimensions a product sums over; the others are output channels."""

SCALE = "_scale"
"""A matrix's scale stands beside it, under its name and this."""


def quantize(
    matrix: Float[Array, "*n"], contracted: tuple[int, ...], weight_dtype: str
) -> tuple[Array, Float[Array, "*m"]]:
    """8-bit values and the float32 scale of each output channel.

    Each value is the nearest that the format has, so ``values * scale`` is off by half a step at most: in int8 a step
    is the scale; in float8 it is 2**-3 of the power of two below the weight, and never less than 2**-9 scales. A
    channel with a weight that is not finite becomes NaN as a whole.
    """
    dtype, largest = FORMATS[weight_dtype]
    exact = matrix.astype(jnp.float32)
    peak = jnp.max(jnp.abs(exact), axis=contracted, keepdims=True)
    # No division by 0 for a channel of zeros; the bound keeps a tiny channel's scale out of the denormals.
    scale = jnp.maximum(peak / largest, jnp.finfo(jnp.float32).tiny)
    scaled = jnp.clip(exact / scale, -largest, largest)
    values = (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype)
    return values, jnp.squeeze(scale, contracted)


def dequantize(values: Array, scale: Float[Array, "*m"], contracted: tuple[int, ...]) -> Float[Array, "*n"]:
    """The float32 matrix that a product with ``values`` and ``scale`` multiplies by."""
    return values.astype(jnp.float32) * jnp.expand_dims(scale, contracted)


def quantize_layer(layer: Params, weight_dtype: str) -> Params:
    """A layer in the generation arrangement, its matrices quantized and their scales beside them."""
    out = dict(layer)
    for part, matrices in CONTRACTED.items():
        out[part] = dict(layer[part])
        for name, contracted in matrices.items():
            out[part][name], out[part][name + SCALE] = quantize(layer[part][name], contracted, weight_dtype)
    return out


def dequantize_layer(layer: Params) -> Params:
    """The layer in the generation arrangement that a quantized one stands for, its matrices in float32."""
    out = dict(layer)
    for part, matrices in CONTRACTED.items():
        out[part] = {name: value for name, value in layer[part].items() if not name.endswith(SCALE)}
        for name, contracted in matrices.items():
            out[part][name] = dequantize(layer[part][name], layer[part][name + SCALE], contracted)
    return out


def is_quantized(layer: Params) -> bool:
    return "o" + SCALE in layer.get("attention", {})


def cast_rest(layer: Params, dtype: np.dtype) -> Params:
    """Everything in the compute dtype, but for 8-bit values and their scales."""
    kept = {(part, name) for part, matrices in CONTRACTED.items() for name in matrices} if is_quantized(layer) else ()

    def one(path: tuple[Any, ...], leaf: Array) -> Array:
        names = tuple(entry.key for entry in path)
        exact = (names[0], names[1].removesuffix(SCALE)) in kept
        return leaf if exact else leaf.astype(dtype)

    return jax.tree.map_with_path(one, layer)


def product(subscripts: str, left: Array, right: Array, scale: Float[Array, "*n"] | None = None) -> Array:
    """``jnp.einsum`` of activations and a matrix, in either order.

    Args:
      scale: of the matrix where it is quantized, broadcast to the dimensions of the result.
    """
    if scale is None:
        return jnp.einsum(subscripts, left, right)
    # One barrier over both ties the matrix to the activations, which differ in every step: without it XLA may convert
    # the matrices once before a decode loop and carry copies of all of them through it.
    left, right = jax.lax.optimization_barrier((left, right))
    stored = [dtype for dtype, _ in FORMATS.values()]
    dtype = left.dtype if right.dtype in stored else right.dtype
    result = jnp.einsum(subscripts, left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32)
    return (result * scale).astype(dtype)


def check_device(mesh: Mesh, weight_dtype: str) -> None:
    """Tries the conversion to float8 on the mesh's first device of this process; int8 needs no trial.

    Raises:
      UserError: its compiler refuses it, or makes other numbers than the host.
    """
    if weight_dtype != "float8":
        return
    dtype, _ = FORMATS[weight_dtype]
    device = mesh.local_devices[0]
    weights = np.linspace(-448, 448, 1000, dtype=np.float32)
    try:
        read = jax.jit(lambda x: x.astype(dtype).astype(jnp.float32))(jax.device_put(weights, device))
        agrees = np.array_equal(np.asarray(read), weights.astype(dtype).astype(np.float32))
        reason = "it rounds otherwise than the host"
    except jax.errors.JaxRuntimeError as error:
        agrees, reason = False, str(error).partition("\n")[0]
    if not agrees:
        raise UserError(
            f"rollout.weight_dtype = 'float8': {device.device_kind} can't convert {dtype} ({reason}). "
            "Use 'int8', which every device has, or 'compute'."
        )
