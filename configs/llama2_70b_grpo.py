"""GRPO on a model of Llama 2 70B's shape: a configuration to plan with, on GPUs that are not here.

    python -m jaxrl_llm.main plan --config configs/llama2_70b_grpo.py --devices 64 --device-kind H200

As `configs/llama2_7b_grpo.py`, with the matrices split over the 8 GPUs of a machine. On 8 H200s it does not fit.
"""

from llama2_7b_grpo import LLAMA2_7B
from llama2_7b_grpo import get_config as get_7b_config

LLAMA2_70B = {
    **LLAMA2_7B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def get_config():
    config = get_7b_config()
    config.model.architecture = LLAMA2_70B
    config.mesh.tensor = 8
    config.mesh.fsdp = -1
    return config
