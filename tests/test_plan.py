"""A plan's memory against a run, its traffic against what a program is known to send, and its refusals."""

from __future__ import annotations

import collections
import dataclasses
import gc
import io
import json
import pathlib

import jax
import jaxtyping
import pytest
from rich.console import Console

from jaxrl_kernels.gpu_compile import Report
from jaxrl_llm import config as configs
from jaxrl_llm import resharding, update
from jaxrl_llm.algorithms import find_algorithm
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.config_file import read_config
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.hybrid_engine import HybridEngine
from jaxrl_llm.main import main
from jaxrl_llm.models.classifier import export_classifier
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.value_head import add_value_head
from jaxrl_llm.plan import search
from jaxrl_llm.plan.abstract_roles import model_shape
from jaxrl_llm.plan.collectives import collectives
from jaxrl_llm.plan.device_kinds import DEVICE_KINDS, planned_devices
from jaxrl_llm.plan.estimate import estimate
from jaxrl_llm.plan.passes import passes
from jaxrl_llm.plan.programs import device_bytes
from jaxrl_llm.plan.report import as_json, notes, show
from jaxrl_llm.plan.setup import COMPARISON, READING, SCORES, Setup
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.trainer import Trainer

ROOT = pathlib.Path(configs.__file__).parent
FLAGS = ("offload_optimizer", "offload_reference", "offload_critic")
TINY = str(pathlib.Path(__file__).parent.parent / "configs" / "tiny_grpo.py")


@pytest.fixture(autouse=True)
def abstract_arguments():
    """Annotations are not checked here: jax builds `Rows` of its own records about arguments, which are no arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def few_layers(count: int = 1) -> dict:
    """The shape of the tiny model with other layers: one compiles fast."""
    shape = json.loads((ROOT / "assets" / "tiny_addition" / "config.json").read_text())
    return {**shape, "num_hidden_layers": count}


def tiny(devices: int, layers: int = 1, *, options: dict | None = None, **mesh: int):
    """Options by path; sizes of the mesh by name."""
    values = read_config(TINY)
    values.model.path, values.model.architecture = "", few_layers(layers)
    values.tokenizer.path = "builtin:tiny_addition"
    values.eval.before = values.eval.after = False
    values.data.eval = ""
    values.train_batch_size, values.training.mini_batch_size = 8, 8
    values.training.micro_batch_tokens = 256
    values.rollout.samples_per_prompt = 4
    values.mesh = dataclasses.asdict(MeshConfig(**mesh))
    with values.unlocked():
        values.update_from_flattened_dict(options or {})
    return configs.resolve(values, devices)


def live_bytes(device) -> int:
    """Of arrays that are on a device (another thread may work on the others), what several share once."""
    here = [array for array in jax.live_arrays() if device in array.sharding.device_set]
    shards = [shard.data for array in here for shard in array.addressable_shards if shard.device == device]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def test_memory_is_that_of_a_run():
    """Live bytes on a device while a run updates, and the temporaries of the program that it really ran, within 15 %
    (what is left: the run's own small arrays, and the rows of a step that is not full).

    Caught: pages left out; moments left out; arrays counted as if they were not sharded; a verdict on GPUs by the CPU's
    compiler that doesn't say so.
    """
    config = tiny(4, fsdp=2, tensor=2)
    planned = planned_devices(DEVICE_KINDS["cpu"], 4)
    setup = Setup.of(config, model_shape(config), planned)
    name = "update of policy"
    plan = estimate(setup, planned, {name: setup.update("policy").compile()})
    of_gpus = dataclasses.replace(planned, simulated=True)
    said = [notes(setup, devices, plan)[0].partition(": ")[0] for devices in (planned, of_gpus)]
    assert said == ["It fits", "It fits, if its programs took what the CPU's compiler gives them"]

    gc.collect()  # what is let go later would count as less
    before = live_bytes(jax.devices()[0])
    trainer = Trainer(config, devices=jax.devices()[:4])
    ran = {}
    program = trainer.models["policy"].update

    def observed(role, rows, *counts, old_is_actor, teacher):
        ran["live"] = live_bytes(jax.devices()[0]) - before
        lowered = program.__wrapped__
        with jax.set_mesh(trainer.mesh):
            ran["program"] = lowered.lower(
                update.RoleState(role.params, role.opt_state), (None, None), rows, *counts, old_is_actor
            ).compile()
        return program(role, rows, *counts, old_is_actor=old_is_actor, teacher=teacher)

    trainer.models["policy"] = dataclasses.replace(trainer.models["policy"], update=observed)
    trainer.step(next(trainer.data))
    trainer.close()
    memory = ran["program"].memory_analysis()
    real = ran["live"] + memory.temp_size_in_bytes
    assert plan.phases["update"] == pytest.approx(real, rel=0.15)
    assert plan.parts["gradients"] + plan.parts["activations"] == pytest.approx(memory.temp_size_in_bytes, rel=0.15)
    state = setup.parameter_bytes() + setup.optimizer_bytes() + plan.parts["KV pages"]
    assert state == pytest.approx(ran["live"], rel=0.15)
    assert name in plan.sent


def test_memory_of_blocks_is_that_of_a_run(tmp_path):
    """Two devices train beside a frozen reference, one samples the next step and one scores it with a model. On each,
    the plan's arrays are those that live in the second step within 5 % (the first has nothing sampled beside it; what
    is left: counts, and samples), and log-probs and scores have the temporaries of the programs that ran.

    Caught: the copy of the policy that samples left out; the reference left out; a reward model left out; pages counted
    on the policy's devices.
    """
    plain = tiny(1)
    decoder, tokenizer = Decoder(model_shape(plain)), load_tokenizer(plain.tokenizer.path)
    params = add_value_head(decoder, decoder.init(jax.random.key(0)))
    export_classifier(tmp_path / "scorer", decoder, params, tokenizer, end_token_id=tokenizer.eos_token_id)
    del params
    options = {
        "algorithm.kl_coef": 0.05,
        "algorithm.rollout_is": "token",
        "placement.staleness": 1,
        "placement.generation.fsdp": 1,
        "placement.reward_model.fsdp": 1,
        "reward_model.path": str(tmp_path / "scorer"),
        "reward_model.max_tokens": 32,
        "reward_model.batch_tokens": 1024,
        "num_steps": 3,
    }
    config = tiny(4, fsdp=2, options=options)
    planned = planned_devices(DEVICE_KINDS["cpu"], 4)
    setup = Setup.of(config, model_shape(config), planned)
    reference = "log-probs of reference"
    assert set(setup.programs) == {"update of policy", reference, SCORES, COMPARISON, "decode", "prefill"}
    reports = {name: setup.programs[name].compile() for name in (reference, SCORES)}
    nothing = Report("", 0, 0, 0, 0, ())  # temporaries of an update are those of the test above
    plan = estimate(setup, planned, {**reports, "update of policy": nothing, COMPARISON: nothing})

    devices = jax.devices()[:4]
    gc.collect()  # what is let go later would count as less
    before = [live_bytes(device) for device in devices]
    trainer = Trainer(config, devices=devices)
    live, temporaries = {}, {}

    def observe(name, program, device, mesh):
        def observed(*arguments, **options):
            live[name] = live_bytes(devices[device]) - before[device]  # of the last call
            if name in reports and name not in temporaries:
                jitted = program if hasattr(program, "lower") else program.__wrapped__
                with jax.set_mesh(mesh):
                    temporaries[name] = jitted.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
            return program(*arguments, **options)

        return observed

    models, scorer = trainer.models, trainer.rollout.reward_model
    updating = observe("update of policy", models["policy"].update, 0, None)
    models["policy"] = dataclasses.replace(models["policy"], update=updating)
    frozen = models["reference"]
    reading = observe(reference, frozen.logprobs, 0, frozen.mesh)
    (key,) = (key for key, program in frozen.programs.items() if program is frozen.logprobs)
    frozen.programs[key] = reading  # the policy's, too, if it reads alike
    scorer._scores = observe(SCORES, scorer._scores, 3, scorer._mesh)
    for _ in range(2):
        trainer._next_step(trainer.data)
    trainer.ahead.settle()
    live["generation"] = live_bytes(devices[2]) - before[2]
    trainer.close()

    policy, generation, scoring = (plan.blocks[name] for name in ("policy", "generation", "reward_model"))
    assert policy.phases["update"] == pytest.approx(live["update of policy"], rel=0.05)
    assert policy.parts["log-probs"] == pytest.approx(temporaries[reference], rel=0.05)
    assert policy.phases["log-probs"] - policy.parts["log-probs"] == pytest.approx(live[reference], rel=0.05)
    assert scoring.parts["scoring"] == pytest.approx(temporaries[SCORES], rel=0.05)
    assert scoring.parts["reward model"] == pytest.approx(live[SCORES], rel=0.05)
    assert scoring.phases == {"reward model": scoring.parts["reward model"] + scoring.parts["scoring"]}
    # What samples is let go when the samples are there; pages stay.
    assert generation.parts["KV pages"] == pytest.approx(live["generation"], rel=0.05)
    assert generation.parts["generation weights"] == setup.layout.received > 0
    assert policy.parts["copy of the policy that samples"] == setup.parameter_bytes()

    text = io.StringIO()
    show(Console(file=text, width=120), setup, planned, plan)
    assert f"of {plan.fullest} (" in text.getvalue() and ", the fullest block" in text.getvalue()
    assert set(as_json(setup, planned, plan)["blocks"]) == {"policy", "generation", "reward_model"}
    assert plan.step_s < sum(plan.seconds.values())


def test_blocks_that_work_beside_each_other_take_as_long_as_the_slowest():
    """The critic's update on devices of its own takes no time of a step while the policy's is longer; its values, which
    are needed before, do. By formulas. Caught: seconds of both updates added up; a critic's values left out."""
    options = {"algorithm.name": "ppo", "placement.critic.fsdp": 2}
    config = tiny(4, fsdp=2, options=options)
    planned = planned_devices(DEVICE_KINDS["cpu"], 4)
    plan = estimate(Setup.of(config, model_shape(config), planned), planned, None)
    updates = plan.seconds["update of policy"], plan.seconds["update of critic"]
    assert plan.step_s == pytest.approx(sum(plan.seconds.values()) - min(updates))
    assert 0.1 * updates[1] < plan.seconds["values of critic"] < 0.5 * updates[1]


def test_slices_of_the_vocabulary_reach_the_programs_of_a_run():
    """`training.logprob_vocab_chunk`: the run's update and log-probs, lowered, make logits of 256 tokens and so many
    entries of one part. Caught: the option not given to the programs; slices left out of the formulas."""
    planned = planned_devices(DEVICE_KINDS["cpu"], 1)
    found = {}
    for entries in (0, 8):
        config = tiny(1, options={"algorithm.kl_coef": 0.1, "training.logprob_vocab_chunk": entries})
        setup = Setup.of(config, model_shape(config), planned)
        for name in ("update of policy", "log-probs of reference"):
            program = setup.programs[name]
            with jax.set_mesh(setup.mesh):
                text = program.function.lower(*program.arguments).as_text()
            assert ("tensor<256x1x8xf32>" in text) == bool(entries), name
        found[entries] = estimate(setup, planned, None).phases["update"]
    assert found[0] - found[8] == 3 * 256 * (16 - 8) * 4  # three arrays of what 256 tokens have, of 16 entries


def test_what_an_apart_teacher_says_lies_on_the_devices_of_the_policy():
    """Its states of all rows, and its output weight. By formulas; the update takes what the plan gives it.

    Caught: the teacher's parameters given to the policy's update; states counted on all devices once.
    """
    options = {"algorithm.name": "distillation", "teacher.path": "builtin:tiny_addition", "placement.teacher.tensor": 2}
    config = tiny(4, layers=2, fsdp=2, options=options)
    planned = planned_devices(DEVICE_KINDS["cpu"], 4)
    setup = Setup.of(config, model_shape(config), planned)
    plan = estimate(setup, planned, None)
    program = setup.programs["update of policy"]
    said, rows = program.arguments[1][1], program.arguments[2]
    width, vocabulary = setup.shape.hidden_size, setup.models["policy"].decoder.config.padded_vocab_size
    states = rows.tokens.size // 2 * width * 4
    assert device_bytes(said.hidden) == states and device_bytes(said.weight) == vocabulary * width * 4 // 2
    assert plan.blocks["policy"].parts["batch"] == device_bytes(rows) + device_bytes(said)
    assert "log-probs" in plan.blocks["teacher"].phases and "log-probs" not in plan.blocks["policy"].phases
    assert plan.seconds[READING] > 0
    with jax.set_mesh(setup.mesh):
        program.function.lower(*program.arguments)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, {}),
        ("grpo", {"kl_coef": 0.1}, {"log-probs of reference": 1}),
        ("grpo", {"kl_coef": 0.1, "kl_in": "reward"}, {"log-probs of policy": 1, "log-probs of reference": 1}),
        ("grpo", {"training.mini_batch_size": 2}, {"log-probs of policy": 1}),
        ("dapo", {"training.epochs": 2}, {"log-probs of policy": 1}),
        ("ppo", {"kl_coef": 0.1}, {"values of critic": 1, "log-probs of reference": 1}),
        ("ppo", {"shared_trunk": True, "training.epochs": 2}, {"log-probs and values of policy": 1}),
        ("ippo", {"critic.warmup_steps": 3}, {"values of critic": 1, "values of critic_1": 1}),
        ("kto", {}, {"log-probs of policy": 1, "log-probs of reference": 2}),
        ("dpo", {"precompute_ref_log_probs": True}, {}),
        ("online_dpo", {}, {"log-probs of reference": 0.5}),  # of four samples the best and the worst
        ("distillation", {"teacher.path": "builtin:tiny_addition"}, {}),
    ],
)
def test_an_algorithm_says_what_it_computes_beside_its_updates(name: str, options: dict, expected: dict):
    """Caught: the reference's second pass of KTO left out; old log-probs where there is one update."""
    values = configs.default_config(name)
    values.model.path, values.train_batch_size = "builtin:tiny_addition", 8
    values.rewards = {"exact": {"function": "exact_match"}}
    values.rollout.samples_per_prompt = 4
    with values.unlocked():
        values.update_from_flattened_dict(
            {option if "." in option else f"algorithm.{option}": value for option, value in options.items()}
        )
    found = passes(configs.resolve(values), find_algorithm(name))
    assert {one.name: one.share for one in found} == expected


def test_a_user_algorithm_that_takes_no_stand_ins_is_guessed(caplog):
    """Caught: an error of the algorithm's own ends the plan."""

    def refuses(context, rollouts):
        raise KeyError("column")

    algorithm = dataclasses.replace(find_algorithm("dpo"), prepare=refuses)
    values = configs.default_config("dpo")
    values.model.path = "builtin:tiny_addition"
    (one,) = passes(configs.resolve(values), algorithm)
    assert one.name == "log-probs of reference" and "KeyError('column')" in caplog.text


def test_what_rests_on_the_host_is_not_on_the_devices_between_uses():
    """By formulas. Caught: an offloaded critic on the devices while samples are drawn; the optimizer of a role that is
    not updated; layers that the layout change has read; dynamic pages in an update."""
    planned = planned_devices(DEVICE_KINDS["cpu"], 2)

    def plan(*names):
        options = {"algorithm.name": "ppo", "algorithm.kl_coef": 0.1}
        options |= {f"hybrid_engine.{name}": "dynamic" if name == "kv_cache_policy" else 1 for name in names}
        options |= {f"hybrid_engine.{name}": True for name in names if name in FLAGS}
        config = tiny(2, fsdp=2, layers=2, options=options)
        setup = Setup.of(config, model_shape(config), planned)
        return setup, estimate(setup, planned, None).blocks["policy"]

    setup, kept = plan()
    size = {role: device_bytes(state.params) for role, state in setup.states.items()}
    optimizer = {role: device_bytes(setup.states[role].opt_state) for role in setup.trained}
    layer, pages = device_bytes(setup.states["policy"].params["blocks"]) // 2, kept.parts["KV pages"]

    def freed(*names):
        """On the host, and less on the devices while samples are drawn, moved and learned from."""
        _, found = plan(*names)
        less = {phase: kept.phases[phase] - found.phases[phase] for phase in ("generation", "layout change", "update")}
        return found.on_host, *less.values()

    assert kept.on_host == 0
    both = sum(optimizer.values())
    assert freed("offload_optimizer") == (both,) * 4
    assert freed("offload_reference") == (size["reference"],) * 4
    critic = size["critic"] + optimizer["critic"]
    assert freed("offload_critic")[:3] == (critic,) * 3
    assert freed("offload_actor_layers")[:3] == (layer,) * 3
    assert freed("kv_cache_policy") == (0, 0, pages, pages)


def test_search_keeps_the_blocks_and_ranks_the_policy():
    """Caught: meshes of all devices, the blocks' among them."""
    config = tiny(
        8, options={"placement.generation.tensor": 2, "placement.reference.fsdp": 2, "algorithm.kl_coef": 0.1}
    )
    rows = search.ranked(config, model_shape(config), planned_devices(DEVICE_KINDS["cpu"], 8))
    assert {setup.mesh.size for _, setup, _ in rows} == {4} and len(rows) > 3
    assert all(set(plan.blocks) == {"policy", "generation", "reference"} for _, _, plan in rows)


def test_traffic_is_what_fsdp_and_tensor_need():
    """fsdp gathers a layer's weights once forward and once backward where the backward pass computes again, and once
    for log-probs; tensor adds up activations. Caught: trips of the loop over layers not counted."""
    values = configs.default_config("grpo")
    values.model.path, values.model.remat, values.model.layers = "builtin:tiny_addition", "full", "loop"
    values.rewards = {"exact": {"function": "exact_match"}}
    values.data.max_prompt_tokens, values.rollout.max_new_tokens = 8, 8
    values.training.micro_batch_tokens, values.dtype = 64, "float32"
    values.mesh = dataclasses.asdict(MeshConfig(fsdp=2, tensor=2))
    with values.unlocked():
        values.algorithm.kl_coef = 0.1
    config = configs.resolve(values, 4)
    setup = Setup.of(config, model_shape(config), planned_devices(DEVICE_KINDS["cpu"], 4))

    def received_by(name):
        received = collections.Counter()
        for one in collectives(setup.programs[name].compile().text, setup.mesh):
            if one.in_loop:
                received[one.kind, one.axes] += one.bytes
        return received

    received = received_by("update of policy")
    blocks = setup.states["policy"].params["blocks"]["run_0"]
    matrices = sum(leaf.size * 4 for leaf in jax.tree.leaves(blocks) if leaf.ndim > 2)
    # Of its tensor shard a device lacks one half, twice; beside them the two tables.
    tables = 2 * setup.shape.vocab_size * setup.shape.hidden_size * 4
    gathered = received["all-gather", ("fsdp",)]
    assert matrices / 2 <= gathered <= matrices / 2 + tables
    sums = sum(size for (kind, axes), size in received.items() if kind == "all-reduce" and "tensor" in axes)
    assert sums >= 4 * setup.shape.num_layers * 64 * setup.shape.hidden_size * 4
    forward = received_by("log-probs of reference")["all-gather", ("fsdp",)]
    assert matrices / 4 <= forward <= matrices / 4 + tables / 2


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("fsdp",), 4),
        ("replica_groups=[1,8]<=[8]", ("fsdp", "tensor"), 8),
        ("replica_groups=mesh['fsdp'=4,'tensor'=2] {'tensor'}", ("tensor",), 2),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'c'}", ("fsdp",), 4),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ("tensor",), 2),
        ("replica_groups=mesh['a'=8] {'a':(1)4}", ("fsdp",), 4),
    ],
)
def test_groups_are_read_in_every_form(groups: str, axes: tuple[str, ...], size: int):
    """Caught: a transposition that is not applied; the operand of an asynchronous gather counted; a loop of known trips
    counted once."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2, pipeline=1), jax.devices()[:8])
    shard = 128 // size
    text = f"""HloModule m
%body (p: (f32[128])) -> (f32[128]) {{
  %s = (f32[{shard}]{{0}}, f32[128]{{0}}) all-gather-start(%p), channel_id=1, {groups}, dimensions={{0}}
}}
ENTRY %main (a: f32[8]) -> f32[128] {{
  %w = (f32[128]) while(%t), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""
    (found,) = collectives(text, mesh)
    assert (found.kind, found.axes, found.count, found.in_loop) == ("all-gather", axes, 3, False)
    assert found.bytes == 3 * (128 - shard) * 4


def test_an_unknown_form_of_groups_is_no_guess():
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2, pipeline=1), jax.devices()[:8])
    text = "ENTRY %main (a: f32[8]) -> f32[8] {\n  %s = f32[8] all-reduce(%a), replica_groups=other(1)\n}\n"
    with pytest.raises(ValueError, match=r"form that is not known: .*other\(1\)"):
        collectives(text, mesh)


@pytest.mark.parametrize("tensor", [0, 1])
def test_the_layout_change_of_a_pipeline_is_planned_as_its_programs_send_it(tensor: int, monkeypatch):
    """Stages hold other layers, so that all but its own are received by each device."""
    config = tiny(4, layers=4, pipeline=2, tensor=2)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, tensor=tensor))
    setup = Setup.of(config, model_shape(config), planned_devices(DEVICE_KINDS["cpu"], 4))
    decoder = setup.models["policy"].decoder
    engine = HybridEngine(decoder, setup.mesh, config.hybrid_engine, setup.dtype, tensor=tensor)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.states["policy"].params)
    params = jax.device_put(jax.device_get(decoder.init(jax.random.key(0))), shardings)
    sent = []

    def recorded(make):
        def program(*arguments):
            jitted = make(*arguments)

            def run(array):
                sent.extend(collectives(jitted.lower(array).compile().as_text(), engine.place.view))
                return jitted(array)

            return run

        return program

    for name in ("move_program", "split_program"):
        monkeypatch.setattr(resharding, name, recorded(getattr(resharding, name)))
    engine.to_generation(params)
    assert setup.layout.received == sum(one.bytes for one in sent) > 0


def test_a_pipeline_is_planned_as_it_will_run():
    """Two stages and the schedule's eight micro-batches are idle 1 of 9 times, and the update takes their rows at once.

    Caught: rows of one micro-batch.
    """
    config = tiny(2, layers=2, pipeline=2)
    planned = planned_devices(DEVICE_KINDS["cpu"], 2)
    setup = Setup.of(config, model_shape(config), planned)
    assert estimate(setup, planned, None).bubble == pytest.approx(1 / 9)
    shards, together = 2, 4
    assert setup.row_shape.rows_per_micro == shards * together * (256 // setup.row_shape.row_tokens)


def test_search_ranks_what_the_model_allows():
    """The tiny model's heads and width bound the mesh, and its key/value heads the tensor size of generation.

    Caught: factorisations with an axis left out; generation planned on the training mesh.
    """
    config = tiny(8)
    planned = planned_devices(DEVICE_KINDS["cpu"], 8)
    shape = model_shape(config)
    rows = search.ranked(config, shape, planned)
    found = {dataclasses.astuple(one.mesh) for one, _, _ in rows}
    assert (8, 1, 1, 1) in found and (1, 8, 1, 1) in found
    assert all(shape.num_kv_heads % one.mesh.tensor == 0 for one, _, _ in rows)
    of_fsdp = {
        one.rollout.tensor: setup.generation.mesh.shape["tensor"]
        for one, setup, _ in rows
        if one.mesh == MeshConfig(data=1, fsdp=8)
    }
    assert of_fsdp == {0: 1, 2: 2} and shape.num_kv_heads == 2
    seconds = [plan.step_s for _, _, plan in rows if plan.fits]
    assert seconds and seconds == sorted(seconds)


def test_the_command_writes_the_plan(tmp_path, capsys):
    """From a folder with a config.json and no weights. Caught: a JSON without the verdict."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(few_layers()))
    file = tmp_path / "plan.json"
    command = ["plan", "--config", TINY, "--devices", "2", "--device-kind", "cpu", "--json", str(file)]
    assert main([*command, f"--config.model.path={tmp_path / 'model'}"]) == 0
    written = json.loads(file.read_text())
    assert written["devices"] == 2 and written["fits"] and written["mesh"]["fsdp"] == 2
    printed = capsys.readouterr().out
    assert "It fits" in printed and "KV pages" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--devices", "8", "--device-kind", "H9000"], "it must be one of H200, H100, cpu"),
        (["--devices", "0", "--device-kind", "cpu"], "give a number of devices from 1"),
        (["--devices", "8"], "--device-kind"),
        (["--devices", "3", "--device-kind", "cpu", "--config.mesh.tensor=2"], "mesh.tensor = 2"),
    ],
)
def test_bad_input_is_one_paragraph(arguments: list[str], text: str, capsys):
    assert main(["plan", "--config", TINY, *arguments]) == 2
    told = capsys.readouterr().err
    assert text in told and told.count("\n") == 1
