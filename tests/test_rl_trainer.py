"""The notebook interface."""

import dataclasses
import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Sequence

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm import rl_trainer
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.trainer import Trainer

OPTIONS = {
    "rollout.samples_per_prompt": 4,
    "rollout.num_slots": 8,
    "data.max_prompt_tokens": 8,
    "optimizer.learning_rate": 3e-4,
    "training.micro_batch_tokens": 64,  # of 4096, few would be tokens here
}


class Labelled(Sequence[str]):
    """As pandas has it: goes through its items in order, and finds one by its label."""

    def __init__(self, items: dict[int, str]):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __iter__(self):
        return iter(self._items.values())

    def __getitem__(self, label: int):
        return self._items[label]


class OnOneDevice(Trainer):
    """With rows for a handful of tokens, whose programs compile and run faster."""

    def __init__(self, config, *arguments, **named):
        training = dataclasses.replace(config.training, micro_batch_tokens=64, row_tokens=64)
        super().__init__(dataclasses.replace(config, training=training), *arguments, devices=jax.devices()[:1], **named)


def test_step_takes_any_number_of_prompts_and_a_local_function(monkeypatch, caplog):
    """Rows that are mostly padding are told of, once. Caught: told of in every step, or where they are full; a step
    that drops prompts beyond train_batch_size; a reward that must be importable; the second update of a step that takes
    the policy after the first one as the one that sampled (the run would stop itself); answers of a shuffled table's
    column taken by their labels (each prompt is scored against another one's answer)."""
    monkeypatch.setattr(rl_trainer, "Trainer", OnOneDevice)
    seen = 0.5

    def reward(prompt, completion, answer):  # a closure, as in a notebook cell; not the same for all of a group
        return float(completion == answer) + sum(map(ord, completion)) % 2 + seen

    with jaxrl_llm.RLTrainer(
        model="builtin:tiny_addition", reward=reward, train_batch_size=2, rollout_len=4, options=OPTIONS
    ) as trainer:
        for prompts in (["1+2=", "3+4=", "5+6="], ["7+8="]):
            answers = [str(eval(prompt[:-1])) for prompt in prompts]
            metrics, rollouts = trainer.step(prompts, answers)
            assert len(rollouts.texts) == 4 * len(prompts)
            expected = [
                reward(prompts[index], text, answers[index])
                for text, index in zip(rollouts.texts, rollouts.group, strict=True)
            ]
            np.testing.assert_allclose(rollouts.rewards, expected)
            assert metrics["reward/mean"] == pytest.approx(np.mean(expected))
        for fill, tokens in ((0.5, 20), (0.1, 40), (0.1, 20), (0.1, 20)):
            trainer.trainer._tell_of_empty_rows(fill, tokens)
        (told,) = (record.getMessage() for record in caplog.records if "rows of" in record.getMessage())
        assert "rows of 64 tokens are 10.0 % full: training.micro_batch_tokens = 20 would" in told
        shuffled = trainer.trainer.examples(Labelled({1: "3+4=", 0: "1+2="}), Labelled({1: "7", 0: "3"}))
        assert [(one.prompt, one.question, one.answer) for one in shuffled] == [
            ("3+4=", "3+4=", "7"),
            ("1+2=", "1+2=", "3"),
        ]
        with pytest.raises(UserError, match="max_prompt_tokens"):
            trainer.step(["1+" * 40])
        with pytest.raises(UserError, match="answers"):
            trainer.step(["1+2="], answers=["3", "4"])
        with pytest.raises(UserError, match="give RLTrainer workdir=FOLDER"):
            trainer.save()
    with pytest.raises(UserError, match="This trainer is closed"):
        trainer.step(["1+2="], ["3"])


def test_a_step_that_was_stopped_is_not_saved(tmp_path, monkeypatch):
    """A notebook may go on after the error. Caught: a checkpoint of what the step left, which is then the newest."""
    monkeypatch.setattr(rl_trainer, "Trainer", OnOneDevice)
    options = {**OPTIONS, "checks.logprob_diff_mean": 0.0}
    with jaxrl_llm.RLTrainer(
        "builtin:tiny_addition", reward="exact_match", workdir=tmp_path, rollout_len=4, options=options
    ) as trainer:
        with pytest.raises(RunStopped, match="above its bound 0"):
            trainer.step(["1+2=", "3+4="], ["3", "7"])
        with pytest.raises(UserError, match="was stopped, so what it left is not saved: rollout/"):
            trainer.save()
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_damaged_checkpoint_leaves_the_folder_free(tmp_path):
    """A notebook holds the error, and the frames in it. Caught: a trainer that is not closed (the second one is told
    that another process uses the folder)."""
    options = {**OPTIONS, "rollout.samples_per_prompt": 2}

    def trainer():
        return jaxrl_llm.RLTrainer(
            "builtin:tiny_addition", reward="exact_match", workdir=tmp_path, rollout_len=4, options=options
        )

    with trainer() as first:
        first.save()
    for file in (tmp_path / "checkpoints").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(b"damaged")
    with pytest.raises(UserError) as held:
        trainer()
    shutil.rmtree(tmp_path / "checkpoints")
    trainer().close()
    del held


def test_wrong_options_are_refused_before_anything_runs():
    """Caught: a rollout_len that is only refused under the name that the configuration has for it."""
    with pytest.raises(UserError, match="rollout_len=64"):
        jaxrl_llm.RLTrainer(model="builtin:tiny_addition", reward="exact_match", rollout_len=64)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate"):
        jaxrl_llm.RLTrainer(
            model="builtin:tiny_addition", reward="exact_match", rollout_len=8, options={"optimizer.learning_rte": 1}
        )


def test_prompts_of_the_wrong_form_are_named():
    """Caught: one text taken for a list of its characters, each a prompt; a number given to the template."""
    with jaxrl_llm.RLTrainer(
        model="builtin:tiny_addition", reward="exact_match", train_batch_size=2, rollout_len=4, options=OPTIONS
    ) as trainer:
        for prompts, answers, words in (
            ("1+2=", None, "prompts = '1\\+2=' is one text"),
            (["1+2=", "1+3="], "34", "answers = '34' is one text"),
            ([], None, "no prompt"),
            (["1+2=", 5], None, "Prompt 1 is 5; a non-empty text"),
            (["1+2=", None], None, "Prompt 1 is None; a non-empty text"),
            ([""], None, "Prompt 0 is ''; a non-empty text"),
            (["1+2=", "a"], None, "Prompt 1: the text 'a' can't be encoded"),
        ):
            with pytest.raises(UserError, match=words):
                trainer.step(prompts, answers)


def test_an_option_below_a_value_is_refused():
    with pytest.raises(UserError, match=r"num_steps is a single value"):
        jaxrl_llm.RLTrainer(
            model="builtin:tiny_addition", reward="exact_match", rollout_len=8, options={"num_steps.x": 1}
        )


BLOCKS = {
    block.partition('algo="')[2].partition('"')[0]: textwrap.dedent(block)
    for block in re.findall(r"::\n\n((?:    .*\n)+)", inspect.getdoc(jaxrl_llm.RLTrainer))
}
"""The examples of the class's documentation, by algorithm."""


@pytest.mark.parametrize(
    ("algo", "shown", "metric"),
    [
        ("sft", "sft", "sft/nll_mean"),
        ("dpo", "dpo", "loss/total"),
        ("reward_model", "dpo", "loss/total"),
        ("kto", "kto", "loss/total"),
    ],
)
def test_rows_of_the_documentation_are_learned_from(algo, shown, metric, monkeypatch):
    """Its code as it stands, then five more steps on its rows, which the model then likes as they say.

    Caught: a row taken for a prompt; chosen and rejected exchanged; the labels of KTO exchanged, or the sign of a
    loss.
    """
    monkeypatch.setattr(rl_trainer, "Trainer", OnOneDevice)
    names = {"RLTrainer": jaxrl_llm.RLTrainer}
    exec(BLOCKS[shown].replace(f'"{shown}"', f'"{algo}"'), names)
    with names["trainer"] as trainer:
        told = [names["metrics"]]
        before = preference(trainer.trainer, names["examples"])
        for _ in range(5):
            metrics, rollouts = trainer.step(names["examples"])
            told.append(metrics)
        assert (preference(trainer.trainer, names["examples"]) > before + 0.01).all()
        losses = [one[metric] for one in told]
        assert all(later < earlier for earlier, later in itertools.pairwise(losses)), losses
        assert {"sft": losses[0] > 0, "kto": losses[0] == 0.5}.get(algo, losses[0] == pytest.approx(np.log(2)))
        written = [trainer.trainer.tokenizer.decode(ids, skip_special_tokens=True) for ids in rollouts.responses]
        sides = [row.get("completion") or [row["chosen"], row["rejected"]] for row in names["examples"]]
        assert written == list(np.ravel(sides))
        for examples, answers, message in WRONG_ROWS[shown]:
            with pytest.raises(UserError, match=message):
                trainer.step(examples, answers)
        assert trainer.trainer.step_index == 6


def preference(trainer, rows):
    """By how much the model prefers what it should, pair by pair (of SFT: how likely it finds each completion); by what
    no loss computes. In nats, of a reward model in its scores."""
    sides = [[row["completion"]] if "completion" in row else [row["chosen"], row["rejected"]] for row in rows]
    prompts = [trainer.tokenizer.encode(row["prompt"]) for row, texts in zip(rows, sides, strict=True) for _ in texts]
    answers = [[*trainer.tokenizer.encode(text, add_special_tokens=False), 2] for text in itertools.chain(*sides)]
    tokens = [np.array([*prompt, *answer], np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(tokens, prompts, strict=True)]
    kind = "values" if trainer.main == "reward_model" else "logprobs"
    found = trainer.per_token(trainer.main, Sequences(tokens, masks, np.arange(len(tokens), dtype=np.int32)), kind)
    worth = np.array([one[-1] if kind == "values" else one.sum() for one in found])
    if "label" in rows[0]:
        (good,), (bad,) = (worth[[row["label"] is label for row in rows]] for label in (True, False))
        return np.array([good - bad])
    return worth if "completion" in rows[0] else worth[0::2] - worth[1::2]


PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
GENERAL = [
    (["1+2="], None, r"Example 0 is '1\+2='; .* learns from rows, dicts with prompt"),
    ("1+2=", None, "The examples are '1\\+2='; give a list of rows"),
    ([], None, r"The examples are \[\]; give a list of rows"),
    ([{"prompt": "1+" * 20, "chosen": "3", "rejected": "4", "completion": "3", "label": True}], None,
     r"Example 0 is longer than data\.max_prompt_tokens = 24 \(or the completion than rollout\.max_new_tokens = 8\)"),
]  # fmt: skip
WRONG_ROWS = {
    "sft": [*GENERAL, ([PAIR], None, r"has the columns prompt, chosen, rejected; .* prompt and completion")],
    "dpo": [
        *GENERAL,
        (
            [PAIR, {"prompt": "1+2=", "completion": "3"}],
            None,
            r"Example 1 has the columns prompt, completion; ",
        ),
        ([{**PAIR, "chosen": "1" * 20}], None, r"Example 0 is longer than"),
        ([{**PAIR, "rejected": "three"}], None, r"Example 0: the text 'three' can't be encoded"),
        ([PAIR], ["3"], r"answers go with prompts"),
    ],
    "kto": [
        *GENERAL,
        ([{"prompt": "1+2=", "completion": "3"}], None, r"Example 0 has the columns .*; .* completion and label"),
        ([{"prompt": "1+2=", "completion": "3", "label": "good"}], None, r"the label is 'good'; true \(desirable\)"),
        ([{"prompt": "1+2=", "completion": "3", "label": True}] * 9, None, r"9 examples, and kto .*train_batch_size=8"),
    ],
}
"""Examples, answers, and what is said of them."""
