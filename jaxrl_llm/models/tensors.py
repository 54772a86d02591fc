"""How a parameter and a tensor of a Hugging Face file hold the same numbers: one rule per parameter, both directions.

A rule names the parameter's dimensions in its own order and in the file's, where several may be merged into one::

    q:  parameter D H h          file (H h) D          q_proj.weight is [H * h, D]

From that follow the conversion in each direction and, for a slice of the parameter, the slice of the file to read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from jaxrl_llm.models.config import ModelConfig

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]
"""``read(tensor name, index)``: that part of a tensor of the file."""


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One parameter of the decoder and the tensor (one per layer, for blocks) that holds it.

    Attributes:
      path: the parameter's path, joined by '/'; within a block for ``per_layer`` rules.
      tensor: the file's name, with ``{layer}`` for the layer.
      dimensions: names of the parameter's dimensions.
      file_dimensions: per dimension of the tensor, the parameter's dimensions merged in it, outermost first; none for
        one of length 1 that the parameter lacks.
    """

    path: str
    tensor: str
    dimensions: tuple[str, ...]
    file_dimensions: tuple[tuple[str, ...], ...]

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.tensor

    def name(self, layer: int | None) -> str:
        return self.tensor.format(layer=layer) if self.per_layer else self.tensor

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return tuple(math.prod(sizes[name] for name in merged) for merged in self.file_dimensions)

    def read(self, read: Read, layer: int | None, index: Index, sizes: Mapping[str, int]) -> np.ndarray:
        """The part ``index`` of the parameter, reading as little of the file as a contiguous range allows.

        Of merged dimensions only the outermost can be narrowed in the file; the rest is cut after reading.
        """
        wanted = {name: range(sizes[name])[part] for name, part in zip(self.dimensions, index, strict=True)}
        file_index, rest, shape = [], [], []
        for merged in self.file_dimensions:
            if not merged:
                file_index.append(slice(0, 1))
                continue
            outer, inner = merged[0], math.prod(sizes[name] for name in merged[1:])
            file_index.append(slice(wanted[outer].start * inner, wanted[outer].stop * inner))
            shape += [len(wanted[outer]), *(sizes[name] for name in merged[1:])]
            rest += [slice(None), *(slice(wanted[name].start, wanted[name].stop) for name in merged[1:])]
        value = read(self.name(layer), tuple(file_index)).reshape(shape)[tuple(rest)]
        flat = [name for merged in self.file_dimensions for name in merged]
        return value.transpose([flat.index(name) for name in self.dimensions])

    def to_file(self, value: np.ndarray) -> np.ndarray:
        """A whole parameter (of one layer) as the file's tensor, contiguous."""
        sizes = dict(zip(self.dimensions, value.shape, strict=True))
        flat = [name for merged in self.file_dimensions for name in merged]
        value = value.transpose([self.dimensions.index(name) for name in flat])
        return np.ascontiguousarray(value.reshape(self.file_shape(sizes)))


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """Sizes of the dimensions that rules name. V is the model's own vocabulary, without padding rows."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "H": config.num_heads,
        "K": config.num_kv_heads,
        "h": config.head_size,
    }


Shapes = Mapping[str, tuple[int, ...]]


def differences(expected: Shapes, found: Shapes) -> str:
    """What tensors of a file are missing, left over or of another shape than expected, in words; '' for none."""
    wrong = [
        f"{name} {found[name]} instead of {expected[name]}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    problems = {
        "missing tensors": expected.keys() - found.keys(),
        "tensors this architecture does not use": found.keys() - expected.keys(),
        "wrong shapes": wrong,
    }
    return "; ".join(f"{what}: {_some(sorted(names))}" for what, names in problems.items() if names)


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def rule(path: str, tensor: str, dimensions: str, file_dimensions: str) -> TensorRule:
    """``rule('attention/q', '...', 'D H h', 'Hh D')``: dimensions are single letters; ``1`` is the file's alone."""
    merged = tuple(() if group == "1" else tuple(group) for group in file_dimensions.split())
    return TensorRule(path, tensor, tuple(dimensions.split()), merged)


def llama_rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """Names of the Llama family tree; biases and q/k norms where the model has them."""
    layer = "model.layers.{layer}."
    rules = [
        rule("embed/weight", "model.embed_tokens.weight", "V D", "V D"),
        rule("final_norm/scale", "model.norm.weight", "D", "D"),
        rule("attention_norm/scale", layer + "input_layernorm.weight", "D", "D"),
        rule("mlp_norm/scale", layer + "post_attention_layernorm.weight", "D", "D"),
        rule("attention/q", layer + "self_attn.q_proj.weight", "D H h", "Hh D"),
        rule("attention/k", layer + "self_attn.k_proj.weight", "D K h", "Kh D"),
        rule("attention/v", layer + "self_attn.v_proj.weight", "D K h", "Kh D"),
        rule("attention/o", layer + "self_attn.o_proj.weight", "H h D", "D Hh"),
        rule("mlp/gate", layer + "mlp.gate_proj.weight", "D F", "F D"),
        rule("mlp/up", layer + "mlp.up_proj.weight", "D F", "F D"),
        rule("mlp/down", layer + "mlp.down_proj.weight", "F D", "D F"),
    ]
    if not config.tie_embeddings:
        rules.append(rule("lm_head/weight", "lm_head.weight", "V D", "V D"))
    if config.qkv_bias:
        rules += [
            rule("attention/q_bias", layer + "self_attn.q_proj.bias", "H h", "Hh"),
            rule("attention/k_bias", layer + "self_attn.k_proj.bias", "K h", "Kh"),
            rule("attention/v_bias", layer + "self_attn.v_proj.bias", "K h", "Kh"),
        ]
    if config.qk_norm:
        rules += [
            rule("attention/q_norm/scale", layer + "self_attn.q_norm.weight", "h", "h"),
            rule("attention/k_norm/scale", layer + "self_attn.k_norm.weight", "h", "h"),
        ]
    return tuple(rules)
