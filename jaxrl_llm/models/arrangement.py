"""How parameters are laid out: their logical axes by path, and the generation arrangement of a layer.

One parameter can live in two layouts (training, generation), so its axes are data beside it, not part of it;
``jaxrl_llm.sharding`` maps logical axes to mesh axes.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Params

Axes = tuple[str | None, ...]

AXES: dict[str, Axes] = {
    "embed/weight": ("vocab", "embed"),
    "lm_head/weight": ("vocab", "embed"),
    "final_norm/scale": (None,),
    "attention_norm/scale": (None,),
    "mlp_norm/scale": (None,),
    "q_norm/scale": (None,),
    "k_norm/scale": (None,),
    "attention/q": ("embed", "heads", "head"),
    "attention/k": ("embed", "kv_heads", "head"),
    "attention/v": ("embed", "kv_heads", "head"),
    "attention/q_bias": ("heads", "head"),
    "attention/k_bias": ("kv_heads", "head"),
    "attention/v_bias": ("kv_heads", "head"),
    "attention/o": ("heads", "head", "embed"),
    "mlp/gate": ("embed", "mlp"),
    "mlp/up": ("embed", "mlp"),
    "mlp/down": ("mlp", "embed"),
}
"""Logical axes of the training arrangement by the last two names of a path; stacked blocks have 'layers' in front."""

GENERATION_AXES: dict[str, Axes] = AXES | {
    "attention/qkv": ("embed", "kv_heads", None, "head"),
    "attention/qkv_bias": ("kv_heads", None, "head"),
    "mlp/gate_up": (None, "mlp", "embed"),
    "mlp/down": ("embed", "mlp"),
    # Of quantized matrices: a scale for each output channel, which lies where the channel does.
    "attention/qkv_scale": ("kv_heads", None, "head"),
    "attention/o_scale": ("embed",),
    "mlp/gate_up_scale": (None, "mlp"),
    "mlp/down_scale": ("embed",),
}
"""The same for the generation arrangement, whose layers are not stacked."""


def axes_of(tree: Any, table: dict[str, Axes]) -> Any:
    """The tree with each leaf replaced by its axes; 'layers' in front where the leaf is in a stacked run."""

    def lookup(path: tuple[Any, ...], leaf: Any) -> Axes:
        names = [str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path]
        axes = table["/".join(names[-2:])]
        axes = ("layers", *axes) if names[0] == "blocks" else axes
        if len(axes) != len(leaf.shape):
            raise ValueError(f"{'/'.join(names)} has shape {leaf.shape}, but axes {axes}")
        return axes

    return jax.tree.map_with_path(lookup, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unstack(stacked: Params, num_layers: int) -> list[Params]:
    """The layers of a stacked run. The gradient stacks theirs once; that of plain slices would add up as many arrays
    of the whole run's size as it has layers."""
    return [jax.tree.map(operator.itemgetter(index), stacked) for index in range(num_layers)]


def _unstack_forward(stacked: Params, num_layers: int) -> tuple[list[Params], None]:
    return unstack(stacked, num_layers), None


def _unstack_backward(num_layers: int, _: None, layers: list[Params]) -> tuple[Params]:
    return (jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),)


unstack.defvjp(_unstack_forward, _unstack_backward)


def fuse_layer(layer: Params) -> Params:
    """One layer's weights in the generation arrangement. Every product keeps its terms, so results are the same."""
    attention, mlp = dict(layer["attention"]), layer["mlp"]
    attention["qkv"] = _fuse_heads(attention.pop("q"), attention.pop("k"), attention.pop("v"))
    if "q_bias" in attention:
        biases = (attention.pop(f"{name}_bias")[None] for name in "qkv")
        attention["qkv_bias"] = _fuse_heads(*biases)[0]
    gate_up = jnp.stack([mlp["gate"].T, mlp["up"].T])
    return {**layer, "attention": attention, "mlp": {"gate_up": gate_up, "down": mlp["down"].T}}


def _fuse_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """``[D, H, h]``, ``[D, K, h]`` twice -> ``[D, K, G + 2, h]``."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    return jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)
