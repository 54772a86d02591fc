"""PPO with a critic of its own teaches the shipped tiny model to carry.

    python -m jaxrl_llm.main --config configs/tiny_ppo.py

The task and its evaluation are those of `configs/tiny_grpo.py`. The critic starts as the policy with a new value head
and learns alone for the first five steps.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.962 in 80 steps and 46 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "ppo"
    config.critic.optimizer.learning_rate = 1e-3
    config.critic.warmup_steps = 5
    return config
