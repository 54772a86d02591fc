"""Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783) and models of the same shape, such as SmolLM2."""

from jaxrl_llm.models.families.family import Family, read_shared
from jaxrl_llm.models.tensors import llama_rules

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_interleaved": False,
        "quantization_config": None,
    },
    read=read_shared,
    write=lambda config: {"attention_bias": False, "mlp_bias": False},
    rules=llama_rules,
)
