"""DAPO teaches the shipped tiny model to carry, from prompts whose answers are neither all right nor all wrong.

    python -m jaxrl_llm.main --config configs/tiny_dapo.py

The task and its evaluation are those of `configs/tiny_grpo.py`. A step draws batches of 64 prompts until 64 have
answers that differ: two batches at first, four in the end. A longer run needs ever more and ends with a message once
ten are not enough (`algorithm.max_num_gen_batches`): hence 40 steps.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.966 in 40 steps and 23 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "dapo"
    config.num_steps = 40
    config.eval.every_steps = 20
    return config
