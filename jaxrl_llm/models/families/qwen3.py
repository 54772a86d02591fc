"""Qwen3, dense (arXiv:2505.09388): RMSNorm on every query and key head, no biases, an explicit head size."""

from jaxrl_llm.models.families.family import Family, read_shared
from jaxrl_llm.models.families.qwen2 import DEFAULTS, qwen_windows, write_qwen_windows
from jaxrl_llm.models.tensors import llama_rules

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults=DEFAULTS | {"head_dim": 128},
    required={"hidden_act": "silu", "attention_bias": False, "quantization_config": None},
    read=lambda hf: read_shared(hf, windows=qwen_windows(hf), qk_norm=True),
    write=lambda config: {**write_qwen_windows(config), "attention_bias": False},
    rules=llama_rules,
)
