"""Conflicts of `placement.staleness` with the rest, found before devices are touched."""

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.errors import UserError
from jaxrl_llm.options import set_by_path


def resolved(name="grpo", **changes):
    config = configs.default_config(name).to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    if name in ("grpo", "ppo", "distillation", "online_dpo", "ippo"):
        config["rewards"] = {"exact": {"function": "exact_match"}}
    config["mesh"]["fsdp"] = 4
    config["placement"]["staleness"] = 1
    config["placement"]["generation"]["fsdp"] = 4
    for path, value in changes.items():
        set_by_path(config, path, value)
    return configs.resolve(config, 8)


@pytest.mark.parametrize(
    "correction",
    [{"algorithm.rollout_is": "token"}, {"algorithm.rollout_rs": "seq_mean_k1"}, {"placement.uncorrected": True}],
)
def test_a_correction_or_an_explicit_choice_is_enough(correction):
    assert resolved(**correction).placement.staleness == 1
    with pytest.raises(UserError, match="one step older, and nothing here corrects"):
        resolved()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("grpo", {"placement.generation.fsdp": 0, "mesh.fsdp": 8}, "devices of placement.generation while the policy"),
        ("grpo", {"placement.staleness": 2}, r"placement\.staleness"),
        ("grpo", {"hybrid_engine.offload_actor_layers": 1}, "offload_actor_layers = 1 is to save"),
        ("grpo", {"placement.staleness": 0, "placement.uncorrected": True}, "no samples are old"),
        (
            "grpo",
            {"reward_model.path": "somewhere"},
            r"placement\.reward_model while the policy .* placement\.reward_model\.beside = 'generation'",
        ),
        (
            "ppo",
            {"placement.generation.fsdp": 0, "placement.critic.fsdp": 4, "placement.generation.beside": "critic"},
            "placement.generation while the critic is",
        ),
        ("sft", {}, "nothing to sample beside"),
        ("ippo", {}, "several models that write"),
        ("online_dpo", {"algorithm.rollout_is": None}, "online_dpo offers no correction"),
    ],
)
def test_what_can_not_be_sampled_beside_an_update_is_refused(name, changes, message):
    """Caught: each rule switched off."""
    corrected = {} if name == "sft" else {"algorithm.rollout_is": "token"}
    changes = {path: value for path, value in {**corrected, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        resolved(name, **changes)


def test_a_reward_model_may_stand_beside_generation():
    config = resolved(
        **{
            "algorithm.rollout_is": "token",
            "reward_model.path": "somewhere",
            "placement.reward_model.beside": "generation",
        }
    )
    assert config.placement.owner("reward_model") == "generation"
