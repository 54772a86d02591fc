"""The notebook interface."""

import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.errors import UserError

OPTIONS = {
    "rollout.samples_per_prompt": 4,
    "rollout.num_slots": 8,
    "data.max_prompt_tokens": 8,
    "optimizer.learning_rate": 3e-4,
}


def test_step_takes_any_number_of_prompts_and_a_local_function():
    """Caught: a step that drops prompts beyond train_batch_size; a reward that must be importable; the second update of
    a step that takes the policy after the first one as the one that sampled (the run would stop itself)."""
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
        with pytest.raises(UserError, match="max_prompt_tokens"):
            trainer.step(["1+" * 40])
        with pytest.raises(UserError, match="answers"):
            trainer.step(["1+2="], answers=["3", "4"])


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


@pytest.mark.parametrize("algo", ["sft", "dpo", "kto", "reward_model"])
def test_an_algorithm_that_reads_completions_is_refused(algo):
    """Prompts alone give it nothing to learn from. Caught: an assertion in the first step, and before it nothing."""
    with pytest.raises(UserError, match=rf"algo='{algo}' learns from completions .*configs/tiny_{algo}\.py"):
        jaxrl_llm.RLTrainer(model="builtin:tiny_addition", algo=algo, rollout_len=8)
