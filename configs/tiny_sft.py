"""Makes the small model that ships with the package: two-operand addition that forgets its carries.

    python -m jaxrl_llm.main --config configs/tiny_sft.py
    python -m jaxrl_llm.main export --config configs/tiny_sft.py --output outputs/tiny_addition

A Llama-shaped model of 371,328 parameters, from scratch, on `builtin:addition/sft`: four of five labels drop every
carry, one of five is right. So greedy decoding answers about three in ten held-out sums (those without a carry),
and the right answers keep enough probability for reinforcement learning to find (`configs/tiny_grpo.py`).
About a minute and a half on 2 CPU cores.
"""

from jaxrl_llm.config import default_config


def get_config():
    config = default_config("sft")
    config.model.architecture = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config.tokenizer.path = "builtin:tiny_addition"
    config.data.train = "builtin:addition/sft"
    config.data.eval = "builtin:addition/eval"
    config.data.max_prompt_tokens = 8
    config.rollout.max_new_tokens = 8
    config.rollout.num_slots = 256
    config.rewards = {"exact": {"function": "exact_match"}}

    config.num_steps = 400
    config.train_batch_size = 256
    config.optimizer.learning_rate = 2e-3
    config.optimizer.b2 = 0.99
    config.optimizer.warmup_steps = 40
    config.optimizer.schedule = "cosine"
    config.optimizer.final_fraction = 0.05
    config.checkpoint.every_steps = 200
    config.checkpoint.best_metric = ""  # the last model is the one to ship, not the one with the best accuracy
    return config
