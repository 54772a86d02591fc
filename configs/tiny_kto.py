"""KTO teaches the shipped tiny model to carry, from answers labelled right or wrong.

    python -m jaxrl_llm.main --config configs/tiny_kto.py

Rows of `builtin:addition/labels` are single answers with a label. The task and its evaluation are those of
`configs/tiny_grpo.py`; nothing is generated while training.
"""

import tiny_grpo


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "kto"
    config.data.train = "builtin:addition/labels"
    config.num_steps = 80
    config.train_batch_size = 256
    config.training.mini_batch_size = 0
    config.optimizer.learning_rate = 3e-4
    return config
