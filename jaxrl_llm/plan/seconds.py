"""Seconds of the phases of a step, from the work in it and a device's peak rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from jaxrl_kernels.gpu_compile import HOST_DEVICES
from jaxrl_llm.packing import RowShape
from jaxrl_llm.plan.collectives import Collective
from jaxrl_llm.plan.device_kinds import DeviceKind, Efficiency, PlannedDevices
from jaxrl_llm.plan.formulas import matrix_parameters
from jaxrl_llm.plan.passes import sequences_per_prompt
from jaxrl_llm.plan.programs import device_bytes, shard_bytes
from jaxrl_llm.plan.setup import COMPARISON, READING, SCORES, Setup
from jaxrl_llm.roles import Model

ROW_FILL = 0.9
"""Part of packed rows that holds tokens."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step has to do, over all devices, where every prompt and every completion is as long as it may be.

    Attributes:
      sequences: completions (or sequences of the data) of a step.
      columns: tokens of packed rows; a prompt that completions share counts once.
      updates: optimizer updates of a step.
      batches: optimizer batches of a step, each of which every epoch learns from once.
    """

    prompts: int
    sequences: int
    prompt_tokens: int
    new_tokens: int
    columns: int
    updates: int
    batches: int

    @classmethod
    def of(cls, setup: Setup) -> Work:
        config = setup.config
        prompts, prompt = config.train_batch_size, config.data.max_prompt_tokens
        new, sequences = config.rollout.max_new_tokens, prompts * sequences_per_prompt(config, setup.algorithm)
        shared = config.training.share_prompts and setup.algorithm.generates
        columns = sequences * new + (prompts if shared else sequences) * prompt
        batches = -(-prompts // config.training.mini_batch_size)
        return cls(prompts, sequences, prompt, new, columns, batches * config.training.epochs, batches)

    def micro_batches(self, shape: RowShape) -> int:
        """Of one optimizer batch."""
        return math.ceil(self.columns / self.batches / (shape.rows_per_micro * shape.row_tokens * ROW_FILL))


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
) -> dict[str, float]:
    """By phase; those that are computed by programs of `Setup.programs` have their names."""
    kind = planned.kind
    found: dict[str, float] = {}
    if setup.generation is not None:
        mesh, layout = setup.generation.mesh, setup.layout
        taking_part = mesh.size if setup.groups.generation is None else mesh.size + setup.mesh.size
        link = (kind.link_rate if taking_part <= HOST_DEVICES else kind.network_rate) * efficiency.communication
        found["layout change"] = layout.received / link + 2 * layout.new / kind.memory_rate
        flops = forward_flops(setup, setup.main, work.prompts * work.prompt_tokens, work.prompt_tokens / 2)
        sending = _prefills(setup, work) * _communication(sent.get("prefill", []), kind, efficiency, 1)
        found["prefill"] = flops / (kind.flops * efficiency.training * mesh.size) + sending
        found["decode"] = _decode_seconds(setup, planned, efficiency, work, sent.get("decode", []))
    if (scorer := setup.reward_model) is not None:
        batches, padded = scorer.batches(work.sequences, work.prompt_tokens + work.new_tokens)
        computing = scorer.flops(padded) / (kind.flops * efficiency.training * scorer.program.mesh.size)
        found[SCORES] = computing + batches * _communication(sent.get(SCORES, []), kind, efficiency, 1)
    for one in setup.passes:
        found[one.name] = _pass_seconds(setup, kind, efficiency, work, one.role, one.share, sent.get(one.name, []))
    if setup.config.placement.staleness:  # one micro-batch
        micro = 1 / work.micro_batches(setup.row_shape) / work.batches
        sending = sent.get(COMPARISON, [])
        found[COMPARISON] = _pass_seconds(setup, kind, efficiency, work, setup.main, micro, sending)
    if setup.apart_teacher is not None:
        each, sending = setup.config.training.epochs, sent.get(READING, [])
        found[READING] = _pass_seconds(setup, kind, efficiency, work, setup.apart_teacher, each, sending)
    for role in setup.trained:
        name = f"update of {role}"
        found[name] = _update_seconds(setup, kind, efficiency, work, role, sent.get(name, []))
    return found


def step_seconds(setup: Setup, seconds: Mapping[str, float]) -> float:
    """Of a whole step. Roles of different blocks are updated at the same time, and with `placement.staleness` all that
    samples runs beside all that learns."""
    updates: dict[Mesh, float] = {}
    for role in setup.trained:
        mesh = setup.models[role].mesh
        updates[mesh] = updates.get(mesh, 0.0) + seconds[f"update of {role}"]
    sampling = sum(seconds.get(name, 0.0) for name in ("prefill", "decode", SCORES))
    others = sum(seconds.values()) - sampling - sum(updates.values()) - seconds.get("layout change", 0.0)
    learning = others + max(updates.values())
    both = max(sampling, learning) if setup.config.placement.staleness else sampling + learning
    return both + seconds.get("layout change", 0.0)


def _pass_seconds(
    setup: Setup,
    kind: DeviceKind,
    efficiency: Efficiency,
    work: Work,
    role: str,
    share: float,
    sent: Sequence[Collective],
) -> float:
    """Of forward passes of a role over a share of a step's sequences."""
    model = setup.models[role]
    seen = (work.prompt_tokens + work.new_tokens) / 2
    rate = kind.flops * efficiency.training * model.mesh.size * (1 - _idle(model))
    computing = share * forward_flops(setup, role, work.columns, seen) / rate
    between, beside = _waited_and_hidden(sent)
    trips = work.micro_batches(setup.row_shapes[model.mesh])
    waited, hidden = (
        share * work.batches * _communication(part, kind, efficiency, trips) for part in (between, beside)
    )
    return max(computing, hidden) + waited


def _update_seconds(
    setup: Setup, kind: DeviceKind, efficiency: Efficiency, work: Work, role: str, sent: Sequence[Collective]
) -> float:
    model = setup.models[role]
    again = {"none": 3, "dots": 3.3, "full": 4}[setup.config.model.remat]
    seen, tokens = (work.prompt_tokens + work.new_tokens) / 2, work.columns * setup.config.training.epochs
    flops = again * forward_flops(setup, role, tokens, seen)
    if setup.teacher is not None and setup.apart_teacher is None:  # it reads the rows in the same program
        flops += forward_flops(setup, setup.teacher, tokens, seen)
    computing = flops / (kind.flops * efficiency.training * model.mesh.size * (1 - _idle(model)))
    between, beside = _waited_and_hidden(sent)
    trips = work.micro_batches(setup.row_shapes[model.mesh])
    waited, hidden = (work.updates * _communication(part, kind, efficiency, trips) for part in (between, beside))
    optimizer = work.updates * 3 * shard_bytes(setup.states[role].opt_state) / kind.memory_rate
    return max(computing, hidden) + waited + optimizer


def _waited_and_hidden(sent: Sequence[Collective]) -> tuple[list[Collective], list[Collective]]:
    """Sums within a tensor group are waited for; gathers and scatters of weights run beside products."""
    between = [one for one in sent if set(one.axes) & {"tensor", "pipeline"}]
    return between, [one for one in sent if one not in between]


def _idle(model: Model) -> float:
    """Part of the time in which a pipeline's stages have nothing to do."""
    return 0.0 if model.forward.schedule is None else model.forward.schedule.bubble


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
