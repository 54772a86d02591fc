"""IPPO: several agents, each with its own policy, critic and optimizers, learn independently from a shared episode.

    agent i reads the prompt and what the agents before it wrote, ends included, then the prompt again, and writes
    agent i learns by PPO from its own tokens; no gradient and no value crosses agents

arXiv:2011.09533 (independent PPO). The episode's reward is one for all: that of the last answer, or the mean of all
agents' (`shared_reward`). One agent is `ppo` exactly, to the bit. Agents start from `model.path`; with adapters
(`model.lora_rank`) they share its weights and differ in theirs alone. Evaluation lets all answer and judges the last.
`generate` asks the first, ``policy``; `export` writes it, or the agent that it is told (``policy_1`` …).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms import on_policy, ppo
from jaxrl_llm.algorithms.interface import Algorithm, Context, Role, Sequences
from jaxrl_llm.config import RunConfig, option
from jaxrl_llm.types import Example, Rollouts

LARGEST_NUMBER = 16


@dataclasses.dataclass(frozen=True)
class IPPOOptions(ppo.PPOOptions):
    """Options of `algorithm` when its name is `ippo`: those of `ppo`, and how many agents there are."""

    agents: int = option(2, "how many", low=1, high=LARGEST_NUMBER)
    shared_reward: str = option(
        "last", "the reward of all: that of the last agent's answer, or the mean", choices=("last", "mean")
    )


def names(agent: int) -> tuple[str, str]:
    """The roles of an agent: its policy and its critic."""
    return ("policy", "critic") if agent == 0 else (f"policy_{agent}", f"critic_{agent}")


def roles(options: IPPOOptions) -> tuple[Role, ...]:
    found: list[Role] = []
    for agent in range(options.agents):
        for role in ppo.roles(options):
            if role.name == "reference":
                if agent == 0:
                    found.append(role)
                continue
            policy, critic = names(agent)
            name = policy if role.name == "policy" else critic
            found.append(dataclasses.replace(role, name=name, settings=role.section))
    return tuple(found)


def episode(
    context: Context, examples: Sequence[Example], samples: int | None = None, temperature: float | None = None
) -> list[Rollouts]:
    """Every agent's answers, in the order they write; the samples of one prompt go on separately."""
    turns: list[Rollouts] = []
    readers, count = list(examples), samples
    for agent in range(context.options.agents):
        rollouts = context.rollouts(readers, role=names(agent)[0], samples=count, temperature=temperature, draw=agent)
        turns.append(rollouts)
        readers, count = [_next_reader(rollouts, n) for n in range(len(rollouts))], 1
    return turns


def _next_reader(rollouts: Rollouts, n: int) -> Example:
    """What the next agent reads after sample n: all that was read and written so far, then the prompt again."""
    before = rollouts.examples[rollouts.group[n]]
    prompt = before.prompt_ids[len(before.prompt_ids) - (before.own_tokens or len(before.prompt_ids)) :]
    return dataclasses.replace(
        before,
        uid=f"{before.uid}/{n}",
        prompt_ids=np.concatenate([before.prompt_ids, rollouts.responses[n], prompt]).astype(np.int32),
        own_tokens=len(prompt),
        sample=n,
    )


def collect(context: Context, examples: Sequence[Example]) -> Rollouts:
    """The last agent's rollouts; the others' stand in its `turns`, all with the episode's reward."""
    turns = episode(context, examples)
    last = turns[-1]
    rewards = last.rewards
    if context.options.shared_reward == "mean":
        rewards = np.mean([turn.rewards for turn in turns], axis=0).astype(np.float32)
    return dataclasses.replace(last, turns=[dataclasses.replace(turn, rewards=rewards) for turn in turns])


def answer(context: Context, examples: Sequence[Example], samples: int, temperature: float) -> Rollouts:
    """The last answer to each prompt, grouped by prompt."""
    turns = episode(context, examples, samples, temperature)
    return dataclasses.replace(turns[-1], examples=list(examples), group=turns[0].group)


def prepare(context: Context, rollouts: Rollouts) -> Mapping[str, Sequences]:
    found: dict[str, Sequences] = {}
    for agent, turn in enumerate(rollouts.turns):
        policy, critic = names(agent)
        advantages = functools.partial(ppo.advantages, policy=policy, critic=critic)
        # Mini-batches hold whole prompts of the episode for every agent, so that all make the same number of updates.
        group, learns = rollouts.turns[0].group, not ppo.warming_up(context)
        sequences, _ = on_policy.prepare(context, turn, advantages, policy=policy, group=group, learns=learns)
        sequences.metrics = {metric_name(policy, name): value for name, value in sequences.metrics.items()}
        found |= ppo.trained(context, sequences, policy=policy, critic=critic)
    return found


def losses() -> dict[str, Any]:
    """Those of PPO, of as many agents as there may be."""
    found: dict[str, Any] = {}
    for agent in range(LARGEST_NUMBER):
        found |= zip(names(agent), (ppo.policy_losses, ppo.critic_losses), strict=True)
    return found


def metric_name(role: str, metric: str) -> str:
    """The first agent's metrics are called as PPO's; later ones' end in their number, but for ``…_max``, which stays at
    the end, where it says how figures are joined."""
    agent = role.rpartition("_")[2]
    if not agent.isdecimal():
        return metric
    return f"{metric.removesuffix('_max')}_{agent}_max" if metric.endswith("_max") else f"{metric}_{agent}"


def validate(options: IPPOOptions, config: RunConfig) -> list[tuple[str, str]]:
    found = ppo.validate(options, config)
    if options.kl_controller == "adaptive" and options.agents > 1:
        found.append(
            (
                "error",
                "algorithm.kl_controller = 'adaptive' has one weight, which the first agent's KL would steer for all: "
                "set it to 'fixed', or algorithm.agents to 1.",
            )
        )
    return found


IPPO: Algorithm = dataclasses.replace(
    ppo.PPO,
    name="ippo",
    options=IPPOOptions,
    roles=roles,
    collect=collect,
    prepare=prepare,
    losses=losses(),
    metric_name=metric_name,
    validate=validate,
    longest=lambda options, prompt, response: options.agents * (prompt + response),
    answer=answer,
)
