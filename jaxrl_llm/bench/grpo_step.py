"""One GRPO step of this project, part by part, and the same work by TRL."""

from __future__ import annotations

import statistics
import time

from jaxrl_llm.bench import peers
from jaxrl_llm.bench.workload import Workload, digits


def reward(prompt, completion, answer, **_):
    return digits(completion)


def measure(model: str, work: Workload) -> dict[str, float]:
    """Medians of one GRPO step of this project."""
    import numpy as np

    from jaxrl_llm import config as configs
    from jaxrl_llm.observability.timing import CompileCounter, peak_memory_bytes
    from jaxrl_llm.trainer import Trainer
    from jaxrl_llm.types import Example

    config = configs.default_config("grpo")
    config.model.path = model
    config.train_batch_size = work.prompts
    config.num_steps = work.steps + 1
    config.data.max_prompt_tokens = work.prompt_tokens
    config.rollout.samples_per_prompt = work.samples
    config.rollout.max_new_tokens = work.new_tokens
    config.rollout.num_slots = work.sequences
    config.rollout.ignore_eos = True
    config.training.micro_batch_tokens = work.prompts * (work.prompt_tokens + work.samples * work.new_tokens)
    config.rewards = {"digits": {}}
    steps: list[dict[str, float]] = []
    with CompileCounter() as compiles:
        trainer = Trainer(configs.resolve(config), rewards={"digits": reward})
        for step in range(work.steps + 1):
            examples = [
                Example(
                    uid=f"{row}@{step}",
                    prompt="",
                    prompt_ids=np.array(trainer_prompt(trainer, work, step * work.prompts + row), np.int32),
                    row=row,
                    epoch=step,
                )
                for row in range(work.prompts)
            ]
            start = time.perf_counter()
            metrics, _ = trainer.step(examples)
            steps.append({**metrics, "seconds": time.perf_counter() - start})
            if step == 0:
                compile_s, compile_count = compiles.seconds, compiles.count
        warm_compiles = compiles.count - compile_count
    trainer.close()

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps[1:])

    return {
        "step_s": median("seconds"),
        "generation_s": median("time/generation_s"),
        "update_s": median("time/update_s"),
        "layout_s": median("time/layout_s"),
        "reward_s": median("time/reward_s"),
        "generation_tokens_per_s": median("perf/generation_tokens_per_s"),
        "generation_host_fraction": median("perf/host_fraction"),
        "train_tokens_per_s": median("perf/train_tokens_per_s"),
        "compile_s": compile_s,
        "compiles_first_step": compile_count,
        "compiles_later": warm_compiles,
        "peak_memory_gib": peak_memory_bytes() / 2**30,
        "logprob_diff_max": max(step["rollout/logprob_diff_max"] for step in steps),
    }


def trainer_prompt(trainer, work: Workload, index: int) -> list[int]:
    return work.prompt_ids(trainer.tokenizer, index)


def measure_trl(python: str, model: str, work: Workload, allocator: bool) -> dict[str, float]:
    """Seconds and peak memory of the same step by TRL in another environment, with this program's allocator setting or
    as it comes."""
    flags = {name: getattr(work, name) for name in ("prompts", "samples", "prompt_tokens", "new_tokens", "steps")}
    return peers.run(python, "trl_step.py", model, flags, allocator=allocator)
