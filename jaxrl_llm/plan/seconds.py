"""Seconds of the phases of a step, from the work in it and a device's peak rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxrl_llm.plan.collectives import Collective
from jaxrl_llm.plan.device_kinds import DeviceKind, Efficiency, PlannedDevices
from jaxrl_llm.plan.formulas import matrix_parameters
from jaxrl_llm.plan.programs import device_bytes
from jaxrl_llm.plan.setup import Setup

ROW_FILL = 0.9
"""Part of packed rows that holds tokens."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step has to do, over all devices, where every prompt and every completion is as long as it may be.

    Attributes:
      sequences: completions (or sequences of the data) of a step.
      columns: tokens of packed rows; a prompt that completions share counts once.
      updates: optimizer updates of a step; ``micro_batches`` is of one.
    """

    prompts: int
    sequences: int
    prompt_tokens: int
    new_tokens: int
    columns: int
    updates: int
    micro_batches: int

    @classmethod
    def of(cls, setup: Setup) -> Work:
        config = setup.config
        prompts, prompt = config.train_batch_size, config.data.max_prompt_tokens
        generates = setup.algorithm.generates
        each = config.rollout.samples_per_prompt if generates else 2 if setup.algorithm.data == "preference" else 1
        new, sequences = config.rollout.max_new_tokens, prompts * each
        shared = config.training.share_prompts and generates
        columns = sequences * new + (prompts if shared else sequences) * prompt
        updates = -(-prompts // config.training.mini_batch_size) * config.training.epochs
        per_micro = setup.row_shape.rows_per_micro * setup.row_shape.row_tokens * ROW_FILL
        micro = math.ceil(columns * config.training.epochs / updates / per_micro)
        return cls(prompts, sequences, prompt, new, columns, updates, micro)


def forward_flops(setup: Setup, role: str, tokens: float, seen: float) -> float:
    """Of one pass over so many tokens, each of which sees ``seen`` on average; over all devices."""
    layers, head = matrix_parameters(setup, role)
    shape = setup.models[role].decoder.config
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * seen
    return tokens * (2 * (layers + head) + attention)


def phase_seconds(
    setup: Setup,
    planned: PlannedDevices,
    efficiency: Efficiency,
    work: Work,
    sent: Mapping[str, list[Collective]],
    idle: float,
) -> dict[str, float]:
    kind, devices = planned.kind, setup.mesh.size
    rate = kind.flops * efficiency.training * devices
    seen = (work.prompt_tokens + work.new_tokens) / 2
    found: dict[str, float] = {}
    if setup.generation is not None:
        layout = setup.layout
        link = (kind.link_rate if devices <= 8 else kind.network_rate) * efficiency.communication
        found["layout change"] = layout.received / link + 2 * layout.new / kind.memory_rate
        prefilling = forward_flops(setup, setup.main, work.prompts * work.prompt_tokens, work.prompt_tokens / 2) / rate
        sending = _prefills(setup, work) * _communication(sent.get("prefill", []), kind, efficiency, 1)
        found["prefill"] = prefilling + sending
        found["decode"] = _decode_seconds(setup, planned, efficiency, work, sent.get("decode", []))
    frozen = [role for role in setup.models if role not in setup.trained]
    divergence = setup.algorithm.divergence(setup.config.algorithm.options)
    passes = [role for role in frozen if divergence is None or role != divergence.role]
    if work.updates > 1 and setup.algorithm.generates:
        passes += setup.trained  # the old log-probabilities or values
    if passes:
        found["log-probs"] = sum(forward_flops(setup, role, work.columns, seen) for role in passes) / rate / (1 - idle)
    again = {"none": 3, "dots": 3.3, "full": 4}[setup.config.model.remat]
    for role in setup.trained:
        name = f"update of {role}"
        compute = again * forward_flops(setup, role, work.columns * setup.config.training.epochs, seen) / rate
        # Sums within a tensor group are waited for; gathers and scatters of weights run beside products.
        between = [one for one in sent.get(name, []) if set(one.axes) & {"tensor", "pipeline"}]
        beside = [one for one in sent.get(name, []) if one not in between]
        waited = _communication(between, kind, efficiency, work.micro_batches)
        hidden = _communication(beside, kind, efficiency, work.micro_batches)
        optimizer = work.updates * 3 * device_bytes(setup.states[role].opt_state) / kind.memory_rate
        compute /= 1 - idle
        found[name] = max(compute, work.updates * hidden) + work.updates * waited + optimizer
    return found


def _prefills(setup: Setup, work: Work) -> int:
    assert setup.generation is not None
    engine = setup.generation.engine
    return math.ceil(work.prompts * work.prompt_tokens / engine.num_replicas / setup.config.rollout.prefill_tokens)


def _communication(sent: Sequence[Collective], kind: DeviceKind, efficiency: Efficiency, trips: int) -> float:
    """Seconds of the collectives of one run of a program whose loop has so many trips."""
    each = ((trips if one.in_loop else 1, one) for one in sent)
    return sum(times * one.seconds(kind, efficiency.communication, efficiency.collective_s) for times, one in each)


def _decode_seconds(
    setup: Setup, planned: PlannedDevices, efficiency: Efficiency, work: Work, sent: list[Collective]
) -> float:
    """Weights and pages are read once a token; every slot is busy until the last wave."""
    assert setup.generation is not None
    generation, kind = setup.generation, planned.kind
    slots, replicas = setup.config.rollout.num_slots, generation.engine.num_replicas
    per_replica = math.ceil(work.sequences / replicas)
    steps = max(work.new_tokens, math.ceil(per_replica * work.new_tokens / slots))
    rows, tensor = min(slots, per_replica), generation.mesh.shape["tensor"]
    shape = generation.decoder.config
    cached = work.prompt_tokens + work.new_tokens / 2
    pages = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * setup.dtype.itemsize / tensor * cached * rows
    weights = device_bytes(generation.params) - (
        0 if shape.tie_embeddings else device_bytes(generation.params["embed"])
    )
    reading = (weights + pages) / (kind.memory_rate * efficiency.decoding)
    computing = forward_flops(setup, setup.main, rows, cached) / tensor / (kind.flops * efficiency.training)
    inside = [one for one in sent if one.in_loop]
    waiting = _communication(inside, kind, efficiency, 1)
    return steps * (max(reading, computing) + waiting)
