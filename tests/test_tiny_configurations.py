"""Each tiny configuration learns: a few steps on one small batch, measured on that batch by what no loss computes.

The batch's prompts are such that the shipped model answers wrong. Its rows are written to a file that a step takes
whole, so every step sees the same ones. The rate is three times the file's, and warm-up is off, for a few steps to do.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.config import resolve
from jaxrl_llm.config_file import read_config
from jaxrl_llm.data.addition import add_without_carries, addition_rows
from jaxrl_llm.data.prompts import require_eos
from jaxrl_llm.trainer import Trainer

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
ANSWERS = 128
STEPS = 6


def right_sum(prompt: str) -> int:
    return sum(map(int, prompt.removesuffix("=").split("+")))


def needs_a_carry(prompt: str) -> bool:
    return add_without_carries(*map(int, prompt.removesuffix("=").split("+"))) != right_sum(prompt)


def small_run(path: pathlib.Path, folder: pathlib.Path, teacher: Callable[[], str] = str) -> Trainer:
    """The configuration's run on about `ANSWERS` answers a step, split into as many mini-batches as the file says.

    Args:
      teacher: makes the model of a run that learns from one.
    """
    config = read_config(str(path))
    prompts = ANSWERS // config.rollout.samples_per_prompt
    wanted = [row["prompt"] for row in addition_rows("train") if needs_a_carry(row["prompt"])][:prompts]
    rows = [row for row in addition_rows(config.data.train.rpartition("/")[2]) if row["prompt"] in wanted]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.training.mini_batch_size = config.training.mini_batch_size * len(rows) // config.train_batch_size
    config.train_batch_size = len(rows)
    config.data.train = config.data.eval = str(file)
    config.num_steps = STEPS
    config.optimizer.learning_rate *= 3
    config.optimizer.warmup_steps = 0
    config.optimizer.schedule = "constant"
    config.critic.warmup_steps = min(1, config.critic.warmup_steps)
    # The same programs for as many files as can be: compiling is most of the time.
    config.training.micro_batch_tokens = 512
    config.rollout.num_slots = ANSWERS
    config.rollout.tokens_per_dispatch = config.rollout.max_new_tokens
    if config.teacher.path:
        config.teacher.path = teacher()
    return Trainer(resolve(config, 1), devices=jax.devices()[:1])


def learn(trainer: Trainer) -> None:
    assert trainer.data is not None
    for _ in range(STEPS):
        trainer.step(next(trainer.data))


def answer_logprob(trainer: Trainer) -> float:
    """Mean log-probability of the right answer to a prompt of the batch, its end included."""
    tokens, masks = [], []
    for example in {example.prompt: example for example in trainer.eval_examples}.values():
        answer = trainer.tokenizer.encode(str(right_sum(example.prompt)), add_special_tokens=False)
        answer.append(require_eos(trainer.tokenizer))
        tokens.append(np.concatenate([example.prompt_ids, answer]).astype(np.int32))
        masks.append(np.arange(len(tokens[-1])) >= len(example.prompt_ids))
    sequences = Sequences(tokens, masks, np.arange(len(tokens), dtype=np.int32))
    found = trainer.per_token("policy", sequences, "logprobs")
    return float(np.mean([one[mask].sum() for one, mask in zip(found, masks, strict=True)]))


def measured(trainer: Trainer) -> tuple[float, float]:
    """How well the batch is known, and by how much that has to rise.

    A step that does nothing leaves it, one of the wrong sign lowers it.
    """
    if trainer.algorithm.evaluate is not None:  # a share of pairs: 0 of a new head, and 1 is reached
        return trainer.evaluate()["eval/accuracy"], 0.5
    if trainer.algorithm.answer is not None:  # of several that answer in turn: the greedy answers' mean reward
        return trainer.evaluate()["eval/reward/mean"], 0.03
    # From -2.2 or -2.3, in nats. The least is reached by `distillation` (0.3), whose teacher is little ahead, then
    # `gspo` (0.7), whose second update of a step is clipped; the most by `gmpo` and `cispo` (2.1).
    return answer_logprob(trainer), 0.15


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that knows the batch: what GRPO makes of the shipped one."""
    folder = tmp_path_factory.mktemp("teacher")
    trainer = small_run(CONFIGS / "tiny_grpo.py", folder)
    learn(trainer)
    trainer.export(folder / "exported")
    trainer.close()
    return str(folder / "exported")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("tiny_*.py")), ids=lambda path: path.stem)
def test_a_tiny_configuration_learns(path: pathlib.Path, tmp_path: pathlib.Path, request: pytest.FixtureRequest):
    """Caught: the sign of the advantage (`rloo`, `ppo`), of the margin (`dpo`, `reward_model`) or of the likelihood
    (`sft`)."""
    trainer = small_run(path, tmp_path, lambda: request.getfixturevalue("teacher"))
    before, margin = measured(trainer)
    learn(trainer)
    after, _ = measured(trainer)
    trainer.close()
    assert after > before + margin, f"{before:.3f} -> {after:.3f}"
