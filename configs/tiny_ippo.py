"""Two agents learn to add together, each by PPO of its own.

    python -m jaxrl_llm.main --config configs/tiny_ippo.py

The second agent reads the prompt, what the first wrote, and the prompt again, which the shipped model has never seen:
it is almost always wrong at first. So the share of right digits is rewarded too; the last answer's reward is that of
both.
Greedy accuracy of the last answer on the 505 held-out sums, one run: 0.026 → 0.463 in 80 steps and 103 s.
"""

import pathlib

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "ippo"
    config.algorithm.shared_reward = "last"
    config.rewards = {
        "exact": {"function": "exact_match"},
        "digits": {"function": f"{pathlib.Path(__file__).parent / 'tiny_gdpo.py'}:digits"},
    }
    config.eval.accuracy_reward = "exact"
    config.rollout.samples_per_prompt = 4
    config.optimizer.learning_rate = 1e-3
    config.critic.optimizer.learning_rate = 1e-3
    config.num_steps = 80
    config.training.mini_batch_size = 0
    config.training.micro_batch_tokens = 512
    config.eval.every_steps = 20
    return config
