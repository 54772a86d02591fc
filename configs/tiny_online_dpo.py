"""Online DPO teaches the shipped tiny model to carry: of its own eight answers, the best is preferred to the worst.

    python -m jaxrl_llm.main --config configs/tiny_online_dpo.py

The task and its evaluation are those of `configs/tiny_grpo.py`. Prompts whose answers are all right or all wrong give
no pair.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.931 in 60 steps and 15 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "online_dpo"
    config.training.mini_batch_size = 0
    config.num_steps = 60
    config.eval.every_steps = 20
    return config
