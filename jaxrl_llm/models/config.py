"""What a decoder is made of: one frozen, hashable record, so that it can be a static argument of a jit.

A record is read from a Hugging Face ``config.json`` by the model's family (``models/families``) and written
back by it. Nothing here knows a Hugging Face key.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxrl_llm.errors import UserError

LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices of a block that can have an adapter."""

VOCABULARY_MULTIPLE = 8
"""The vocabulary's rows are padded to a multiple of it. Padded rows have probability 0 and are not exported."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base and how its frequencies are stretched beyond the first context.

    Attributes:
      theta: the base.
      type: one of ``ROPE_TYPES``.
      factor: how many times longer the context became; ignored by ``default``.
      original_max_position: context before stretching, in tokens; needed by dynamic, llama3 and yarn.
      low_freq_factor, high_freq_factor: llama3 only.
      beta_fast, beta_slow: yarn only; rotations within the original context between which it interpolates.
      attention_factor: yarn only; multiplies cos and sin. None derives it from ``mscale`` and ``mscale_all_dim``
        (both given) or from ``factor``.
      truncate: yarn only; rounds the interpolation range to whole dimensions.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise UserError(
                f"The model's rope type is {self.type!r}; supported are {', '.join(ROPE_TYPES)}. "
                "Choose a model that uses one of these."
            )
        if self.type in ("dynamic", "llama3", "yarn") and self.original_max_position <= 0:
            raise UserError(
                f"The model's rope type {self.type!r} needs original_max_position_embeddings (tokens, above 0), "
                f"but the value is {self.original_max_position}. Add it to the rope parameters of config.json."
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and options of one decoder.

    Attributes:
      architecture: the Hugging Face class name, a key of ``FAMILIES``.
      vocab_size: rows of the model's vocabulary, as in its ``config.json``. Those beyond the tokenizer are real
        rows: they take part in every softmax and are exported.
      padded_vocab_size: rows of the arrays, at least ``vocab_size``, so that a mesh divides them. The extra rows
        are masked out of every softmax and never exported.
      max_position: the context in tokens, prompt and response together.
      windows: per layer, how many tokens a query sees, itself included; None sees the whole context.
      attention_scale: what scores are multiplied by; None is ``1/sqrt(head_size)``.
      init_scale: standard deviation of the weights of a model made from scratch.
      extra_json: keys of the model's ``config.json`` that this project does not use, kept for export.
    """

    architecture: str
    vocab_size: int
    padded_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    init_scale: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    extra_json: str = "{}"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"The model's {name} is {getattr(self, name)}; it must be at least 1. Correct its config.json."
                )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"The model has {self.num_heads} query heads and {self.num_kv_heads} key/value heads; the first "
                "must be a multiple of the second. Correct num_key_value_heads in its config.json."
            )
        if self.head_size % 2:
            raise UserError(
                f"The model's head size is {self.head_size}; rotary embeddings need an even one. "
                "Correct head_dim in its config.json."
            )
        if self.padded_vocab_size < self.vocab_size:
            raise UserError(
                f"padded_vocab_size is {self.padded_vocab_size}, below the model's vocab_size {self.vocab_size}."
            )
        if len(self.windows) != self.num_layers:
            raise UserError(f"windows has {len(self.windows)} entries for {self.num_layers} layers.")
        if any(window is not None and window < 1 for window in self.windows):
            raise UserError(f"A sliding window must be at least 1 token; the model's are {self.windows}.")

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return 1.0 / math.sqrt(self.head_size) if self.attention_scale is None else self.attention_scale

    def end_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Ids that end a response: the model's own, and the tokenizer's, which supervised completions end with and
        which the files of a base model often don't name. ``tokenizer`` may be None."""
        other = None if tokenizer is None else tokenizer.eos_token_id
        if other is None or other in self.eos_token_ids:
            return self.eos_token_ids
        return (*self.eos_token_ids, other)

    def with_vocab_multiple(self, multiple: int = 0) -> ModelConfig:
        """The same model with its vocabulary arrays padded to a multiple.

        Args:
          multiple: 0 is one that every ``tensor`` divides over which heads and MLP can be split, in training or in
            generation, and `VOCABULARY_MULTIPLE`: of the model alone, so that a checkpoint of one mesh fits another.
        """
        if multiple == 0:
            multiple = math.lcm(VOCABULARY_MULTIPLE, math.gcd(self.num_kv_heads, self.intermediate_size))
        padded = -(-self.vocab_size // multiple) * multiple
        return dataclasses.replace(self, padded_vocab_size=padded)


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv:2106.09685): each target's matrix W acts as ``W + alpha / rank * A @ B``.

    Attributes:
      rank: columns of A and rows of B, at least 1.
      alpha: above 0; with the rank it scales the branch, so that a change of rank asks for no other learning rate.
      targets: of ``LORA_TARGETS``, without repetition; kept in that order.

    Raises:
      UserError: a value that is not allowed.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"The rank of the LoRA adapters is {self.rank}; it must be at least 1.")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"The alpha of the LoRA adapters is {self.alpha}; it must be above 0 and finite.")
        unknown = [name for name in self.targets if name not in LORA_TARGETS]
        if unknown or not self.targets or len(set(self.targets)) != len(self.targets):
            raise UserError(
                f"The targets of the LoRA adapters are {', '.join(map(repr, self.targets)) or 'none'}; give one or "
                f"more of {', '.join(LORA_TARGETS)}, each once."
            )
        object.__setattr__(self, "targets", tuple(name for name in LORA_TARGETS if name in self.targets))

    @property
    def scale(self) -> float:
        """What ``A @ B`` is multiplied by."""
        return self.alpha / self.rank
