"""GRPO on a model of Llama 2 7B's shape: a configuration to plan with, on GPUs that are not here.

    python -m jaxrl_llm.main plan --config configs/llama2_7b_grpo.py --devices 8 --device-kind H200

No weights are needed. To train, set `model.path` in place of the shape, `data.train`, and the rewards. On 8 H200s it
fits; the README has the plans for 8, 64 and 512.
"""

from jaxrl_llm.config import default_config

LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def get_config():
    config = default_config("grpo")
    config.model.architecture = LLAMA2_7B
    config.tokenizer.path = "meta-llama/Llama-2-7b-hf"
    config.model.remat = "full"
    config.data.max_prompt_tokens = 512
    config.rewards = {"math": {"function": "math"}}

    config.train_batch_size = 512
    config.training.micro_batch_tokens = 8192
    config.rollout.samples_per_prompt = 8
    config.rollout.max_new_tokens = 1536
    config.rollout.num_slots = 64
    config.optimizer.learning_rate = 1e-6
    return config
