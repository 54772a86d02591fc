"""Mistral 7B (arXiv:2310.06825): Llama with a sliding window in every layer, where the config has one."""

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import Family, HfConfig, read_shared
from jaxrl_llm.models.tensors import llama_rules


def _read(hf: HfConfig) -> ModelConfig:
    return read_shared(hf, windows=(hf["sliding_window"],) * hf["num_hidden_layers"])


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    required={"hidden_act": "silu", "layer_types": None, "quantization_config": None},
    read=_read,
    write=lambda config: {"sliding_window": config.windows[0]},
    rules=llama_rules,
)
