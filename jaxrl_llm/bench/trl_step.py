"""The same GRPO step by TRL's GRPOTrainer; run by the Python of an environment with torch, transformers and trl.

    /path/to/trl/bin/python trl_step.py --model FOLDER [--prompts 2 --samples 8 ...]

Prints one JSON line. Left on its defaults except for what defines the work: float32, one update per rollout,
completions of exactly `new_tokens` and no evaluation or saving.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import add_arguments, digits, from_arguments


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    add_arguments(parser)
    arguments = parser.parse_args()
    work = from_arguments(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = [{"prompt": tokenizer.decode(work.prompt_ids(tokenizer, index))} for index in range(256)]
    lengths = {len(tokenizer(row["prompt"])["input_ids"]) for row in rows}
    assert lengths == {work.prompt_tokens}, f"TRL would read prompts of {lengths} tokens, not {work.prompt_tokens}"
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [digits(text) for text in completions],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=work.sequences,
                num_generations=work.samples,
                max_completion_length=work.new_tokens,
                generation_kwargs={"min_new_tokens": work.new_tokens},
                max_steps=work.steps + 1,
                beta=0.0,
                use_cpu=True,
                bf16=False,
                save_strategy="no",
                report_to=[],
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    measured = clock.seconds[1:]  # the first step allocates
    # Not getrusage: its figure begins with that of the process which started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 2**30
    result = {"step_s": statistics.median(measured), "steps_s": measured, "peak_memory_gib": peak}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
