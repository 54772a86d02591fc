"""What a family is, and the part of reading and writing a Hugging Face config that all families here share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig, RopeConfig
from jaxrl_llm.models.tensors import TensorRule

HfConfig = dict[str, Any]
"""A ``config.json`` as a dict."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
      architecture: Hugging Face class name; the entry of ``architectures`` in config.json.
      model_type: the entry of ``model_type`` in config.json.
      defaults: what a key missing in config.json means (the defaults of the Hugging Face config class).
      required: keys, with the only value that is supported, that would otherwise change the model silently.
      read: config (defaults filled in) to ModelConfig.
      write: the keys of config.json that differ between families.
      rules: parameter by parameter, the tensors of the file.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    required: Mapping[str, Any]
    read: Callable[[HfConfig], ModelConfig]
    write: Callable[[ModelConfig], HfConfig]
    rules: Callable[[ModelConfig], tuple[TensorRule, ...]]

    def from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """A model's config from its ``config.json``.

        Raises:
          UserError: an option that this family does not support, or a missing size.
        """
        filled = {**self.defaults, **hf}
        for key, value in self.required.items():
            if filled.get(key, value) != value:
                raise UserError(
                    f"The model's config.json has {key} = {filled[key]!r}; for {self.architecture} only {value!r} is "
                    "supported. Choose another model."
                )
        return self.read(filled)

    def to_hf(self, config: ModelConfig) -> HfConfig:
        """The ``config.json`` of a model, as new and older transformers and other tools read it."""
        eos = list(config.eos_token_ids)
        return {
            **json.loads(config.extra_json),
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position,
            "rms_norm_eps": config.norm_eps,
            "initializer_range": config.init_scale,
            "tie_word_embeddings": config.tie_embeddings,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": config.pad_token_id,
            **_write_rope(config.rope),
            **({} if config.attention_scale is None else {"query_pre_attn_scalar": config.attention_scale**-2}),
            **self.write(config),
        }


CONSUMED = frozenset(
    (
        *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
        *("rms_norm_eps", "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("rope_parameters", "rope_theta", "rope_scaling", "query_pre_attn_scalar", "sliding_window"),
        *("use_sliding_window", "max_window_layers", "layer_types"),
        *("torch_dtype", "dtype", "transformers_version", "_name_or_path"),
    )
)
"""Keys that are read, written anew, or say only where the file came from; all others are kept for export."""


def read_shared(hf: HfConfig, **differing: Any) -> ModelConfig:
    """The ModelConfig of a config with every default filled in; ``differing`` sets what the family decides."""
    sizes = {}
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(hf.get(key), int):
            raise UserError(
                f"The model's config.json has {key} = {hf.get(key)!r}; it must be a whole number. Add it there."
            )
        sizes[key] = hf[key]
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    scalar = hf.get("query_pre_attn_scalar")
    fields: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "vocab_size": sizes["vocab_size"],
        "padded_vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_size": hf.get("head_dim") or sizes["hidden_size"] // heads,
        "max_position": hf["max_position_embeddings"],
        "norm_eps": hf["rms_norm_eps"],
        "rope": _read_rope(hf),
        "windows": (None,) * layers,
        "tie_embeddings": hf["tie_word_embeddings"],
        "attention_scale": None if scalar is None else scalar**-0.5,
        "init_scale": hf.get("initializer_range", 0.02),
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
        "pad_token_id": hf.get("pad_token_id"),
        "extra_json": json.dumps({key: value for key, value in hf.items() if key not in CONSUMED}, sort_keys=True),
    }
    return ModelConfig(**{**fields, **differing})


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A Hugging Face token id option, which is an id, a list of ids or null."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


ROPE_KEYS = {
    "rope_theta": "theta",
    "rope_type": "type",
    "type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""Keys of ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before) and the fields of RopeConfig."""

USED_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "attention_factor", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip


def _read_rope(hf: HfConfig) -> RopeConfig:
    given = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta"), **(hf.get("rope_scaling") or {})}
    given = {key: value for key, value in given.items() if value is not None and key != "finetuned"}
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            "The model's config.json has a partial_rotary_factor other than 1; only whole heads can be rotated here. "
            "Choose another model."
        )
    unknown = sorted(set(given) - set(ROPE_KEYS))
    if unknown:
        raise UserError(
            f"The model's rope parameters in config.json have the unknown keys {unknown}; known are "
            f"{sorted(ROPE_KEYS)}. They could change the model silently, so they are refused."
        )
    fields = {ROPE_KEYS[key]: value for key, value in given.items()}
    kind = fields.get("type", "default")
    if kind == "dynamic":  # its original context is the model's context: longer sequences are refused
        fields["original_max_position"] = hf["max_position_embeddings"]
    elif kind == "yarn":
        fields.setdefault("original_max_position", hf["max_position_embeddings"])
        fields.setdefault("factor", hf["max_position_embeddings"] / fields["original_max_position"])
    for key in ("factor", "theta"):
        if key in fields:
            fields[key] = float(fields[key])
    return RopeConfig(**fields)


def _write_rope(rope: RopeConfig) -> HfConfig:
    used = {key: getattr(rope, ROPE_KEYS[key]) for key in USED_ROPE_KEYS[rope.type]}
    used = {key: value for key, value in used.items() if value is not None}
    scaling = None if rope.type == "default" else {"rope_type": rope.type, **used}
    return {
        "rope_parameters": {"rope_theta": rope.theta, "rope_type": rope.type, **used},
        "rope_theta": rope.theta,  # this key and the next are what transformers 4 reads
        "rope_scaling": scaling,
    }
