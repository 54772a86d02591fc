"""An algorithm in a user's own file: it trains, and what is wrong with it is told before anything runs."""

import dataclasses
import textwrap

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import interface
from jaxrl_llm.errors import UserError
from jaxrl_llm.trainer import Trainer

EXAMPLE = textwrap.dedent(interface.__doc__.partition("its baseline::\n")[2])
"""The file that the interface's documentation shows."""

START = """
import dataclasses
from jaxrl_llm.algorithms import on_policy
from jaxrl_llm.algorithms.interface import CRITIC, POLICY, Algorithm, Objective, Role, Sequences
from jaxrl_llm.config import option

@dataclasses.dataclass(frozen=True)
class Options:
    scale: float = option(1.0, "a factor", low=0.0)

def collect(context, examples): ...
def prepare(context, rollouts): ...
def losses(options, outputs, rows): ...
"""


def written(tmp_path, text):
    file = tmp_path / "mine.py"
    file.write_text(text)
    return file


def make_config(name, **algorithm):
    config = configs.default_config(name).to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["data"].update(train="builtin:addition/train", max_prompt_tokens=8)
    config["rewards"] = {"longer": {}}
    config.update(num_steps=2, train_batch_size=2)
    config["rollout"].update(samples_per_prompt=2, max_new_tokens=4, num_slots=4)
    config["training"].update(micro_batch_tokens=64)
    config["optimizer"].update(learning_rate=1e-3)
    config["checkpoint"].update(every_steps=0, save_final=False)
    config["mesh"].update(fsdp=1)
    config["algorithm"].update(algorithm)
    return configs.resolve(config)


def longer(completion):
    return float(len(completion)) + sum(map(ord, completion)) % 3


def test_the_example_of_the_interface_trains(tmp_path):
    """Two steps with an option set; the configuration that a run saves finds the file again.

    Caught: an example that is not up to date with the interface; options that keep their defaults; a name that a saved
    configuration doesn't hold.
    """
    assert len(EXAMPLE.splitlines()) < 50
    name = f"{written(tmp_path, EXAMPLE)}:reinforce"
    config = make_config(name, baseline=0.5)
    configs.save(config, tmp_path / "config.json")
    assert configs.load(tmp_path / "config.json") == config
    trainer = Trainer(config, None, rewards={"longer": longer}, devices=jax.devices()[:1])
    before = jax.device_get(trainer.roles["policy"].params)
    prepared, prepare = [], trainer.algorithm.prepare

    def recorded(context, rollouts):
        prepared.append((rollouts, prepare(context, rollouts)))
        return prepared[-1][1]

    trainer.algorithm = dataclasses.replace(trainer.algorithm, prepare=recorded)
    metrics = trainer.train()
    assert trainer.step_index == 2 and np.isfinite(metrics["loss/total"])
    rollouts, sequences = prepared[0]
    got = [one[mask][0] for one, mask in zip(sequences.advantages, sequences.loss_mask, strict=True)]
    np.testing.assert_allclose(got, rollouts.rewards - 0.5 * rollouts.rewards.mean(), rtol=1e-5)
    moved = jax.tree.map(
        lambda new, old: np.abs(new - old).max(), jax.device_get(trainer.roles["policy"].params), before
    )
    assert min(jax.tree.leaves(moved)) > 0


WRONG = {
    "a wrong signature": (
        START + "def prepare(rollouts): ...\nmine = Algorithm('mine', Options, collect, prepare, losses)",
        r"prepare is called as prepare\(context, rollouts\)",
    ),
    "a loss with a wrong signature": (
        START + "def losses(outputs): ...\nmine = Algorithm('mine', Options, collect, prepare, losses)",
        r"losses is called as losses\(options, outputs, rows\)",
    ),
    "an answer with a wrong signature": (
        START + "mine = Algorithm('mine', Options, collect, prepare, losses, answer=collect)",
        r"answer is called as answer\(context, examples, samples, temperature\)",
    ),
    "no loss of a role": (
        START + "mine = Algorithm('mine', Options, collect, prepare, {'policy': losses}, "
        "roles=lambda options: (POLICY, CRITIC))",
        r"losses has none for the trained role 'critic'",
    ),
    "no policy": (
        START + "mine = Algorithm('mine', Options, collect, prepare, losses, roles=lambda options: (CRITIC,))",
        r"roles names no policy",
    ),
    "nothing trained": (
        START + "mine = Algorithm('mine', Options, collect, prepare, losses, roles=lambda o: (Role('policy'),))",
        r"roles names no trained role",
    ),
    "a role without a section": (
        START + "mine = Algorithm('mine', Options, collect, prepare, losses, "
        "roles=lambda options: (POLICY, Role('judge')))",
        r"the role 'judge' has no section",
    ),
    "roles that fail": (
        START + "mine = Algorithm('mine', Options, collect, prepare, losses, roles=lambda options: (options.what,))",
        r"fails: AttributeError: .*what",
    ),
    "an unknown aggregation": (
        START + "mine = Algorithm('mine', Options, collect, prepare, losses, loss_aggregation=lambda options: 'mean')",
        r"loss_aggregation gives 'mean'",
    ),
    "options without a default": (
        START + "@dataclasses.dataclass(frozen=True)\nclass Bare:\n    scale: float\n"
        "mine = Algorithm('mine', Bare, collect, prepare, losses)",
        r"options\.scale has no default",
    ),
    "options that are not frozen": (
        START + "@dataclasses.dataclass\nclass Loose:\n    scale: float = option(1.0, '')\n"
        "mine = Algorithm('mine', Loose, collect, prepare, losses)",
        r"it must be a frozen dataclass",
    ),
    "an option of a type that no file holds": (
        START + "@dataclasses.dataclass(frozen=True)\nclass Odd:\n    scale: complex = option(1j, '')\n"
        "mine = Algorithm('mine', Odd, collect, prepare, losses)",
        r"algorithm\.scale: options of type .*complex.* are not supported",
    ),
    "no such name": (
        START + "other = Algorithm('other', Options, collect, prepare, losses)",
        r"has no such name; .* Algorithms in it: other",
    ),
    "no Algorithm": (START + "mine = losses", r"has a function there; expected an Algorithm"),
    "an import that fails": ("import nowhere_to_be_found", r"fails: ModuleNotFoundError: .*nowhere_to_be_found"),
    "a mistake in the file": ("def mine(:", r"fails: SyntaxError"),
    "a file that ends the program": ("import sys; sys.exit(0)", r"fails: SystemExit"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_told_in_one_paragraph(tmp_path, wrong):
    """By `resolve`, which touches no device. Caught: signatures or a role's loss that are not looked at;
    a traceback of a user's function."""
    text, message = WRONG[wrong]
    file = written(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        make_config(f"{file}:mine")
    assert str(caught.value).startswith(f"algorithm.name = '{file}:mine'") and "\n\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_an_option_that_is_none(tmp_path):
    """Caught: a FileNotFoundError; an unknown option that is silently dropped; a range that is not checked."""
    with pytest.raises(UserError, match=r"there is no Python file '.*other\.py'"):
        make_config(f"{tmp_path / 'other.py'}:mine")
    with pytest.raises(UserError, match="is not an algorithm"):
        make_config(str(written(tmp_path, EXAMPLE)))
    name = f"{written(tmp_path, EXAMPLE)}:reinforce"
    with pytest.raises(UserError, match=r"Unknown option 'algorithm\.base_line'\. Did you mean 'algorithm\.baseline'"):
        make_config(name, base_line=0.5)
    with pytest.raises(UserError, match=r"algorithm\.baseline = -1\.0 is not allowed"):
        make_config(name, baseline=-1.0)
    with pytest.raises(UserError, match=r"algorithm\.clip_low is an option of"):
        make_config(name, clip_low=0.1)


def test_a_changed_file_is_read_again(tmp_path):
    """Caught: the module of the first reading, kept under its name."""
    file = written(tmp_path, EXAMPLE)
    assert make_config(f"{file}:reinforce").algorithm.options.baseline == 1.0
    file.write_text(EXAMPLE.replace("option(1.0", "option(0.25"))
    assert make_config(f"{file}:reinforce").algorithm.options.baseline == 0.25


def test_rltrainer_takes_any_algorithm_that_generates(tmp_path):
    """Caught: a notebook interface for grpo alone."""
    options = {"rollout.samples_per_prompt": 4, "rollout.num_slots": 8, "data.max_prompt_tokens": 8}
    options["training.micro_batch_tokens"] = 64
    arguments = {"reward": longer, "train_batch_size": 2, "rollout_len": 4, "options": options}
    name = f"{written(tmp_path, EXAMPLE)}:reinforce"
    with jaxrl_llm.RLTrainer("builtin:tiny_addition", algo=name, **arguments) as trainer:
        assert trainer.trainer.algorithm.name == "reinforce" and list(trainer.trainer.roles) == ["policy"]
    with jaxrl_llm.RLTrainer("builtin:tiny_addition", algo="ppo", **arguments) as trainer:
        metrics, rollouts = trainer.step(["1+2=", "3+4="])
    assert len(rollouts) == 8 and np.isfinite(metrics["loss/total"]) and metrics["policy/grad_norm"] > 0
    assert metrics["critic/grad_norm"] > 0
