"""`jaxrl_llm.generate`: one call from a model's path to completions, by the engine that training uses."""

import pytest

import jaxrl_llm
from jaxrl_llm import RLTrainer, UserError

PROMPTS = ["37+58=", "4+9=", "10+20="]


def test_completions_of_a_model_by_its_path():
    """Those of `RLTrainer.generate` before its first step with the same seed, and the streamed text adds up to them.

    Seen to catch: the temperature not passed on; the last text not shown."""
    shown: dict[tuple[int, int], str] = {}

    def on_text(prompt, sample, text):
        shown[prompt, sample] = shown.get((prompt, sample), "") + text

    groups = jaxrl_llm.generate(
        "builtin:tiny_addition", PROMPTS, max_new_tokens=4, samples_per_prompt=3, temperature=1.5, on_text=on_text
    )
    with RLTrainer(
        model="builtin:tiny_addition",
        reward=lambda prompt, completion, answer: 0.0,
        rollout_len=4,
        options={"rollout.temperature": 1.5, "rollout.samples_per_prompt": 3},
    ) as trainer:
        expected = trainer.generate(PROMPTS)
    assert [[completion.text for completion in group] for group in groups] == expected
    assert shown == {(p, s): text for p, group in enumerate(expected) for s, text in enumerate(group) if text}
    assert all(len(c.logprobs) == len(c.token_ids) for group in groups for c in group)


def test_bad_arguments_are_named():
    with pytest.raises(UserError, match="no prompt"):
        jaxrl_llm.generate("builtin:tiny_addition", [])
    with pytest.raises(UserError, match=r"Did you mean 'rollout\.temperature'"):
        jaxrl_llm.generate("builtin:tiny_addition", PROMPTS, max_new_tokens=4, options={"rollout.temperatur": 1.0})
    with pytest.raises(UserError, match="context"):
        jaxrl_llm.generate("builtin:tiny_addition", PROMPTS, max_new_tokens=100_000)


def test_options_by_name_are_not_overruled():
    """Caught: the default length put over an option that was given; the limit on prompts lifted."""
    options = {"rollout.max_new_tokens": 2, "rollout.ignore_eos": True, "rollout.samples_per_prompt": 3}
    ((*completions,),) = jaxrl_llm.generate("builtin:tiny_addition", ["1+1="], options=options)
    assert [len(completion.token_ids) for completion in completions] == [2, 2, 2]
    with pytest.raises(UserError, match="max_prompt_tokens"):
        jaxrl_llm.generate("builtin:tiny_addition", PROMPTS, options={"data.max_prompt_tokens": 2})


def test_without_a_length_the_context_is_the_limit():
    """Caught: 256 whatever the model's context."""
    ((completion,),) = jaxrl_llm.generate("builtin:tiny_addition", ["1+1="], options={"rollout.ignore_eos": True})
    assert len(completion.token_ids) == 32 - 5  # a BOS and four characters
