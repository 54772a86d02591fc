"""Dr. GRPO teaches the shipped tiny model to carry: GRPO without its two biases.

    python -m jaxrl_llm.main --config configs/tiny_dr_grpo.py

The task and its evaluation are those of `configs/tiny_grpo.py`. Advantages are not divided by the group's standard
deviation and the loss is divided by a constant, so that any prompt and any length counts alike.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.962 in 60 steps and 32 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "dr_grpo"
    config.num_steps = 60
    config.training.micro_batch_tokens = 512
    config.eval.every_steps = 20
    return config
