"""Reads BERT and RoBERTa classifiers from Hugging Face folders. Safetensors only, and no code of a model's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxrl_llm import processes
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.encoder import ACTIVATIONS, Encoder, EncoderConfig
from jaxrl_llm.models.labels import Labels
from jaxrl_llm.models.loading import read_hf_config, resolve_path
from jaxrl_llm.models.safetensors_folder import SafetensorsFolder, check_shapes
from jaxrl_llm.types import Params

ENCODERS = {
    "BertForSequenceClassification": "bert",
    "RobertaForSequenceClassification": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
}
"""Classifiers by their Hugging Face class name, and what their tensors' names begin with."""

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
_REQUIRED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
}
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_IGNORED = ("embeddings.position_ids",)
"""Written by older transformers: 0, 1, 2, …"""


def encoder_config(hf: Mapping[str, Any], source: str) -> EncoderConfig:
    """The EncoderConfig of a ``config.json``; ``source`` names it in errors.

    Raises:
      UserError: an architecture or an option that is not supported.
    """
    architecture = (hf.get("architectures") or [None])[0]
    if architecture not in ENCODERS:
        raise UserError(
            f"{source} has the architecture {architecture!r}; supported encoders are {', '.join(ENCODERS)}. Choose a "
            "model of one of these."
        )
    roberta = ENCODERS[architecture] == "roberta"
    defaults = _DEFAULTS | {"pad_token_id": 1 if roberta else 0, "vocab_size": 50265 if roberta else 30522}
    filled = {**defaults, **{key: value for key, value in hf.items() if value is not None}}
    for key, value in _REQUIRED.items():
        if filled.get(key, value) != value:
            raise UserError(
                f"{source} has {key} = {filled[key]!r} in its config.json; for {architecture} only {value!r} is "
                "supported. Choose another model."
            )
    if filled["hidden_act"] not in ACTIVATIONS:
        raise UserError(
            f"{source} has hidden_act = {filled['hidden_act']!r} in its config.json; supported are "
            f"{', '.join(ACTIVATIONS)}. Choose another model."
        )
    if filled["hidden_size"] % filled["num_attention_heads"]:
        raise UserError(
            f"{source} has hidden_size = {filled['hidden_size']}, which its num_attention_heads = "
            f"{filled['num_attention_heads']} do not divide. Correct its config.json."
        )
    return EncoderConfig(
        architecture=architecture,
        vocab_size=filled["vocab_size"],
        hidden_size=filled["hidden_size"],
        intermediate_size=filled["intermediate_size"],
        num_layers=filled["num_hidden_layers"],
        num_heads=filled["num_attention_heads"],
        positions=filled["max_position_embeddings"],
        type_vocab_size=filled["type_vocab_size"],
        norm_eps=float(filled["layer_norm_eps"]),
        activation=filled["hidden_act"],
        pad_token_id=filled["pad_token_id"],
        positions_skip_padding=roberta,
        labels=Labels.from_hf(hf),
    )


def load_encoder(
    path: str | Path, *, sharding: Sharding | None = None, dtype: DTypeLike = jnp.float32
) -> tuple[Encoder, Params]:
    """The classifier at ``path`` (a folder or hub id) and its parameters.

    Args:
      sharding: where every parameter goes; None is the default device.

    Raises:
      UserError: see :func:`encoder_config`; weights that are pickled, or tensors that are missing, left over or of
        another shape.
    """
    local = resolve_path(path)
    encoder = Encoder(encoder_config(read_hf_config(local), str(local)))
    roberta = encoder.config.positions_skip_padding
    ignored = (*_IGNORED, "roberta.pooler.dense.weight", "roberta.pooler.dense.bias") if roberta else _IGNORED
    tensors = SafetensorsFolder(local, ignored=ignored)  # RoBERTa's head has its own layer in place of the pooler
    in_file = {_present_name(name): name for name in tensors.shapes()}
    expected = encoder.abstract_params()
    shapes, num_layers = tensors.shapes(), encoder.config.num_layers
    wanted: dict[str, tuple[int, ...]] = {}

    def file_shape(key_path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> None:
        shape = leaf.shape[1:] if key_path[0].key == "layers" else leaf.shape
        for name in _names(key_path, encoder.config):
            wanted[name] = tuple(reversed(shape)) if key_path[-1].key == "weight" else tuple(shape)

    jax.tree.map_with_path(file_shape, expected)
    given = {present: shapes[name] for present, name in in_file.items()}
    check_shapes(tensors.source, f"{encoder.config.architecture}, {num_layers} layers", wanted, given)

    def load(key_path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        value = np.empty(leaf.shape, jnp.dtype(dtype))
        names = _names(key_path, encoder.config)
        parts = [value[layer] for layer in range(len(value))] if key_path[0].key == "layers" else [value]
        for part, name in zip(parts, names, strict=True):
            stored = tensors.read(in_file[name], tuple(slice(0, size) for size in wanted[name]))
            part[...] = stored.T if key_path[-1].key == "weight" else stored
        return jnp.asarray(value) if sharding is None else processes.put(value, sharding)

    return encoder, jax.tree.map_with_path(load, expected)


def _present_name(name: str) -> str:
    """Norms of the first BERT files are called gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _names(key_path: tuple[Any, ...], config: EncoderConfig) -> list[str]:
    """The tensors of the file that hold a parameter: one, or one per layer. Linear ones are ``[out, in]`` there."""
    prefix = ENCODERS[config.architecture]
    first, *rest = (entry.key for entry in key_path)
    end = {"scale": "weight"}.get(rest[-1], rest[-1])
    if first == "embed":
        if rest[0] == "norm":
            return [f"{prefix}.embeddings.LayerNorm.{end}"]
        table = {"word": "word", "position": "position", "type": "token_type"}[rest[0]]
        return [f"{prefix}.embeddings.{table}_embeddings.weight"]
    if first == "layers":
        return [f"{prefix}.encoder.layer.{layer}.{_LAYER[rest[0]]}.{end}" for layer in range(config.num_layers)]
    heads = {"dense": "classifier.dense", "out": "classifier.out_proj"}
    if prefix == "bert":
        heads = {"dense": "bert.pooler.dense", "out": "classifier"}
    return [f"{heads[first]}.{end}"]
