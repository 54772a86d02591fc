"""SAPO teaches the shipped tiny model to carry, with a soft gate on the ratio in place of a clip.

    python -m jaxrl_llm.main --config configs/tiny_sapo.py

The task and its evaluation are those of `configs/tiny_grpo.py`.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "sapo"
    config.num_steps = 60
    config.training.micro_batch_tokens = 512
    config.eval.every_steps = 20
    return config
