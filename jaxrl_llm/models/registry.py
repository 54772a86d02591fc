"""The model families, by Hugging Face architecture name. A new family is one file in ``families`` and one line here.

A family (`families.family.Family`) says how a ``config.json`` becomes a `ModelConfig`, and which tensor of a file holds
which parameter (`tensors.TensorRule`). All that a `ModelConfig` can say is computed already: generation, training,
adapters and export need nothing more. What it can't say (norms other than RMSNorm, activations other than SiLU, biases
of other matrices than q, k and v, experts, scaled residuals) needs `decoder.py` and `blocks.py`, and a parameter is
read from a tensor of its own, so files that keep q, k and v in one (Phi-3) need `tensors.py`.

A complete file, of a model of Llama's shape that may have biases, whose blocks have names of their own and which keeps
its last projection the other way round::

    import dataclasses

    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.families.family import Family, HfConfig, read_shared
    from jaxrl_llm.models.tensors import TensorRule, llama_rules, rule

    def read(hf: HfConfig) -> ModelConfig:
        return read_shared(hf, qkv_bias=hf["use_qkv_bias"])

    def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
        found = {one.path: one for one in llama_rules(config)}
        for path, one in found.items():
            name = one.tensor.replace("model.layers.", "model.blocks.").replace("self_attn.", "attention.")
            found[path] = dataclasses.replace(one, tensor=name)
        # The parameter's dimensions, then the file's: F features to D of the width in both; llama_rules has "D F".
        found["mlp/down"] = rule("mlp/down", "model.blocks.{layer}.mlp.down.weight", "F D", "F D")
        return tuple(found.values())

    NEW = Family(
        architecture="NewForCausalLM",
        model_type="new",
        defaults={  # of keys that a config.json leaves out
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "use_qkv_bias": False,
        },
        required={"hidden_act": "silu", "quantization_config": None},  # other values are refused, not ignored
        read=read,
        write=lambda config: {"use_qkv_bias": config.qkv_bias},  # what `export` adds to the keys of all families
        rules=rules,
    )
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import Family
from jaxrl_llm.models.families.llama import LLAMA
from jaxrl_llm.models.families.mistral import MISTRAL
from jaxrl_llm.models.families.qwen2 import QWEN2
from jaxrl_llm.models.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


MOST_LAYERS = 10_000
"""Of any model that is read: what is kept of each layer takes all memory where a damaged file tells of a billion."""


def config_from_hf(hf: Mapping[str, Any], source: str) -> ModelConfig:
    """The ModelConfig of a ``config.json``; ``source`` names it in errors.

    Raises:
      UserError: an architecture that is not supported (the message lists those that are), or an option of it.
    """
    named = hf.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture is None:  # older files name only the type
        types = {family.model_type: family.architecture for family in FAMILIES.values()}
        architecture = types.get(hf.get("model_type", ""))
    if architecture not in FAMILIES:
        raise UserError(
            f"{source} has the architecture {named or hf.get('model_type')!r}, which is not supported; supported are "
            f"{', '.join(FAMILIES)}. Choose a model of one of these."
        )
    layers = hf.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UserError(
            f"{source} has num_hidden_layers = {layers}; at most {MOST_LAYERS} are read. The file is damaged: fetch it "
            "again."
        )
    return FAMILIES[architecture].from_hf({**hf, "architectures": [architecture]})
