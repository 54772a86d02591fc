"""How parameters are laid out: their logical axes by path, and the generation arrangement of a layer.

One parameter can live in two layouts (training, generation), so its axes are data beside it, not part of it;
``jaxrl_llm.sharding`` maps logical axes to mesh axes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.types import Params

Axes = tuple[str | None, ...]

AXES: dict[str, Axes] = {
    "embed/weight": ("vocab", "embed"),
    "lm_head/weight": ("vocab", "embed"),
    "value_head/weight": (None,),
    "label_head/weight": (None, None),
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
    "attention/q_lora_a": ("embed", None),
    "attention/q_lora_b": (None, "heads", "head"),
    "attention/k_lora_a": ("embed", None),
    "attention/k_lora_b": (None, "kv_heads", "head"),
    "attention/v_lora_a": ("embed", None),
    "attention/v_lora_b": (None, "kv_heads", "head"),
    "attention/o_lora_a": ("heads", "head", None),
    "attention/o_lora_b": (None, "embed"),
    "mlp/gate_lora_a": ("embed", None),
    "mlp/gate_lora_b": (None, "mlp"),
    "mlp/up_lora_a": ("embed", None),
    "mlp/up_lora_b": (None, "mlp"),
    "mlp/down_lora_a": ("mlp", None),
    "mlp/down_lora_b": (None, "embed"),
}
"""Logical axes of the training arrangement by the last two names of a path; stacked blocks have 'layers' in front."""

GENERATION_AXES: dict[str, Axes] = AXES | {
    "attention/qkv": ("embed", "kv_heads", None, "head"),
    "attention/qkv_bias": ("kv_heads", None, "head"),
    "attention/o": ("embed", "heads", "head"),
    "mlp/gate_up": (None, "mlp", "embed"),
    "mlp/down": ("embed", "mlp"),
    "attention/qkv_lora_a": ("embed", None),
    "attention/qkv_lora_b": (None, "kv_heads", None, "head"),
    "mlp/gate_up_lora_a": ("embed", None, None),
    "mlp/gate_up_lora_b": (None, None, "mlp"),
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


def split_adapters(params: Params) -> tuple[Params, Params]:
    """The tree without its adapters, and the adapters alone, without dicts that hold none; leaves are shared."""
    base, adapters = {}, {}
    for name, value in params.items():
        if not isinstance(value, dict):
            (adapters if name.endswith(("_lora_a", "_lora_b")) else base)[name] = value
            continue
        base[name], inner = split_adapters(value)
        if inner:
            adapters[name] = inner
    return base, adapters


def merge_trees(base: Params, adapters: Params) -> Params:
    """The deep union of two dicts; leaves are shared.

    Raises:
      ValueError: a leaf is in both.
    """
    merged = dict(base)
    for name, value in adapters.items():
        if name in base and not (isinstance(value, dict) and isinstance(base[name], dict)):
            raise ValueError(f"both trees have a leaf {name!r}")
        merged[name] = merge_trees(base[name], value) if name in base else value
    return merged


def unstack(stacked: Params, num_layers: int) -> list[Params]:
    """The layers of a stacked run. The gradient stacks theirs once; that of plain slices would add up as many arrays
    of the whole run's size as it has layers."""
    leaves, tree = jax.tree.flatten(stacked)
    # One leaf a call: a custom gradient computes those of all its arguments, also of weights that are not trained.
    layers = zip(*(_unstack_leaf(leaf, num_layers) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(tree, layer) for layer in layers]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _unstack_leaf(stacked: jax.Array, num_layers: int) -> list[jax.Array]:
    return [stacked[index] for index in range(num_layers)]


def _unstack_forward(stacked: jax.Array, num_layers: int) -> tuple[list[jax.Array], None]:
    return _unstack_leaf(stacked, num_layers), None


def _unstack_backward(num_layers: int, _: None, layers: list[jax.Array]) -> tuple[jax.Array]:
    return (jnp.stack(layers),)


_unstack_leaf.defvjp(_unstack_forward, _unstack_backward)


def fuse_layer(layer: Params) -> Params:
    """One layer's weights in the generation arrangement. Every product keeps its terms, so results are the same."""
    attention, mlp = dict(layer["attention"]), layer["mlp"]
    attention["qkv"] = _fuse_heads(attention.pop("q"), attention.pop("k"), attention.pop("v"))
    if "q_bias" in attention:
        biases = (attention.pop(f"{name}_bias")[None] for name in "qkv")
        attention["qkv_bias"] = _fuse_heads(*biases)[0]
    attention["o"] = attention["o"].transpose(2, 0, 1)
    gate_up = jnp.stack([mlp["gate"].T, mlp["up"].T])
    return {**layer, "attention": attention, "mlp": {"gate_up": gate_up, "down": mlp["down"].T}}


def fuse_adapters(layer: Params, config: ModelConfig) -> Params:
    """One layer's adapters in the generation arrangement: one A for q, k and v and one for gate and up.

    ``qkv_lora_a [D, n r]`` holds the A of those of q, k, v that have adapters, side by side; ``qkv_lora_b
    [n r, K, G + 2, h]`` their B on the diagonal and zeros beside. ``gate_up_lora_a [D, 2, r]`` and ``gate_up_lora_b
    [2, r, F]`` are zero where one of the two has none. The others stay as they are.
    """
    attention, mlp = dict(layer.get("attention", {})), dict(layer.get("mlp", {}))
    group = config.group_size
    before = {"q": 0, "k": group, "v": group + 1}
    all_a, all_b = [], []
    for name in [name for name in before if f"{name}_lora_a" in attention]:
        all_a.append(attention.pop(f"{name}_lora_a"))
        b = attention.pop(f"{name}_lora_b")
        b = b.reshape(b.shape[0], config.num_kv_heads, -1, config.head_size)
        all_b.append(jnp.pad(b, [(0, 0), (0, 0), (before[name], group + 2 - before[name] - b.shape[2]), (0, 0)]))
    if all_a:
        attention |= {"qkv_lora_a": jnp.concatenate(all_a, axis=1), "qkv_lora_b": jnp.concatenate(all_b)}
    for kind, axis in (("a", 1), ("b", 0)):
        pair = [mlp.pop(f"{name}_lora_{kind}", None) for name in ("gate", "up")]
        like = next((part for part in pair if part is not None), None)
        if like is not None:
            pair = [jnp.zeros_like(like) if part is None else part for part in pair]
            mlp[f"gate_up_lora_{kind}"] = jnp.stack(pair, axis=axis)
    return {name: part for name, part in (("attention", attention), ("mlp", mlp)) if part}


def _fuse_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """``[D, H, h]``, ``[D, K, h]`` twice -> ``[D, K, G + 2, h]``."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    return jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)
