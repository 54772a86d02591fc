"""Two agents learn to add together, each by PPO of its own.

    python -m jaxrl_llm.main --config configs/tiny_ippo.py

The second agent reads the prompt, what the first wrote, and the prompt again; both learn from the reward of its answer
and the first one's. The task and its evaluation, of the last answer, are those of `configs/tiny_grpo.py`.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "ippo"
    config.algorithm.shared_reward = "mean"
    config.rollout.samples_per_prompt = 4
    config.critic.optimizer.learning_rate = 1e-3
    config.critic.warmup_steps = 5
    return config
