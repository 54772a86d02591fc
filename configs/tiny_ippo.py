"""Two agents learn to add together, each by PPO of its own.

    python -m jaxrl_llm.main --config configs/tiny_ippo.py

The second agent reads the prompt, what the first wrote, and the prompt again, which the shipped model has never seen:
it is almost always wrong at first. So the share of right digits is rewarded too; the last answer's reward is that of
both. A step has 512 prompts with an answer each; values come from the agents' own trunks, which halves the time of
updates. An answer that is cut is finished: its score says all, and a value added to it would reward the agent for never
ending.
Greedy accuracy of the last answer on the 505 held-out sums, one run: 0.026 → 0.857 in 100 steps and 146 s.
"""

import pathlib

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "ippo"
    config.algorithm.shared_reward = "last"
    config.algorithm.shared_trunk = True
    config.algorithm.bootstrap_truncated = False
    config.rewards = {
        "exact": {"function": "exact_match"},
        "digits": {"function": f"{pathlib.Path(__file__).parent / 'tiny_gdpo.py'}:digits"},
    }
    config.eval.accuracy_reward = "exact"
    config.train_batch_size = 512
    config.training.mini_batch_size = 256
    config.training.micro_batch_tokens = 1024
    config.rollout.samples_per_prompt = 1
    config.rollout.num_slots = 512
    config.optimizer.learning_rate = 8e-4
    config.optimizer.schedule = "cosine"
    config.num_steps = 100
    config.eval.every_steps = 20
    return config
