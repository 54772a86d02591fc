"""KTO teaches the shipped tiny model to carry, from answers labelled right or wrong.

    python -m jaxrl_llm.main --config configs/tiny_kto.py

Rows of `builtin:addition/labels` are single answers with a label. The task and its evaluation are those of
`configs/tiny_grpo.py`; nothing is generated while training.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.907 in 80 steps and 50 s.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "kto"
    config.algorithm.beta = 1.0
    config.data.train = "builtin:addition/labels"
    config.num_steps = 80
    config.train_batch_size = 256
    config.training.mini_batch_size = 0
    config.optimizer.learning_rate = 1e-4
    config.eval.every_steps = 20
    return config
