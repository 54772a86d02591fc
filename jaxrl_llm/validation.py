"""What several options must agree on. Each rule is a line or two and says in its message what to change."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxrl_llm.config import MeshConfig, RunConfig, _algorithms
from jaxrl_llm.errors import UserError

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


def conflicts(config: RunConfig) -> Iterator[Problem]:
    """Options of ``config`` that exclude each other or can't be meant, judged without model, data or
    devices."""
    yield from _model_conflicts(config)
    yield from _batch_conflicts(config)
    yield from _rollout_conflicts(config)
    yield from _length_conflicts(config)
    if config.mesh.pipeline != 1:
        yield (
            "error",
            f"mesh.pipeline = {config.mesh.pipeline}: pipelines are not supported yet; set it to 1.",
        )
    validate = _algorithms()[config.algorithm.name].validate
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
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        yield (
            "error",
            f"training.mini_batch_size = {mini} does not divide train_batch_size = {batch}, so updates would "
            "differ "
            f"in size. Allowed: {', '.join(map(str, divisors))}.",
        )
    if bool(config.num_steps) == bool(config.data.num_epochs):
        yield (
            "error",
            f"num_steps = {config.num_steps} and data.num_epochs = {config.data.num_epochs}: exactly one of "
            "them "
            "must be positive, the other 0, since each says how long the run is.",
        )
    updates = config.num_steps * (batch // mini if mini else 1) * config.training.epochs
    if config.num_steps and config.optimizer.warmup_steps > updates:
        yield (
            "warning",
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps} is more than the {updates} updates of "
            "this "
            "run: the learning rate never reaches optimizer.learning_rate.",
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
    filters = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    if any(filters.values()):
        used = " and ".join(f"rollout.{name} = {getattr(rollout, name)}" for name, on in filters.items() if on)
        yield (
            "warning",
            f"{used}: completions come from a truncated distribution, while log-probabilities, ratios and KL "
            "are of "
            "the full one, so the policy gradient is biased.",
        )


def _length_conflicts(config: RunConfig) -> Iterator[Problem]:
    rollout, training = config.rollout, config.training
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    sum_text = (
        f"data.max_prompt_tokens + rollout.max_new_tokens = {config.data.max_prompt_tokens} + "
        f"{rollout.max_new_tokens} = {longest}"
    )
    row_tokens = training.row_tokens or longest
    if row_tokens < longest:
        yield (
            "error",
            f"training.row_tokens = {row_tokens} can't hold the longest sequence: {sum_text}. Raise it, or 0 for that.",
        )
    if training.micro_batch_tokens < row_tokens:
        yield (
            "error",
            f"training.micro_batch_tokens = {training.micro_batch_tokens} is less than one row of "
            f"{row_tokens} "
            f"tokens ({sum_text}). Raise it, or shorten prompts or responses.",
        )
    pool = rollout.num_pages * rollout.page_size
    if rollout.num_pages and pool < longest:
        yield (
            "error",
            f"rollout.num_pages × rollout.page_size = {rollout.num_pages} × {rollout.page_size} = {pool} "
            "tokens can't "
            f"hold one full sequence: {sum_text}. At least {math.ceil(longest / rollout.page_size)} pages "
            "are needed.",
        )


def fit_mesh(mesh: MeshConfig, device_count: int) -> MeshConfig:
    """``mesh`` with its -1 replaced, so that the product of the sizes is ``device_count``.

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
    raise UserError(f"{text}: there are {device_count} devices, and {relation}. {_factorisations(mesh, device_count)}")


def _factorisations(mesh: MeshConfig, device_count: int) -> str:
    """Meshes that would work, those that keep most of the sizes asked for first."""
    divisors = [d for d in range(1, device_count + 1) if device_count % d == 0]
    fitting = [
        (data, device_count // data // tensor, tensor)
        for tensor in divisors
        for data in divisors
        if device_count % (data * tensor) == 0
    ]
    asked = (mesh.data, mesh.fsdp, mesh.tensor)
    fitting.sort(key=lambda sizes: -sum(a == b for a, b in zip(sizes, asked, strict=True)))
    shown = "; ".join(f"data={d}, fsdp={f}, tensor={t}" for d, f, t in fitting[:6])
    return f"These multiply to {device_count}: {shown}{'; …' if len(fitting) > 6 else ''}."


def model_conflicts(config: RunConfig, model_config: Any, tokenizer: Any) -> Iterator[Problem]:
    """What only the model's configuration and the tokenizer can tell."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    if prompt + response > model_config.max_position:
        yield (
            "error",
            f"data.max_prompt_tokens + rollout.max_new_tokens = {prompt} + {response} = {prompt + response} "
            "exceeds "
            f"the context of {model_config.max_position} tokens of the model {config.model.path!r}. Lower "
            "one of them.",
        )
    for name, heads in (("query", model_config.num_heads), ("key/value", model_config.num_kv_heads)):
        tensor = config.mesh.tensor
        if tensor > 0 and heads % tensor:
            allowed = [
                d for d in range(1, heads + 1) if model_config.num_heads % d == 0 == model_config.num_kv_heads % d
            ]
            yield (
                "error",
                f"mesh.tensor = {tensor} does not divide the {heads} {name} heads of the model. "
                f"Allowed: {', '.join(map(str, allowed))}.",
            )
    yield from _special_id_conflicts(config, model_config, tokenizer)


def _special_id_conflicts(config: RunConfig, model_config: Any, tokenizer: Any) -> Iterator[Problem]:
    vocabulary = model_config.vocab_size
    if len(tokenizer) > vocabulary:
        yield (
            "error",
            f"The tokenizer {config.tokenizer.path!r} has {len(tokenizer)} tokens but the model only "
            f"{vocabulary} "
            "vocabulary rows: they don't belong together.",
        )
    ends = tuple(model_config.eos_token_ids)
    if not ends and tokenizer.eos_token_id is None and not config.rollout.ignore_eos:
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
