"""What several options must agree on. Each rule is a line or two and says in its message what to change."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxrl_llm.config import (
    REWARD_MODEL,
    MeshConfig,
    RunConfig,
    _algorithm,
    default_row_tokens,
    longest_block,
    longest_sequence,
)
from jaxrl_llm.errors import UserError
from jaxrl_llm.options import nearest
from jaxrl_llm.placement_rules import (
    block_of,
    generation_tensor,
    placement_conflicts,
    policy_copies,
    policy_shaped,
    training_blocks,
)
from jaxrl_llm.staleness_rules import staleness_conflicts

Problem = tuple[str, str]
"""(``error`` | ``warning``, message)"""

_LOG = logging.getLogger("jaxrl_llm")


def refuse_or_warn(problems: Iterable[Problem]) -> None:
    """Logs the warnings, then raises one UserError that holds every error, so that none is found a run
    later."""
    errors = []
    for severity, message in problems:
        if severity == "error":
            errors.append(message)
        else:
            _LOG.warning(message)
    if errors:
        raise UserError("\n\n".join(errors))


def conflicts(config: RunConfig, training: bool = True) -> Iterator[Problem]:
    """Options of ``config`` that exclude each other or can't be meant, judged without model, data or
    devices.

    Args:
      training: False leaves out what only matters for learning: a model may be sampled greedily, once a prompt and
        without a reward.
    """
    yield from _model_conflicts(config)
    yield from _batch_conflicts(config)
    yield from _rollout_conflicts(config)
    if training and _algorithm(config.algorithm.name).generates and config.rollout.weight_dtype != "compute":
        yield ("warning", _low_precision_warning(config))
    yield from _length_conflicts(config, training)
    yield from mesh_conflicts(config)
    yield from placement_conflicts(config)
    yield from _reward_conflicts(config, training)
    if training:
        yield from staleness_conflicts(config)
        validate = _algorithm(config.algorithm.name).validate
        yield from validate(config.algorithm.options, config)


def _model_conflicts(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.path and model.architecture:
        yield (
            "error",
            f"model.path = {model.path!r} and model.architecture are both set: one loads a model, the other "
            "makes "
            "a new one. Set only one of them.",
        )
    if not model.path and not model.architecture:
        yield (
            "error",
            "No model: set model.path (a folder, hub id, .gguf file or builtin:NAME) or model.architecture.",
        )
    if model.architecture and not model.path and not config.tokenizer.path:
        yield (
            "error",
            "model.architecture is set, so there is no model.path to take a tokenizer from: set tokenizer.path.",
        )
    if config.data.system_prompt and config.data.apply_chat_template == "never":
        yield (
            "error",
            "data.system_prompt is set but data.apply_chat_template = 'never', so it would not be used. Clear one.",
        )


def _batch_conflicts(config: RunConfig) -> Iterator[Problem]:
    batch, mini = config.train_batch_size, config.training.mini_batch_size
    if mini and batch % mini:
        low = [d for d in range(1, math.isqrt(batch) + 1) if batch % d == 0]
        divisors = sorted({*low, *(batch // d for d in low)})
        yield (
            "error",
            f"training.mini_batch_size = {mini} does not divide train_batch_size = {batch}, so updates would differ "
            f"in size. Allowed: {', '.join(map(str, divisors))}.",
        )
    if bool(config.num_steps) == bool(config.data.num_epochs):
        yield (
            "error",
            f"num_steps = {config.num_steps} and data.num_epochs = {config.data.num_epochs}: exactly one of "
            "them "
            "must be positive, the other 0, since each says how long the run is.",
        )
    entry, options = _algorithm(config.algorithm.name), config.algorithm.options
    if config.training.logprob_vocab_chunk and entry.divergence(options) is not None:
        yield (
            "error",
            f"training.logprob_vocab_chunk = {config.training.logprob_vocab_chunk}, but algorithm.name = "
            f"{config.algorithm.name!r} compares the policy with a teacher by their logits of the whole vocabulary, so "
            "it would save nothing. Set it to 0; a smaller training.logprob_chunk_tokens does save memory.",
        )
    steps = max(config.num_steps - entry.rests(options, config, entry.main_role(options)), 0)
    updates = steps * (batch // mini if mini else 1) * config.training.epochs
    if config.num_steps and config.optimizer.warmup_steps > updates:
        yield (
            "warning",
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps} is more than the {updates} updates of "
            "this run: the learning rate never reaches optimizer.learning_rate.",
        )


def _rollout_conflicts(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    for name, group in (("rollout", rollout), ("eval", config.eval)):
        if group.temperature == 0 and group.samples_per_prompt > 1:
            yield (
                "error",
                f"{name}.temperature = 0 with {name}.samples_per_prompt = {group.samples_per_prompt}: greedy "
                "samples "
                "of one prompt are all equal. Raise the temperature or draw one sample.",
            )
    if rollout.min_new_tokens > rollout.max_new_tokens:
        yield (
            "error",
            f"rollout.min_new_tokens = {rollout.min_new_tokens} is more than rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}.",
        )
    if "" in rollout.stop:
        yield (
            "error",
            f"rollout.stop = {rollout.stop!r} holds the empty string, which would end every completion.",
        )
    from jaxrl_kernels.paged_attention.api import IMPLEMENTATIONS  # not at the top: only a run needs it

    known = ("auto", "gathered", *IMPLEMENTATIONS)
    if rollout.attention not in known:
        yield (
            "error",
            f"rollout.attention = {rollout.attention!r} is not an implementation of the paged attention."
            f"{nearest(rollout.attention, known)}",
        )
    filters = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    if any(filters.values()):
        used = " and ".join(f"rollout.{name} = {getattr(rollout, name)}" for name, on in filters.items() if on)
        yield (
            "warning",
            f"{used}: completions come from a truncated distribution, while log-probabilities, ratios and KL "
            "are of "
            "the full one, so the policy gradient is biased.",
        )


def _low_precision_warning(config: RunConfig) -> str:
    unbounded = [
        name for name in ("logprob_diff_mean", "logprob_diff_max") if getattr(config.checks, name) in (-1, math.inf)
    ]
    bounds = f", and {' and '.join(f'checks.{name}' for name in unbounded)} set no bound" if unbounded else ""
    return (
        f"rollout.weight_dtype = {config.rollout.weight_dtype!r}: completions are written by a policy with weights "
        f"rounded to 8 bits, not by the one that is trained{bounds}. Watch rollout/logprob_diff_mean, and consider "
        "weighting tokens by the ratio of the two policies' probabilities (a rollout correction) where the algorithm "
        "offers it."
    )


def _length_conflicts(config: RunConfig, training: bool) -> Iterator[Problem]:
    rollout = config.rollout
    longest, block = longest_sequence(config), longest_block(config)
    sum_text = (
        f"data.max_prompt_tokens + rollout.max_new_tokens = {config.data.max_prompt_tokens} + "
        f"{rollout.max_new_tokens} = {config.data.max_prompt_tokens + rollout.max_new_tokens}"
    )
    if block != config.data.max_prompt_tokens + rollout.max_new_tokens:
        sum_text += f", of which {config.algorithm.name} needs {block} in a row"
    row_tokens, micro_batch_tokens = config.training.row_tokens or block, config.training.micro_batch_tokens
    if training and row_tokens < block:
        yield (
            "error",
            f"training.row_tokens = {row_tokens} can't hold the longest sequence: {sum_text}. Raise it, or 0 for that.",
        )
    if training and micro_batch_tokens < row_tokens:
        given = f"training.row_tokens = {row_tokens}" if config.training.row_tokens else f"{row_tokens} ({sum_text})"
        yield (
            "error",
            f"training.micro_batch_tokens = {micro_batch_tokens} is less than one row: {given}. Raise it, or shorten "
            "rows, prompts or responses.",
        )
    pages = math.ceil(longest / rollout.page_size) + 1  # as the decoder's engine counts: a page is kept to copy into
    if rollout.num_pages and rollout.num_pages < pages:
        yield (
            "error",
            f"rollout.num_pages = {rollout.num_pages} pages of rollout.page_size = {rollout.page_size} tokens can't "
            f"hold one full sequence and a page to copy into: {sum_text}. At least {pages} pages are needed, or 0 for "
            "enough of all slots.",
        )


def mesh_conflicts(config: RunConfig) -> Iterator[Problem]:
    """How training uses the mesh; sizes that are still -1 are left out."""
    training, stages, tensor = config.training, config.mesh.pipeline, config.mesh.tensor
    blocks = training_blocks(config).values()
    if (
        stages == 1
        and all(block.pipeline == 1 for block in blocks)
        and (training.pipeline_repeats > 1 or training.pipeline_micro_batches)
    ):
        yield (
            "error",
            f"training.pipeline_repeats = {training.pipeline_repeats} and training.pipeline_micro_batches = "
            f"{training.pipeline_micro_batches}, but mesh.pipeline = 1: there is no pipeline. Set mesh.pipeline, or "
            "leave both at their defaults, 1 and 0.",
        )
    elif stages > 0 and training.pipeline_micro_batches % stages:
        below = training.pipeline_micro_batches // stages * stages
        allowed = f"{below} or {below + stages}" if below else str(stages)
        yield (
            "error",
            f"training.pipeline_micro_batches = {training.pipeline_micro_batches} is not a multiple of mesh.pipeline = "
            f"{stages}. Set it to {allowed}, or to 0 for {4 * stages}.",
        )
    if training.sequence_parallel and tensor == 1 and all(block.tensor == 1 for block in blocks):
        yield (
            "error",
            "training.sequence_parallel = True, but mesh.tensor = 1: tokens are split over the devices of a tensor "
            "group, and each has one. Set mesh.tensor, or training.sequence_parallel = False.",
        )
    row_tokens = training.row_tokens or default_row_tokens(config)
    if training.sequence_parallel and tensor > 1 and row_tokens % tensor:
        yield (
            "error",
            f"training.row_tokens = {row_tokens} can't be split over mesh.tensor = {tensor}, as "
            f"training.sequence_parallel asks for. Set it to {row_tokens + -row_tokens % tensor}.",
        )
    yield from _layout_conflicts(config)
    yield from _offload_conflicts(config)


def _layout_conflicts(config: RunConfig) -> Iterator[Problem]:
    """What the layout of generation and the mesh must agree on; a -1 of the mesh agrees with anything."""
    if config.hybrid_engine.enable_3d_resharding:
        return
    tensor, mesh = config.rollout.tensor, config.mesh
    if tensor not in (0, mesh.tensor) and mesh.tensor != -1:
        yield (
            "error",
            "hybrid_engine.enable_3d_resharding = False keeps one layout for both phases, so rollout.tensor = "
            f"{tensor} can't differ from mesh.tensor = {mesh.tensor}. Set rollout.tensor = 0, or allow the change of "
            "layout.",
        )
    if mesh.pipeline not in (1, -1):
        yield (
            "error",
            f"hybrid_engine.enable_3d_resharding = False with mesh.pipeline = {mesh.pipeline}: every replica decodes "
            "with all layers, which no stage of a pipeline has. Set it to True, or mesh.pipeline to 1.",
        )


def _offload_conflicts(config: RunConfig) -> Iterator[Problem]:
    layers, adapters = config.hybrid_engine.offload_actor_layers, config.model.lora_rank
    if layers and adapters:
        yield (
            "error",
            f"hybrid_engine.offload_actor_layers = {layers} with model.lora_rank = {adapters}: the layers under "
            "adapters are shared by all roles, so they stay on the devices. Set one of them to 0.",
        )
    if layers and config.mesh.pipeline not in (1, -1):
        yield (
            "error",
            f"hybrid_engine.offload_actor_layers = {layers} with mesh.pipeline = {config.mesh.pipeline}: the first "
            "layers are all on the first stage, so the others would save nothing. Set one of them to its default.",
        )
    shared = not config.reference.path and config.placement.owner("reference") == "policy"
    if config.hybrid_engine.offload_reference and adapters and shared:
        yield (
            "error",
            f"hybrid_engine.offload_reference with model.lora_rank = {adapters}: the reference is the base under the "
            "adapters, which the policy needs on the devices. Switch it off, or set reference.path.",
        )


def _reward_conflicts(config: RunConfig, training: bool) -> Iterator[Problem]:
    from jaxrl_llm.rewards.calling import bind, find_function  # not at the top: rewards read their options' types

    rewards, name = config.rewards, config.algorithm.name
    entry = _algorithm(name)
    if not rewards and not config.reward_model.path and training and entry.generates and entry.needs_rewards:
        yield ("error", f"rewards is empty, and {name} learns from rewards alone: {_REWARD_EXAMPLE}")
    elif not rewards and not config.reward_model.path and config.data.eval and entry.evaluate is None:
        yield ("error", f"rewards is empty, and data.eval = {config.data.eval!r} is scored by them: {_REWARD_EXAMPLE}")
    if REWARD_MODEL in rewards and config.reward_model.path:
        yield (
            "error",
            f"rewards has one called {REWARD_MODEL!r}, which is the name of reward_model.path's score. Call it "
            "something else.",
        )
    for reward, settings in rewards.items():
        if not reward or "." in reward:
            yield (
                "error",
                f"rewards has one called {reward!r}: a name has no dot and is not empty, since its options are called "
                "rewards.NAME.weight and so on. Call it something else.",
            )
        if settings.function and ":" not in settings.function:  # a user's own function is loaded by its worker
            try:
                bind(find_function(settings.function), settings.options)
            except (LookupError, ValueError) as error:
                yield ("error", f"rewards.{reward}.function = {settings.function!r}: {error.args[0]}.")
    counted = config.eval.accuracy_reward
    alone = bool(config.reward_model.path) and not rewards
    if counted and alone:
        yield (
            "error",
            f"eval.accuracy_reward = {counted!r}, and the only reward is the model of reward_model.path, whose score "
            "has no bound from which an answer is correct. Leave it empty (eval/reward/mean is told all the same), or "
            "add a reward that is 1 where an answer is correct.",
        )
    elif counted and rewards and counted not in rewards:
        yield ("error", f"eval.accuracy_reward = {counted!r} is not in rewards.{nearest(counted, rewards)}")
    if config.data.eval and len(rewards) > 1 and not counted:
        yield (
            "error",
            f"There are several rewards ({', '.join(rewards)}), and eval.accuracy_reward is empty: set it to the one "
            "that is 1 or more where an answer is correct.",
        )
    if alone and config.data.eval and entry.evaluate is None and config.checkpoint.best_metric == "eval/accuracy":
        yield (
            "warning",
            "checkpoint.best_metric = 'eval/accuracy' does not exist where a reward model is the only reward, so no "
            "best checkpoint is kept. Set it to 'eval/reward/mean', or leave it empty.",
        )


_REWARD_EXAMPLE = "set for example config.rewards = {'math': {'function': 'math'}} (RLTrainer: reward='math')."


def fit_mesh(mesh: MeshConfig, device_count: int, of: str = "") -> MeshConfig:
    """``mesh`` with its -1 replaced, so that the product of the sizes is ``device_count``.

    Args:
      of: what the message says after the number of devices.

    Raises:
      UserError: a size is 0, two are -1, or the product is another number.
    """
    sizes = dataclasses.asdict(mesh)
    text = ", ".join(f"mesh.{axis} = {size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if 0 in sizes.values():
        raise UserError(f"{text}: a size of 0 is not allowed; use a positive number, or -1 once for the rest.")
    if len(free) > 1:
        raise UserError(f"{text}: only one size may be -1. {_factorisations(mesh, device_count)}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and device_count % fixed == 0:
        return dataclasses.replace(mesh, **{free[0]: device_count // fixed})
    if not free and fixed == device_count:
        return mesh
    relation = f"{fixed} does not divide {device_count}" if free else f"the product is {fixed}, not {device_count}"
    raise UserError(
        f"{text}: there are {device_count} devices{of}, and {relation}. {_factorisations(mesh, device_count)}"
    )


def generation_factors(mesh: MeshConfig, tensor: int, group: str = "mesh") -> dict[str, int]:
    """How generation with ``rollout.tensor`` divides a mesh: each axis into an outer and an inner part.

    A smaller tensor size leaves the inner part of ``tensor`` to replicas. A larger one takes the inner parts of
    ``fsdp``, ``pipeline`` and ``data``, in this order, into the tensor groups.

    Args:
      mesh: without a -1.
      group: of the options that give the sizes, for the message.

    Returns:
      The size of the inner part by axis.

    Raises:
      UserError: the axes can't be divided so; the message lists the sizes that can.
    """
    factors = _inner_sizes(mesh, tensor)
    if factors is None:
        count = math.prod(dataclasses.astuple(mesh))
        allowed = [size for size in range(1, count + 1) if _inner_sizes(mesh, size) is not None]
        raise UserError(
            f"rollout.tensor = {tensor} can't be made of {group}.tensor = {mesh.tensor} and the other axes (fsdp "
            f"{mesh.fsdp}, pipeline {mesh.pipeline}, data {mesh.data}): it divides {group}.tensor, or is "
            f"{group}.tensor times divisors of them. Allowed: {', '.join(map(str, allowed))}, or 0 for {group}.tensor."
        )
    return factors


def _inner_sizes(mesh: MeshConfig, tensor: int) -> dict[str, int] | None:
    sizes = {"fsdp": 1, "pipeline": 1, "data": 1, "tensor": 1}
    wanted = tensor or mesh.tensor
    if mesh.tensor % wanted == 0:
        return sizes | {"tensor": mesh.tensor // wanted}
    wanted, rest = divmod(wanted, mesh.tensor)
    if rest:
        return None
    for axis in ("fsdp", "pipeline", "data"):
        sizes[axis] = math.gcd(wanted, getattr(mesh, axis))
        wanted //= sizes[axis]
    return sizes if wanted == 1 else None


def _factorisations(mesh: MeshConfig, device_count: int) -> str:
    """Meshes that would work, those that keep most of the sizes asked for first."""
    stages = mesh.pipeline if mesh.pipeline > 0 and device_count % mesh.pipeline == 0 else 1
    rest = device_count // stages
    divisors = [d for d in range(1, rest + 1) if rest % d == 0]
    fitting = [
        (data, rest // data // tensor, tensor)
        for tensor in divisors
        for data in divisors
        if rest % (data * tensor) == 0
    ]
    asked = (mesh.data, mesh.fsdp, mesh.tensor)
    fitting.sort(key=lambda sizes: -sum(a == b for a, b in zip(sizes, asked, strict=True)))
    last = "" if stages == 1 else f", pipeline={stages}"
    shown = "; ".join(f"data={d}, fsdp={f}, tensor={t}{last}" for d, f, t in fitting[:6])
    return f"These multiply to {device_count}: {shown}{'; …' if len(fitting) > 6 else ''}."


def model_conflicts(config: RunConfig, model_config: Any, tokenizer: Any) -> Iterator[Problem]:
    """What only the model's configuration and the tokenizer can tell."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    longest = longest_sequence(config)
    if longest > model_config.max_position:
        turns = "" if longest == prompt + response else f" (of the turns that {config.algorithm.name} has: {longest})"
        yield (
            "error",
            f"data.max_prompt_tokens + rollout.max_new_tokens = {prompt} + {response} = {prompt + response}{turns} "
            "exceeds "
            f"the context of {model_config.max_position} tokens of the model {config.model.path!r}. Lower "
            "one of them.",
        )
    for group, mesh in policy_shaped(config):
        yield from _split_conflicts(mesh, model_config, group)
    for role in ("policy", *policy_copies(config)):
        if uneven := uneven_layers(config, model_config.num_layers, config.model.path or "model.architecture", role):
            yield ("error", uneven)
    yield from _generation_split_conflicts(*generation_tensor(config), model_config)
    offloaded = config.hybrid_engine.offload_actor_layers
    if offloaded > model_config.num_layers:
        yield (
            "error",
            f"hybrid_engine.offload_actor_layers = {offloaded}, and the model has {model_config.num_layers} layers. "
            "Give at most that many.",
        )
    yield from _special_id_conflicts(config, model_config, tokenizer)


def uneven_layers(config: RunConfig, num_layers: int, model: str, role: str = "policy") -> str | None:
    """Why the layers of a model that training reads can't be split into equal stages; None when they can."""
    group, mesh = block_of(config, role)
    stages, repeats = mesh.pipeline, config.training.pipeline_repeats
    if stages < 1 or num_layers % (stages * repeats) == 0:
        return None
    allowed = [str(pieces) for pieces in range(1, num_layers + 1) if num_layers % pieces == 0]
    asked = f"{group}.pipeline = {stages}"
    if repeats > 1:
        asked += f" with training.pipeline_repeats = {repeats}, {stages * repeats} pieces,"
    return (
        f"{asked} does not divide the {num_layers} layers of {model!r}: every stage needs as many. Allowed for "
        f"{group}.pipeline times training.pipeline_repeats: {', '.join(allowed)}."
    )


def _split_conflicts(mesh: MeshConfig, model_config: Any, group: str = "mesh") -> Iterator[Problem]:
    """Sizes of the parameters that the mesh can't split evenly (the vocabulary is padded, so it always can)."""
    split = {
        "tensor": {
            "query heads": model_config.num_heads,
            "key/value heads": model_config.num_kv_heads,
            "columns of the feed-forward layers (intermediate_size)": model_config.intermediate_size,
        },
        "fsdp": {"columns of the embedding (hidden_size)": model_config.hidden_size},
    }
    for axis, sizes in split.items():
        shards = getattr(mesh, axis)
        uneven = [f"{size} {name}" for name, size in sizes.items() if shards > 0 and size % shards]
        if uneven:
            common = math.gcd(*sizes.values())
            devices = math.prod(size for size in dataclasses.astuple(mesh) if size > 0)
            allowed = [d for d in range(1, min(common, devices) + 1) if common % d == 0]
            yield (
                "error",
                f"{group}.{axis} = {shards} does not divide the {' and the '.join(uneven)} of the model. "
                f"Allowed: {', '.join(map(str, allowed))}; {group}.data can take the other devices.",
            )


def _generation_split_conflicts(option: str, tensor: int, model_config: Any) -> Iterator[Problem]:
    sizes = {
        "key/value heads": model_config.num_kv_heads,
        "columns of the feed-forward layers (intermediate_size)": model_config.intermediate_size,
    }
    uneven = [f"{size} {name}" for name, size in sizes.items() if tensor and size % tensor]
    if uneven:
        common = math.gcd(*sizes.values())
        allowed = [size for size in range(1, common + 1) if common % size == 0]
        yield (
            "error",
            f"{option} = {tensor} does not divide the {' and the '.join(uneven)} of the model. Allowed: "
            f"{', '.join(map(str, allowed))}, as far as the mesh has them; the other devices become replicas.",
        )


def _special_id_conflicts(config: RunConfig, model_config: Any, tokenizer: Any) -> Iterator[Problem]:
    vocabulary = model_config.vocab_size
    if len(tokenizer) > vocabulary:
        yield (
            "error",
            f"The tokenizer {config.tokenizer.path!r} has {len(tokenizer)} tokens but the model only "
            f"{vocabulary} "
            "vocabulary rows: they don't belong together.",
        )
    elif (last := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary:  # ids may have gaps
        yield (
            "error",
            f"The tokenizer {config.tokenizer.path!r} has the token id {last}, and the model {vocabulary} vocabulary "
            "rows, numbered from 0: they don't belong together.",
        )
    ends = model_config.end_ids(tokenizer)
    if not ends and not config.rollout.ignore_eos:
        yield (
            "error",
            f"Neither the model {config.model.path!r} nor its tokenizer names an end-of-sequence token.",
        )
    named = {"end-of-sequence": ends, "padding": (model_config.pad_token_id, tokenizer.pad_token_id)}
    for kind, ids in named.items():
        for token_id in sorted({i for i in ids if i is not None}):
            if not 0 <= token_id < vocabulary:
                yield (
                    "error",
                    f"The {kind} id {token_id} of the model {config.model.path!r} is outside its vocabulary "
                    "of "
                    f"{vocabulary} rows. Correct its config.json or tokenizer.",
                )
