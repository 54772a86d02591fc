"""DPO teaches the shipped tiny model to carry, from pairs of a right and a wrong answer.

    python -m jaxrl_llm.main --config configs/tiny_dpo.py

Each row of `builtin:addition/preferences` prefers the right sum to one that gets a carry wrong. The task and its
evaluation are those of `configs/tiny_grpo.py`; nothing is generated while training.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.919 in 120 steps and 61 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "dpo"
    config.algorithm.beta = 1.0
    config.data.train = "builtin:addition/preferences"
    config.num_steps = 120
    config.train_batch_size = 256
    config.training.mini_batch_size = 0
    config.optimizer.learning_rate = 2e-4
    config.eval.every_steps = 20
    return config
