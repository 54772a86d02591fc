"""Low-rank adapters (LoRA, arXiv:2106.09685) as a tree of their own beside the base parameters.

The adapters of a decoder are shaped like its blocks::

    {'blocks': {'run_0': {'attention': {'q_lora_a': [L, D, r], 'q_lora_b': [L, r, H, h], ...}, 'mlp': {...}}}}

``merge_trees(base, adapters)`` are the parameters of ``decoder.with_lora(lora)``; ``base`` alone are those of
``decoder``, the policy before training. Both share the same base arrays, which nothing here copies or changes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.models.arrangement import merge_trees, split_adapters
from jaxrl_llm.models.config import LORA_TARGETS, Lora
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.types import Params

__all__ = [
    "LORA_TARGETS",
    "Lora",
    "abstract_adapters",
    "fold",
    "fold_matrix",
    "init",
    "logical_axes",
    "merge_trees",
    "split_adapters",
]


@functools.partial(jax.jit, static_argnums=(0, 1))
def init(decoder: Decoder, lora: Lora, key: Array) -> Params:
    """Fresh float32 adapters that change nothing: A is normal with standard deviation ``1 / sqrt(inputs)``, B zero.

    Jitted, so that the base which the same definition would draw is never made.
    """
    return split_adapters(decoder.with_lora(lora).init(key))[1]


def abstract_adapters(decoder: Decoder, lora: Lora) -> Params:
    """The adapters as ``jax.ShapeDtypeStruct``: nothing is allocated."""
    return split_adapters(decoder.with_lora(lora).abstract_params())[1]


def logical_axes(decoder: Decoder, lora: Lora) -> Params:
    """The tree of the adapters with each one's logical axes: those of its matrix; the rank is never split."""
    return split_adapters(decoder.with_lora(lora).logical_axes())[1]


def fold(params: Params, lora: Lora) -> Params:
    """The parameters of the plain decoder that computes the same: ``W + scale A B`` in place of each target's W.

    Args:
      params: in the training arrangement, with adapters; kept.

    Returns:
      A tree without adapters, in the dtypes of ``params``. Matrices without adapters are shared.
    """
    base, adapters = split_adapters(params)

    def folded(base: Params, adapters: Params) -> Params:
        out = dict(base)
        for name, value in base.items():
            if isinstance(value, dict):
                out[name] = folded(value, adapters.get(name, {}))
            elif f"{name}_lora_a" in adapters:
                one = functools.partial(fold_matrix, scale=lora.scale)
                whole = jax.vmap(one)(value, adapters[f"{name}_lora_a"], adapters[f"{name}_lora_b"])
                out[name] = whole.astype(value.dtype)
        return out

    return folded(base, adapters)


def fold_matrix(weight: Array, a: Float[Array, "... r"], b: Float[Array, "r ..."], *, scale: float) -> Array:
    """``W + scale A B`` of one layer, in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    product = jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
    return weight.astype(jnp.float32) + scale * product
