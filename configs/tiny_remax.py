"""ReMax teaches the shipped tiny model to carry: one sampled answer a prompt against the greedy one.

    python -m jaxrl_llm.main --config configs/tiny_remax.py

The task and its evaluation are those of `configs/tiny_grpo.py`; a step has 256 prompts, each answered twice: once
sampled and trained on, once greedily as the baseline.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.954 in 60 steps and 58 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "remax"
    config.num_steps = 60
    config.training.micro_batch_tokens = 1024
    config.eval.every_steps = 20
    config.train_batch_size = 256
    config.training.mini_batch_size = 128
    config.rollout.samples_per_prompt = 1
    return config
