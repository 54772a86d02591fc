"""The model families, by Hugging Face architecture name. A new family is one file in ``families`` and one line here."""

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
    return FAMILIES[architecture].from_hf({**hf, "architectures": [architecture]})
