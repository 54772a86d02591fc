"""Roles on devices of their own learn what they learn beside the policy, and are saved for any placement."""

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.device_groups import DeviceGroups
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.loading import load_config
from jaxrl_llm.options import set_by_path, to_dict
from jaxrl_llm.placement_rules import require_even_parts
from jaxrl_llm.trainer import _for_reading
from tests.test_trainer import make_config, rows_file, run

__all__ = ["rows_file"]

FIGURES = ("loss/", "policy/", "critic/", "kl/", "reward/", "rollout/logprob_diff_mean", "response/")


def config_of(rows, algorithm="ppo", num_steps=2, **options):
    """PPO with a reference and a critic, or GRPO with a reference; options by path, dots as ``__``."""
    values = to_dict(make_config(rows))
    values["algorithm"] = {"name": algorithm, **({} if algorithm == "distillation" else {"kl_coef": 0.05})}
    values["num_steps"] = num_steps
    values["optimizer"]["warmup_steps"] = 1
    values["mesh"]["fsdp"] = -1
    values["model"]["layers"] = "loop"  # compiles fast
    values["eval"]["before"] = values["eval"]["after"] = False
    for name, value in options.items():
        set_by_path(values, name.replace("__", "."), value)
    return configs.resolve(values)


def devices_of(trainer):
    """By role, which devices its arrays are on."""
    return {
        name: {device.id for leaf in jax.tree.leaves(state) for device in leaf.sharding.device_set}
        for name, state in trainer.roles.items()
    }


def figures(told):
    return {name: value for name, value in told.items() if name.startswith(FIGURES)}


def test_a_run_is_read_on_other_devices_than_it_was_trained_on(rows_file, caplog):
    """A placement that fits stays, another is left out."""
    config = config_of(rows_file, placement__generation__fsdp=4, placement__staleness=1, placement__uncorrected=True)
    assert _for_reading(config, 8) == configs.with_mesh(config, 8)
    alone = _for_reading(config, 1)
    assert not alone.placement.blocks() and alone.placement.staleness == 0 and alone.mesh.fsdp == 1
    assert "placement (generation) does not fit these 1 devices" in caplog.text
    with pytest.raises(UserError, match=r"placement\.generation takes 4: of 1 devices"):
        configs.with_mesh(config, 1)


def test_ppo_on_four_blocks_then_on_two_others_is_ppo_on_one(rows_file, tmp_path):
    """Meshes of one shape compute the same bits wherever they are. The first step has generation, critic and reference
    on devices of their own; it is saved, and the second goes on with another placement, whose critic rests in the
    host's memory and whose decoder gives its pages back."""
    together, told = run(config_of(rows_file), tmp_path / "together", devices=2)
    blocks = {f"placement__{role}__fsdp": 2 for role in ("generation", "critic", "reference")}
    first, told_first = run(config_of(rows_file, num_steps=1, **blocks), tmp_path / "apart", devices=8)
    assert devices_of(first) == {"policy": {0, 1}, "critic": {4, 5}, "reference": {6, 7}}
    assert {device.id for device in first.rollout.engine.mesh.devices.flat} == {2, 3}
    others = {
        "placement__reference__fsdp": 2,
        "placement__critic__beside": "reference",
        "hybrid_engine__offload_critic": True,
        "hybrid_engine__kv_cache_policy": "dynamic",
    }
    second, told_second = run(config_of(rows_file, **others), tmp_path / "apart", devices=4)
    assert devices_of(second) == {"policy": {0, 1}, "critic": {2, 3}, "reference": {2, 3}}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(second.roles), jax.device_get(together.roles))
    assert len(figures(told[1])) > 20 and figures(told_first[1]) == figures(told[1])
    assert figures(told_second[2]) == figures(told[2])
    # Every generation parameter goes to each of the two replicas, whose devices had none of it; float32.
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first.roles["policy"].params))
    assert told_first[1]["layout/bytes"] == told_first[1]["layout/copied_bytes"] == 2 * size


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_grpo_on_three_blocks_of_other_shapes_is_grpo_on_one(rows_file, tmp_path, axis):
    """Eight devices either way; in a pipeline with adapters. Sums in another order differ by rounding of float32,
    at most 1e-5 of each array's norm (moments included): of single entries more, as Adam moves one whose gradient is
    nearly zero by its sign.

    Caught: layers of a pipeline in another order; the base under adapters sent to the block for every step."""
    options = {f"mesh__{axis}": 2, "model__lora_rank": 4 if axis == "pipeline" else 0}
    together, told = run(config_of(rows_file, "grpo", mesh__fsdp=4, **options), tmp_path / "together", devices=8)
    blocks = {"placement__generation__tensor": 2, "placement__reference__data": 2}
    apart, told_apart = run(config_of(rows_file, "grpo", **options, **blocks), tmp_path / "apart", devices=8)
    assert devices_of(apart) == {"policy": {0, 1, 2, 3}, "reference": {6, 7}}
    for one, other in zip(
        *(jax.tree.leaves(jax.device_get(trainer.roles)) for trainer in (together, apart)), strict=True
    ):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(one)
    for step in (1, 2):
        for name, value in figures(told[step]).items():
            assert told_apart[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    if axis == "pipeline":
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(apart.roles["policy"].params))
        assert 0 < told_apart[2]["layout/bytes"] < told_apart[1]["layout/bytes"] / 4


@pytest.mark.parametrize(
    ("options", "devices", "words"),
    [
        ({"mesh__fsdp": 4, "placement__critic__fsdp": 8}, 8, ["placement.critic takes 8", "leaves 0 for the policy"]),
        (
            {"mesh__fsdp": 4, "placement__critic__fsdp": 2, "placement__reference__tensor": 4},
            8,
            ["4, not 2", "2 devices left of 8", "placement.critic takes 2", "placement.reference takes 4"],
        ),
        ({"mesh__fsdp": 4, "placement__critic__fsdp": 2}, 8, ["4, not 6", "6 devices left of 8"]),
        (
            {"algorithm": "distillation", "teacher__path": "x", "mesh__fsdp": 2, "placement__teacher__data": 4},
            6,
            ["placement.teacher", "a multiple of 2", "splits them into 4"],
        ),
        ({"placement__teacher__fsdp": 1}, 2, ["placement.teacher", "ppo", "generation, critic, reference"]),
        ({"placement__reward_model__fsdp": 1}, 2, ["placement.reward_model", "no such role"]),
        ({"algorithm__kl_coef": 0.0, "placement__reference__fsdp": 1}, 2, ["placement.reference", "no such role"]),
        (
            {"placement__generation__tensor": 2, "placement__generation__fsdp": 3, "rollout__tensor": 4},
            7,
            ["rollout.tensor = 4", "placement.generation.tensor = 2", "Allowed: 1, 2, 6"],
        ),
        (
            {"placement__generation__fsdp": 1, "hybrid_engine__enable_3d_resharding": False},
            2,
            ["enable_3d_resharding = False", "placement.generation"],
        ),
        ({"placement__critic__beside": "reference"}, 2, ["placement.critic.beside = 'reference'"]),
        (
            {"placement__critic__beside": "reference", "placement__critic__fsdp": 1, "placement__reference__fsdp": 1},
            3,
            ["placement.critic has sizes and beside"],
        ),
        (
            {"placement__critic__pipeline": 2, "training__pipeline_micro_batches": 3},
            3,
            ["pipeline_micro_batches = 3", "placement.critic.pipeline = 2"],
        ),
        (
            {"placement__critic__tensor": 3, "training__sequence_parallel": True},
            4,
            ["training.row_tokens = 16", "placement.critic.tensor = 3", "Set it to 18"],
        ),
        (
            {
                "placement__generation__pipeline": 2,
                "placement__critic__beside": "generation",
                "training__pipeline_micro_batches": 3,
            },
            3,
            ["pipeline_micro_batches = 3", "placement.generation.pipeline = 2"],
        ),
        (  # a block that no training row goes through
            {"placement__generation__pipeline": 2, "training__pipeline_repeats": 2},
            3,
            ["training.pipeline_repeats = 2", "there is no pipeline"],
        ),
        (
            {"placement__generation__tensor": 2, "training__sequence_parallel": True},
            3,
            ["training.sequence_parallel = True", "mesh.tensor = 1"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_device_is_used(tmp_path, options, devices, words):
    with pytest.raises(UserError) as caught:
        configs.with_mesh(config_of(tmp_path / "none", **options), devices)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement__critic__tensor": 3}, ["placement.critic.tensor = 3 does not divide"]),
        ({"placement__reference__pipeline": 3}, ["placement.reference.pipeline = 3 does not divide"]),
        ({"placement__generation__tensor": 3}, ["placement.generation.tensor = 3 does not divide"]),
    ],
)
def test_a_block_must_divide_the_model_that_it_holds(tmp_path, options, words):
    config = configs.with_mesh(config_of(tmp_path / "none", **options), 4)
    with pytest.raises(UserError) as caught:
        configs.check_against_model(config, load_config(config.model.path), load_tokenizer(config.tokenizer.path))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("owned", "words"),
    [
        ([2, 2, 2], ["3 processes", "mesh has 1 and placement.critic has 2", "a multiple of 3"]),
        ([4, 2], ["2 processes", "mesh has 1 and placement.generation has 3"]),
    ],
)
def test_a_process_gives_an_equal_part_to_each_block(tmp_path, owned, words):
    """Caught: sizes alone compared, or numbers of devices alone."""
    options = {"placement__generation__fsdp": 3, "placement__critic__data": 2}
    config = configs.with_mesh(config_of(tmp_path / "none", **options), 6)
    with pytest.raises(UserError) as caught:
        require_even_parts(config, owned)
    for word in words:
        assert word in str(caught.value)
    even = configs.with_mesh(config_of(tmp_path / "none", mesh__fsdp=4, placement__generation__fsdp=2), 6)
    require_even_parts(even, [3, 3])
    with pytest.raises(UserError, match="the processes have 4, 2 devices"):
        require_even_parts(even, [4, 2])


def test_blocks_follow_each_other(tmp_path):
    """In the order of the options, whatever order they were given in."""
    options = {
        "placement__reference__data": 2,
        "placement__generation__tensor": 3,
        "placement__critic__beside": "reference",
    }
    config = configs.with_mesh(config_of(tmp_path / "none", **options), 6)
    groups = DeviceGroups.of(config, jax.devices()[:6])
    ids = {
        role: [device.id for device in groups.mesh(role).devices.flat]
        for role in ("policy", "generation", "critic", "reference", "reward_model")
    }
    assert ids == {"policy": [0], "generation": [1, 2, 3], "critic": [4, 5], "reference": [4, 5], "reward_model": [0]}
    assert groups.mesh("generation").shape["tensor"] == 3
