"""Nothing starts that can't finish: every mistake of a configuration is named before a device is touched."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import math
import pathlib
import re
import subprocess
import sys
import types

import pytest
from ml_collections import ConfigDict

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.config import MeshConfig, RunConfig, default_config, resolve, with_mesh
from jaxrl_llm.config_file import default_workdir, read_config, split_overrides
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.loading import load_config
from jaxrl_llm.models.registry import config_from_hf
from jaxrl_llm.plan.setup import NoTokenizer
from jaxrl_llm.validation import fit_mesh
from tests.cases import case


def make(**changes) -> ConfigDict:
    """The defaults with a model and a reward, and options by dotted path (dots written as ``__``)."""
    config = default_config(changes.pop("algorithm", "grpo"))
    config.model.path = "builtin:tiny_addition"
    config.rewards = {"exact": {"function": "exact_match"}}
    for name, value in changes.items():
        group = config
        *parents, last = name.split("__")
        for parent in parents:
            group = group[parent]
        group[last] = value
    return config


def refusal(config: ConfigDict, device_count: int = 8) -> str:
    with pytest.raises(UserError) as caught:
        resolve(config, device_count)
    return str(caught.value)


# --- unknown keys, types, ranges ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("learning_rte", "optimizer.learning_rate"),
        ("algorithm__kl_coeff", "algorithm.kl_coef"),
        ("rollout__top_P", "rollout.top_p"),
        ("optimizer__learning_rte", "optimizer.learning_rate"),
        ("rollout__page_sze", "rollout.page_size"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_name(path: str, nearest: str):
    """Case G01. Caught: keys not checked below the top level."""
    assert case("G01")["expected_text"]["result"].startswith("error naming the full path and the nearest")
    message = refusal(make(**{path: 0.1}))
    assert f"'{path.replace('__', '.')}'" in message
    assert f"Did you mean {nearest!r}?" in message


def test_the_nearest_name_is_not_another_algorithms():
    """Caught: gamma, which is PPO's."""
    message = refusal(make(algorithm="kto", algorithm__gama=0.1))
    assert "'algorithm.gama'. Known in algorithm: beta, desirable_weight, undesirable_weight" in message


def test_an_unknown_key_inside_a_reward_is_refused():
    message = refusal(make(rewards={"exact": {"function": "exact_match", "wieght": 2.0}}))
    assert "'rewards.exact.wieght'" in message and "rewards.exact.weight" in message


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("num_steps", 2.5, "a whole number"),
        ("num_steps", True, "a whole number"),
        ("num_steps", "3", "a whole number"),
        ("optimizer__learning_rate", "1e-5", "a number"),
        ("optimizer__learning_rate", [], "a number"),
        ("data__shuffle", 1, "True or False"),
        ("model__path", 3, "a string"),
        ("rollout__stop", "###", "a list or tuple"),
        ("rollout__stop", (1,), "a string"),
        ("rewards", "math", "a dict"),
        ("rollout", 3, "a group of options"),
    ],
)
def test_a_wrong_type_is_refused(path: str, value, expected: str):
    """Caught: the order of the bool and int checks swapped (True was taken for 1)."""
    message = refusal(make(**{path: value}))
    assert message.startswith(path.replace("__", "."))
    assert f"expected {expected}" in message


def test_a_bool_is_not_a_number():
    """A ConfigDict itself makes 0.0 of a False that replaces a float, so this one comes as a plain dict."""
    with pytest.raises(UserError, match=r"optimizer.learning_rate = False: expected a number"):
        resolve({"model": {"path": "m"}, "optimizer": {"learning_rate": False}})


def test_an_int_is_a_float_and_stays_one_type():
    config = resolve(make(optimizer__learning_rate=1, rollout__temperature=1))
    assert isinstance(config.optimizer.learning_rate, float) and isinstance(config.rollout.temperature, float)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rollout__top_p", 0.0),
        ("rollout__top_p", 1.1),
        ("rollout__temperature", -0.1),
        ("rollout__temperature", float("nan")),
        ("reward_runner__failure_score", float("nan")),
        ("optimizer__b1", 1.0),
        ("train_batch_size", 0),
        ("reward_runner__timeout_s", 0.0),
        ("dtype", "float16"),
        ("data__overlong_prompts", "cut"),
        ("algorithm__clip_low", 1.5),
        ("algorithm__clip_low", -0.1),
        ("training__logprob_vocab_chunk", -1),
        ("algorithm__kl_in", "both"),
        ("optimizer__learning_rate", float("inf")),
        ("rollout__temperature", float("inf")),
        ("rewards__exact__weight", float("-inf")),
        ("rollout__top_k", 2**31),
        ("num_steps", 10**30),
        ("reward_runner__memory_bytes", 2**63),
        ("reward_runner__timeout_s", 1e10),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(path: str, value):
    """Cases G07 (clip range, float16 without scaling, KL in reward and loss). Caught: bounds not read; infinity taken
    for a number, and a count that no int32 holds, each found out by an overflow in the middle of a step."""
    message = refusal(make(**{path: value}))
    assert path.replace("__", ".") in message and "not allowed" in message
    assert "Allowed" in message or "Known" in message


def test_every_option_documents_itself():
    """A new option without a type, a default or a sentence about it fails here."""
    described = dict(configs.describe_options())
    for path, text in described.items():
        assert "default" in text, path
        assert len(text.rsplit(". ", 1)[-1]) > 3 or text.endswith("."), path
    assert {"seed", "rollout.top_p", "algorithm.kl_coef", "mesh.tensor", "checks.logprob_diff_mean"} <= described.keys()


# --- algorithms ---------------------------------------------------------------------------------------------------


def test_the_name_brings_the_options_of_the_algorithm():
    for name, entry in ALGORITHMS.items():
        config = resolve(make(algorithm=name, teacher__path="builtin:tiny_addition"))
        assert config.algorithm.name == name
        assert type(config.algorithm.options) is entry.options


def test_options_of_another_algorithm_are_refused():
    """Caught: keys of every algorithm accepted under any name."""
    message = refusal(make(algorithm="sft", algorithm__clip_low=0.1))
    assert message.startswith("algorithm.clip_low is an option of ppo, grpo, ")
    assert "not of algorithm.name = 'sft'" in message


def test_an_unknown_algorithm_is_refused_with_the_nearest_name():
    assert "Did you mean 'grpo'?" in refusal(make(algorithm="grppo"))


# --- options that exclude each other ------------------------------------------------------------------------------

TWO_REWARDS = {"right": {"function": "exact_match"}, "brief": {}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__samples_per_prompt": 1}, ["rollout.samples_per_prompt", "at least 2"]),
        ({"rollout__temperature": 0.0}, ["rollout.temperature = 0", "rollout.samples_per_prompt = 8"]),
        ({"eval__samples_per_prompt": 4}, ["eval.temperature = 0"]),
        ({"algorithm__dual_clip": 1.0}, ["algorithm.dual_clip", "greater than 1"]),
        ({"algorithm__overlong_buffer_tokens": 300}, ["algorithm.overlong_buffer_tokens", "256"]),
        ({"rollout__min_new_tokens": 300}, ["rollout.min_new_tokens = 300", "256"]),
        ({"rollout__stop": ("",)}, ["rollout.stop", "empty string"]),
        ({"model__architecture": {"hidden_size": 8}}, ["model.path", "model.architecture"]),
        ({"model__path": ""}, ["No model"]),
        ({"model__path": "", "model__architecture": {"hidden_size": 8}}, ["tokenizer.path"]),
        ({"data__system_prompt": "Hi", "data__apply_chat_template": "never"}, ["data.system_prompt"]),
        ({"training__mini_batch_size": 7}, ["training.mini_batch_size = 7", "1, 2, 4, 8, 16, 32, 64"]),
        ({"train_batch_size": 2**31 - 1, "training__mini_batch_size": 7}, ["Allowed: 1, 2147483647"]),
        ({"num_steps": 0}, ["num_steps", "data.num_epochs"]),
        ({"data__num_epochs": 2}, ["num_steps", "data.num_epochs"]),
        ({"training__row_tokens": 700}, ["training.row_tokens = 700", "512 + 256 = 768"]),
        ({"training__micro_batch_tokens": 700}, ["training.micro_batch_tokens = 700", "768"]),
        (
            {"algorithm": "distillation", "teacher__path": "x", "training__logprob_vocab_chunk": 8192},
            ["training.logprob_vocab_chunk = 8192", "'distillation' compares", "Set it to 0"],
        ),
        ({"training__pipeline_repeats": 2}, ["training.pipeline_repeats = 2", "mesh.pipeline = 1"]),
        ({"training__pipeline_micro_batches": 4}, ["training.pipeline_micro_batches = 4", "mesh.pipeline = 1"]),
        (
            {"mesh__pipeline": 4, "training__pipeline_micro_batches": 6},
            ["training.pipeline_micro_batches = 6", "mesh.pipeline = 4", "Set it to 4 or 8", "0 for 16"],
        ),
        ({"training__sequence_parallel": True}, ["training.sequence_parallel = True", "mesh.tensor = 1"]),
        (
            {"training__sequence_parallel": True, "mesh__tensor": 4, "training__row_tokens": 770},
            ["training.row_tokens = 770", "mesh.tensor = 4", "Set it to 772"],
        ),
        (
            {"hybrid_engine__enable_3d_resharding": False, "rollout__tensor": 2},
            ["enable_3d_resharding = False", "rollout.tensor = 2 can't differ from mesh.tensor = 1"],
        ),
        ({"rollout__attention": "xle"}, ["rollout.attention = 'xle'", "Did you mean 'xla'?", "auto", "reference"]),
        ({"rollout__num_pages": 48}, ["rollout.num_pages = 48", "512 + 256 = 768", "At least 49 pages"]),
        ({"rewards": {}}, ["rewards is empty", "grpo learns from rewards alone"]),
        ({"algorithm": "sft", "rewards": {}, "data__eval": "x.jsonl"}, ["rewards is empty", "data.eval = 'x.jsonl'"]),
        ({"rewards": {"r": {"function": "mth"}}}, ["rewards.r.function = 'mth'", "exact_match"]),
        ({"rewards": {"r": {"function": "math", "options": {"mood": 1}}}}, ["rewards.r.function", "mood"]),
        ({"eval__accuracy_reward": "exat"}, ["eval.accuracy_reward = 'exat'", "Did you mean 'exact'?"]),
        ({"rewards": TWO_REWARDS, "data__eval": "x.jsonl"}, ["brief, right", "eval.accuracy_reward is empty"]),
    ],
)
def test_conflicting_options_are_refused(changes: dict, words: list[str]):
    """Case G07, the rows about what exists here. Each rule was seen to be needed by deleting it."""
    message = refusal(make(**changes))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__attention": "reference"},
        {"rollout__num_pages": 49},
        {"algorithm": "sft", "rewards": {}},
        {"rewards": {"reward": {}}},
        {"rewards": TWO_REWARDS},
        {"rewards": TWO_REWARDS, "data__eval": "x.jsonl", "eval__accuracy_reward": "right"},
    ],
)
def test_what_can_work_is_not_refused(changes: dict):
    """Beside the rules above. An entry without a function takes one that is given to the trainer."""
    resolve(make(**changes))


def test_the_only_reward_counts_for_accuracy():
    assert resolve(make()).eval.accuracy_reward == "exact"
    assert resolve(make(rewards=TWO_REWARDS)).eval.accuracy_reward == ""


def test_the_decoder_needs_as_many_pages_as_the_check_says():
    """Caught: a page less in the check than in the engine, whose error came after the model was loaded."""
    from jaxrl_llm.decoding import engine

    def fits(num_pages: int, check) -> bool:
        try:
            check(num_pages)
        except UserError:
            return False
        return True

    for prompt in (512, 513):
        context = prompt + 256
        for num_pages in range(47, 52):
            changes = {"data__max_prompt_tokens": prompt, "rollout__num_pages": num_pages}
            rollout = dataclasses.replace(resolve(make()).rollout, num_pages=num_pages)
            early = fits(num_pages, lambda _, changes=changes: resolve(make(**changes)))
            late = fits(num_pages, lambda _, r=rollout, c=context: engine._checked_num_pages(r, c))
            assert early == late, (prompt, num_pages)


def test_checking_touches_no_device():
    """In a process of its own, where nothing else has. Caught: jax.devices() in a check."""
    code = (
        "from jaxrl_llm.config import default_config, resolve\n"
        "config = default_config('grpo')\n"
        "config.model.path = 'builtin:tiny_addition'\n"
        "config.rewards = {'exact': {'function': 'exact_match'}}\n"
        "resolve(config)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"


def test_every_mistake_is_told_at_once():
    message = refusal(make(rollout__min_new_tokens=300, training__mini_batch_size=7, training__pipeline_repeats=2))
    assert len(message.split("\n\n")) == 3


@pytest.mark.parametrize("changes", [{"rollout__top_p": 0.9}, {"rollout__top_k": 5}, {"rollout__min_p": 0.1}])
def test_a_truncated_sampling_distribution_warns(changes: dict, caplog: pytest.LogCaptureFixture):
    """Case G07: log-probabilities are of the full distribution."""
    with caplog.at_level(logging.WARNING, "jaxrl_llm"):
        resolve(make(**changes))
    assert "truncated distribution" in caplog.text


def test_a_warm_up_longer_than_the_run_warns(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "jaxrl_llm"):
        resolve(make(num_steps=5, training__mini_batch_size=32, optimizer__warmup_steps=11))
        assert "optimizer.warmup_steps = 11 is more than the 10 updates" in caplog.text
        caplog.clear()
        resolve(make(num_steps=5, training__mini_batch_size=32, optimizer__warmup_steps=10))
    assert not caplog.text


# --- mesh ---------------------------------------------------------------------------------------------------------

G03_OUTCOMES = [2, None, None, None, None, None, 8]


@pytest.mark.parametrize(("row", "data"), list(enumerate(G03_OUTCOMES)))
def test_the_mesh_must_multiply_to_the_devices(row: int, data: int | None):
    """Case G03. Caught: a product that divides the device count taken for good (4 of 8 devices used)."""
    given = case("G03")["input"]
    mesh = MeshConfig(data=given["mesh"][row]["dp"], fsdp=1, tensor=given["mesh"][row]["tp"])
    assert case("G03")["expected_text"]["result"][row].startswith("error") == (data is None)
    if data is not None:
        assert fit_mesh(mesh, given["devices"]) == dataclasses.replace(mesh, data=data)
        return
    with pytest.raises(UserError, match=f"mesh.data = {mesh.data}.*mesh.tensor = {mesh.tensor}") as caught:
        fit_mesh(mesh, given["devices"])
    if mesh.data != 0:
        assert "These multiply to 8: data=" in str(caught.value)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_factorisations_that_are_offered_work(pipeline: int):
    with pytest.raises(UserError) as caught:
        fit_mesh(MeshConfig(data=3, fsdp=1, tensor=2, pipeline=pipeline), 8)
    offered = str(caught.value).partition("These multiply to 8: ")[2].rstrip(".").removesuffix("; …").split("; ")
    assert offered
    for text in offered:
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(", "))}
        assert fit_mesh(MeshConfig(**sizes), 8) == MeshConfig(**sizes)
        assert sizes.get("pipeline", 1) == pipeline


def test_a_pipeline_size_that_the_devices_decide_is_checked_when_they_are_known():
    config = resolve(make(mesh__pipeline=-1, mesh__fsdp=1, training__pipeline_micro_batches=6))
    assert with_mesh(config, 2).mesh.pipeline == 2
    with pytest.raises(UserError, match=r"pipeline_micro_batches = 6 is not a multiple of mesh\.pipeline = 4"):
        with_mesh(config, 4)


@pytest.mark.parametrize(
    ("mesh", "tensor", "allowed"),
    [
        ({"data": 2, "tensor": 4}, 8, ""),
        ({"data": 2, "tensor": 4}, 3, "1, 2, 4, 8"),
        ({"fsdp": 2, "tensor": 4}, 16, "1, 2, 4, 8"),
        ({"fsdp": 6, "tensor": 2}, 4, ""),
        ({"fsdp": 6, "tensor": 2}, 8, "1, 2, 4, 6, 12"),
    ],
)
def test_groups_of_generation_are_made_of_whole_axes_of_the_mesh(mesh: dict, tensor: int, allowed: str):
    """A multiple of mesh.tensor takes equal parts of the other axes, a divisor leaves replicas."""
    sizes = {"data": 1, "fsdp": 1, **mesh}
    config = make(rollout__tensor=tensor, **{f"mesh__{axis}": size for axis, size in sizes.items()})
    count = math.prod(sizes.values())
    if not allowed:
        assert resolve(config, count).rollout.tensor == tensor
        return
    with pytest.raises(UserError, match=f"rollout.tensor = {tensor} .*Allowed: {allowed}, or 0"):
        resolve(config, count)


def test_groups_of_generation_must_divide_the_model():
    config = resolve(make(rollout__tensor=4), 8)
    with pytest.raises(UserError, match=r"rollout.tensor = 4 does not divide the 2 key/value heads .*Allowed: 1, 2"):
        configs.check_against_model(config, model(num_heads=16, num_kv_heads=2), Tokenizer())


def test_the_default_mesh_takes_all_devices():
    assert resolve(make(), 8).mesh == MeshConfig(data=1, fsdp=8, tensor=1, pipeline=1)
    assert resolve(make()).mesh.fsdp == -1


# --- against the model --------------------------------------------------------------------------------------------


def model(**changes) -> types.SimpleNamespace:
    values = {"max_position": 1024, "num_heads": 14, "num_kv_heads": 2, "vocab_size": 100}
    values |= {"hidden_size": 64, "intermediate_size": 96, "num_layers": 24}
    found = types.SimpleNamespace(**{**values, "eos_token_ids": (2,), "pad_token_id": 0, **changes})
    found.end_ids = functools.partial(ModelConfig.end_ids, found)
    return found


class Tokenizer:
    """What `check_against_model` looks at."""

    def __init__(self, size: int = 100, eos: int | None = 2, pad: int | None = 0, last: int | None = None):
        self.size, self.eos_token_id, self.pad_token_id, self.last = size, eos, pad, last

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {"last": self.size - 1 if self.last is None else self.last}


@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_lengths_must_fit_the_context_and_the_page_pool(row: int):
    """Case G05. Caught: `<` for `<=` at the context's edge; the pool not compared."""
    given, ok = case("G05")["input"]["rows"][row], case("G05")["expected"]["ok"][row]
    changes = {"data__max_prompt_tokens": given["prompt"], "rollout__max_new_tokens": given["response"]}
    if "pool_tokens" in given:
        changes["rollout__num_pages"] = given["pool_tokens"] // 16
    try:
        config = resolve(make(**changes), 1)
        configs.check_against_model(config, model(max_position=given.get("context", 10**6)), Tokenizer())
    except UserError as error:
        assert not ok
        assert f"{given['prompt']} + {given['response']}" in str(error)
    else:
        assert ok


@pytest.mark.parametrize(
    ("tensor", "heads", "kv_heads", "allowed"), [(4, 16, 2, "1, 2"), (4, 14, 4, "1, 2"), (2, 14, 2, "")]
)
def test_tensor_shards_must_divide_the_heads(tensor: int, heads: int, kv_heads: int, allowed: str):
    """Case G07: 2 key/value heads, or 14 query heads, over 4 devices."""
    config = resolve(make(mesh__tensor=tensor), 8)
    sizes = model(num_heads=heads, num_kv_heads=kv_heads)
    if not allowed:
        configs.check_against_model(config, sizes, Tokenizer())
        return
    with pytest.raises(UserError, match=f"mesh.tensor = 4 .*Allowed: {allowed}"):
        configs.check_against_model(config, sizes, Tokenizer())


@pytest.mark.parametrize(
    ("mesh", "sizes", "words"),
    [
        ({"data": 1, "fsdp": 8}, {"hidden_size": 36}, ["mesh.fsdp = 8", "36 columns", "Allowed: 1, 2, 3, 4, 6;"]),
        ({"fsdp": 4, "tensor": 2}, {"intermediate_size": 11}, ["mesh.tensor = 2", "11 columns", "Allowed: 1;"]),
        ({"fsdp": 4, "tensor": 2}, {"hidden_size": 36, "intermediate_size": 18}, []),
    ],
)
def test_the_mesh_must_divide_the_sizes_that_it_splits(mesh: dict, sizes: dict, words: list[str]):
    """The training layout splits the embedding over fsdp, the feed-forward layers over tensor. Each rule was seen to be
    needed by deleting it."""
    config = resolve(make(**{f"mesh__{axis}": size for axis, size in mesh.items()}), 8)
    if not words:
        configs.check_against_model(config, model(**sizes), Tokenizer())
        return
    with pytest.raises(UserError) as caught:
        configs.check_against_model(config, model(**sizes), Tokenizer())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "repeats", "layers", "words"),
    [
        (4, 1, 24, []),
        (4, 3, 24, []),
        (4, 1, 30, ["mesh.pipeline = 4", "30 layers", "every stage needs as many", "1, 2, 3, 5, 6, 10, 15, 30"]),
        (4, 4, 24, ["mesh.pipeline = 4", "training.pipeline_repeats = 4", "16 pieces", "24 layers"]),
    ],
)
def test_stages_must_divide_the_layers(stages: int, repeats: int, layers: int, words: list[str]):
    """Caught: the pieces of an interleaved schedule not counted."""
    config = resolve(make(mesh__pipeline=stages, mesh__fsdp=1, training__pipeline_repeats=repeats), stages)
    if not words:
        configs.check_against_model(config, model(num_layers=layers), Tokenizer())
        return
    with pytest.raises(UserError) as caught:
        configs.check_against_model(config, model(num_layers=layers), Tokenizer())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "tokenizer", "words"),
    [
        ({"eos_token_ids": (2, 100)}, Tokenizer(), "end-of-sequence id 100"),
        ({"pad_token_id": 100}, Tokenizer(), "padding id 100"),
        ({}, Tokenizer(pad=-1), "padding id -1"),
        ({"eos_token_ids": ()}, Tokenizer(eos=None), "end-of-sequence"),
        ({}, Tokenizer(eos=100), "end-of-sequence id 100"),  # the tokenizer's own ends a response, too
        ({}, Tokenizer(size=101), "101 tokens"),
        ({}, Tokenizer(size=50, last=100), "the token id 100"),  # ids with gaps
    ],
)
def test_special_ids_must_be_in_the_vocabulary(sizes: dict, tokenizer: Tokenizer, words: str):
    """Case G07. A missing padding id is fine here: masks come from lengths, nothing is looked up by it."""
    config = resolve(make(), 1)
    with pytest.raises(UserError, match=words):
        configs.check_against_model(config, model(**sizes), tokenizer)
    configs.check_against_model(config, model(pad_token_id=None), Tokenizer(pad=None))


# --- derived values, saving ---------------------------------------------------------------------------------------


def test_derived_step_counts():
    """Case G09. Caught: rows of all epochs divided at once (10 steps), and rounding up (12)."""
    given, expected = case("G09")["input"], case("G09")["expected"]
    batch = given["train_batch"]
    config = resolve(
        make(
            num_steps=0,
            data__num_epochs=given["epochs"],
            train_batch_size=batch,
            training__mini_batch_size=batch // given["mini_batches_per_batch"],
        )
    )
    assert dataclasses.asdict(configs.step_counts(config, given["rows"])) == expected


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(UserError, match="train_batch_size = 64 is larger than the 63"):
        configs.step_counts(resolve(make()), 63)


def test_a_saved_configuration_loads_to_an_equal_object(tmp_path: pathlib.Path):
    """Caught: tuples inside free-form dicts kept (JSON gives lists back)."""
    config = resolve(
        make(
            rollout__stop=("a", "b"),
            checks__logprob_diff_max=float("inf"),
            rewards={"style": {"function": "format", "options": {"pattern": ("x", {"y": (1, 2)})}}},
        ),
        8,
    )
    configs.save(config, tmp_path / "config.json")
    assert configs.load(tmp_path / "config.json") == config
    assert resolve(make(), 8) != config


def test_a_missing_or_broken_saved_configuration_says_so(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="no saved configuration"):
        configs.load(tmp_path / "config.json")
    for content, words in ((b"{", "not JSON"), (b"\xff", "not JSON"), (b"[1]", "a JSON list")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(UserError, match=words):
            configs.load(tmp_path / "config.json")


def test_everything_derived_is_filled_in():
    config = resolve(make(), 8)
    assert config.training.mini_batch_size == 64
    assert config.training.row_tokens == 4096  # a micro-batch is one row
    assert config.tokenizer.path == "builtin:tiny_addition"
    assert -1 not in dataclasses.astuple(config.mesh)


def test_log_probability_bounds_follow_the_dtype():
    checks = resolve(make()).checks
    assert checks.bounds("float32") == (1e-4, 1e-2)
    assert checks.bounds("bfloat16") == (1e-2, float("inf"))
    assert checks.bounds("bfloat16", temperature=0.5) == (2e-2, float("inf"))
    assert checks.bounds("float32", temperature=0.0) == checks.bounds("float32", temperature=2.0) == (1e-4, 1e-2)
    assert resolve(make(checks__logprob_diff_mean=0.5)).checks.bounds("float32") == (0.5, 1e-2)


def test_weights_of_8_bits_are_bounded_only_on_request_and_warned_of(caplog: pytest.LogCaptureFixture):
    """What is expected of a rounded policy stops nothing; what was asked for does. Caught: a warning that says there is
    no bound where one was given, or about a model that is only used."""
    infinite = float("inf")
    with caplog.at_level(logging.WARNING, "jaxrl_llm"):
        checks = resolve(make(rollout__weight_dtype="int8")).checks
    assert checks.bounds("float32", weight_dtype="int8") == (infinite, infinite)
    assert "checks.logprob_diff_mean and checks.logprob_diff_max set no bound" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxrl_llm"):
        bounded = make(rollout__weight_dtype="float8", checks__logprob_diff_mean=0.5, checks__logprob_diff_max=3.0)
        assert resolve(bounded).checks.bounds("bfloat16", 0.5, "float8") == (0.5, 3.0)
    assert "rounded to 8 bits" in caplog.text and "no bound" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jaxrl_llm"):
        resolve(make(rollout__weight_dtype="int8"), training=False)
        resolve(make())
    assert not caplog.text
    assert "rollout.weight_dtype" in refusal(make(rollout__weight_dtype="int4"))


def test_a_sampler_of_8_bits_is_compared_with_the_policy():
    """The metrics of the rollout correction, and not its weights. Caught: told for exact weights too; weights as
    well."""
    options = resolve(make(rollout__weight_dtype="int8")).algorithm.options
    assert options.rollout_metrics and options.rollout_is == "none"
    assert not resolve(make()).algorithm.options.rollout_metrics


# --- files and the command line -----------------------------------------------------------------------------------

FILE = """
from jaxrl_llm.config import default_config

def get_config(name="grpo"):
    config = default_config(name)
    config.model.path = "builtin:tiny_addition"
    config.rewards = {"exact": {"function": "exact_match"}}
    return config
"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    (tmp_path / "a_run.py").write_text(FILE)
    return str(tmp_path / "a_run.py")


def read(file: str, *arguments: str) -> RunConfig:
    overrides, others = split_overrides(arguments)
    assert not others
    return resolve(read_config(file, overrides), 8)


def test_overrides_of_every_type(file: str):
    config = read(
        file,
        "--config.num_steps=7",
        "--config.optimizer.learning_rate=1",
        "--config.data.shuffle=false",
        "--config.data.train",
        "rows.jsonl",
        '--config.rollout.stop=("a=b", "c")',
        "--config.rewards.exact.weight=2",
        "--config.rewards.style.function=format",
        "--config.rewards.style.options.pattern=<a>",
    )
    assert config.num_steps == 7 and config.optimizer.learning_rate == 1.0 and not config.data.shuffle
    assert config.data.train == "rows.jsonl" and config.rollout.stop == ("a=b", "c")
    assert config.rewards["exact"].weight == 2.0 and config.rewards["exact"].function == "exact_match"
    assert config.rewards["style"].options == {"pattern": "<a>"}


def test_the_algorithm_is_changed_before_its_options(file: str):
    """Caught: overrides applied in the order of the command line."""
    config = read(f"{file}:sft", "--config.algorithm.clip_low=0.1", "--config.algorithm.name=grpo")
    assert config.algorithm.options.clip_low == 0.1
    with pytest.raises(UserError, match=r"algorithm\.clip_low is an option of ppo, grpo, .*, not of .*'sft'"):
        read(file, "--config.algorithm.clip_low=0.1", "--config.algorithm.name=sft")
    assert read(f"{file}:sft").algorithm.name == "sft"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--config.rollot.top_p=0.1", "Did you mean 'rollout'"),
        ("--config.rollout.top_P=0.1", "'rollout.top_P'. Did you mean 'rollout.top_p'"),
        ("--config.algorithm.kl_coeff=0.1", "Did you mean 'algorithm.kl_coef'"),
        ("--config.rollout.top_p.x=0.1", "rollout.top_p is a single value"),
        ("--config.num_steps=2.5", "--config.num_steps=2.5: expected a whole number"),
        ("--config.data.shuffle=maybe", "expected true or false"),
        ("--config.rollout.stop=a", "expected a Python literal"),
        ("--config.rollout.stop={[]}", "expected a Python literal"),
        (f"--config.rollout.stop={'-' * 3000}1", "expected a Python literal"),
        ("--config.num_steps", "has no value"),
        ("--config.rewards.exact.wieght=1", "Did you mean 'rewards.exact.weight'"),
    ],
)
def test_a_wrong_override_is_named(file: str, override: str, words: str):
    """Case G01 on the command line."""
    with pytest.raises(UserError) as caught:
        read(file, override)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:", "line 1: not valid Python"),
        ("x = 1", "no function get_config"),
        ("def get_config():\n    return {}", "returned a dict"),
        (FILE.replace("config.model.path", "config.modle.path"), "line 6: AttributeError: "),
        ("def get_config():\n    return 1 / 0", "line 2: ZeroDivisionError: "),
        ("import no_such_module", "line 1: ModuleNotFoundError: "),
        ("import sys\nsys.exit(0)", "line 2: SystemExit: "),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: pathlib.Path, text: str, words: str):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_config(str(path))
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_relative_path_is_as_good(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Caught: the path compared as text with that of the frame, which is absolute."""
    (tmp_path / "broken.py").write_text(FILE.replace("config.model.path", "config.modle.path"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"broken\.py, line 6: AttributeError: "):
        read_config("broken.py")


@pytest.mark.parametrize(("parameter", "location"), [("", "run.py:small"), ("name", "run.py")])
def test_an_argument_that_get_config_does_not_take_is_named(
    parameter: str, location: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Caught: a line of the file looked for, where none has run (StopIteration)."""
    (tmp_path / "run.py").write_text(FILE.replace('name="grpo"', parameter))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"--config={location}: .*positional argument"):
        read_config(location)


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"there is no file 'nowhere\.py'"):
        read_config("nowhere.py")
    assert default_workdir("configs/tiny_grpo.py:small") == pathlib.Path("outputs/tiny_grpo")


@pytest.mark.parametrize(
    "path", sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py")), ids=lambda path: path.stem
)
def test_the_configurations_of_this_project_fit_their_models(path: pathlib.Path):
    """Caught: an option that is gone; a response longer than the context; ids outside the vocabulary."""
    config = resolve(read_config(str(path)))
    config = with_mesh(config, config.mesh.tensor)  # the fewest devices that it can have
    package = config.model.path.removeprefix("package:")
    if package != config.model.path and importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    architecture = config.model.architecture
    shape = config_from_hf(architecture, path.name) if architecture else load_config(config.model.path)
    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", config.tokenizer.path)  # not here, as no test reaches the network
    tokenizer = NoTokenizer() if of_hub else load_tokenizer(config.tokenizer.path)
    configs.check_against_model(config, shape, tokenizer)
