"""The shipped tiny model learns to carry from a teacher that can, on answers that it writes itself.

    python -m jaxrl_llm.main --config configs/tiny_grpo.py            # makes the teacher, in outputs/tiny_grpo
    python -m jaxrl_llm.main --config configs/tiny_distillation.py

The task and its evaluation are those of `configs/tiny_grpo.py`. No reward is learned from; the one given is only told.
Greedy accuracy on the 505 held-out sums, one run, of a teacher at 0.968: 0.333 → 0.937 in 30 steps and 12 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "distillation"
    config.teacher.path = "outputs/tiny_grpo"
    config.num_steps = 30
    config.train_batch_size = 256
    config.training.mini_batch_size = 0
    config.rollout.samples_per_prompt = 1
    return config
