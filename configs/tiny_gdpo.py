"""GDPO teaches the shipped tiny model to carry from two rewards, each normalised in its group before they are added.

    python -m jaxrl_llm.main --config configs/tiny_gdpo.py

The task and its evaluation are those of `configs/tiny_grpo.py`. Beside the exact answer, which a group may never hit,
the share of right digits is rewarded, by a function in this file.
Greedy accuracy on the 505 held-out sums, one run: 0.333 → 0.950 in 60 steps and 21 s.
"""

import tiny_grpo


def digits(completion, answer):
    """The share of the answer's digits that the completion has in their places, counted from the last."""
    right = sum(written == wanted for written, wanted in zip(reversed(completion), reversed(answer), strict=False))
    return right / max(len(completion), len(answer))


def get_config():
    config = tiny_grpo.get_config()
    config.algorithm.name = "gdpo"
    config.rewards = {
        "exact": {"function": "exact_match"},
        "digits": {"function": f"{__file__}:digits", "weight": 0.5},
    }
    config.eval.accuracy_reward = "exact"
    config.num_steps = 60
    config.eval.every_steps = 20
    return config
