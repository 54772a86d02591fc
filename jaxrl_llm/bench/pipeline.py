"""Time of an update against the micro-batches that go through a pipeline together, and how long its stages are idle.

A GRPO update of a random model whose layers are split over `stages` devices, rows full of tokens. The share of idle
time is told twice: by the schedule's formula, and measured. As time grows by the same for every micro-batch, what is
there without any is the pipeline filling and draining (and what an update costs besides: its optimizer)::

    s = fixed + M * each        measured = fixed / s        (least squares over the points of a schedule)

CPU devices that share cores spend the idle ticks computing what is thrown away, so that the time is that of devices of
their own up to a factor.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.bench.growth import Row
from jaxrl_llm.bench.whole_model import WORK
from jaxrl_llm.config import MeshConfig, OptimizerConfig
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.pipeline import Schedule
from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.sharding import TRAINING, batch_shards, make_mesh


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured.

    Attributes:
      model: with as many layers as the largest of `repeats` for each stage, in place of its own.
      micro_batches: for each stage, by point.
      row_tokens: a micro-batch is one row of so many.
      turns: of which each point is the median, after one that compiles.
    """

    model: ModelConfig
    repeats: tuple[int, ...]
    micro_batches: tuple[int, ...]
    row_tokens: int
    turns: int

    def decoder(self, stages: int) -> Decoder:
        layers = stages * max(self.repeats)
        return Decoder(dataclasses.replace(self.model, num_layers=layers, windows=(None,) * layers))


FULL = Size(WORK["small"].model, (1, 2), (1, 2, 4, 8), 256, 3)
QUICK = Size(WORK["tiny"].model, (1, 2), (1, 2), 16, 2)


def title(size: Size, stages: int) -> str:
    return (
        f"A GRPO update, {stages * max(size.repeats)} layers of width {size.model.hidden_size} in {stages} stages, "
        f"one row of {size.row_tokens} tokens a micro-batch"
    )


def measure(size: Size, stages: int) -> Iterator[list[Row]]:
    """The rows of the table, those of a schedule together."""
    for repeats in size.repeats:
        schedules = [Schedule(stages, stages * count, repeats) for count in size.micro_batches]
        seconds = [update_seconds(size, schedule) for schedule in schedules]
        counts = np.array([schedule.micro_batches for schedule in schedules])
        each, fixed = np.polyfit(counts, np.array(seconds), 1)
        yield [
            {
                "schedule": "GPipe" if repeats == 1 else f"{repeats} repeats",
                "micro-batches": float(schedule.micro_batches),
                "ticks": float(schedule.ticks),
                "idle, %": 100 * schedule.bubble,
                "measured, %": 100 * float(fixed) / (float(fixed) + schedule.micro_batches * float(each)),
                "s": second,
                "tokens/s": schedule.micro_batches * size.row_tokens / second,
            }
            for schedule, second in zip(schedules, seconds, strict=True)
        ]


def update_seconds(size: Size, schedule: Schedule) -> float:
    """The median of one update on as many full micro-batches as go through together."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, pipeline=schedule.stages), jax.devices()[: schedule.stages])
    decoder = size.decoder(schedule.stages)
    shardings = TRAINING.shardings(mesh, decoder.logical_axes())
    params = jax.jit(decoder.init, out_shardings=shardings)(jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6), 10_000)
    role, role_shardings = update.init_role(params, optimizer, shardings, mesh)
    forward = update.Forward(decoder, 1.0, jnp.dtype(jnp.float32), "none", 1024, unroll=False, schedule=schedule)
    grpo = ALGORITHMS["grpo"]
    step = update.make_update(forward, grpo, grpo.options(), optimizer, 1.0, role_shardings, mesh)
    shape = packing.RowShape.of(size.row_tokens, size.row_tokens, batch_shards(mesh), schedule)
    batch, _ = packing.pack(
        _full_rows(size, schedule.micro_batches),
        shape,
        aggregation="token-mean",
        max_response_tokens=size.row_tokens,
        max_micro_batches=1,
    )
    rows, counts = update.put_rows(batch, mesh), (jnp.int32(1), jnp.float32(batch.denominator))
    seconds = []
    for _ in range(size.turns + 1):
        start = time.perf_counter()
        role, metrics = step(role, rows, *counts, old_is_actor=True)
        jax.block_until_ready((role, metrics))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _full_rows(size: Size, count: int) -> Sequences:
    """A sequence a row, with random tokens and advantages."""
    random = np.random.default_rng(0)
    mask = np.arange(size.row_tokens) >= 1
    made = Sequences([], [], np.arange(count, dtype=np.int32))
    made.advantages, made.sampler_logprobs = [], []
    for _ in range(count):
        made.tokens.append(random.integers(1, size.model.vocab_size, size.row_tokens).astype(np.int32))
        made.loss_mask.append(mask)
        made.advantages.append(np.where(mask, random.normal(), 0).astype(np.float32))
        made.sampler_logprobs.append(np.where(mask, -1.0, 0).astype(np.float32))
    return made
