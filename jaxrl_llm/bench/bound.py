"""What the machine allows: its measured rates, and by them the least seconds of a GRPO step and of generation.

With L layers of width D, H query and K key/value heads of size h, MLP width M and vocabulary V, a model has

    W = L (D (H + 2 K) h + H h D + 3 D M)    weights in the matrices of layers, and  O = V D  in the output projection.

Floating-point operations, 2 for a multiplication and its sum; a query that sees n keys costs A n, ``A = 4 L H h``:

    prefill of a prompt of P tokens      2 W (P - 1) + A P (P - 1) / 2       its last token is the first that decodes
    a decode step of B rows, context c   2 (W + O) B + A B c
    update of one group of S samples     6 W (P + S N) + 6 O S N + 3 A (P (P + 1) / 2 + S (N P + N (N + 1) / 2))

with N new tokens; the group shares its prompt, in prefill as in the update, and the backward pass computes nothing
again. Bytes that memory must move: a decode step reads W + O weights and ``2 L K h`` numbers for each row and token of
context; AdamW reads parameters, both moments and the gradient and writes the first three, all in float32. Norms, the
sampler, softmax, the host and the change of layout are left out, and prefill and update are taken to be bound by
products alone, so no program that reads each row's own context is faster by these rates. (One that reads what a group's
prompt holds once for all its rows may be.)
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.bench.traffic import TRAFFIC, Traffic
from jaxrl_llm.bench.workload import Workload

if TYPE_CHECKING:
    from jaxrl_llm.models.config import ModelConfig

FLOAT32 = 4
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Machine:
    """Operations per second of float32 matrix products, and bytes per second that memory moves."""

    flops: float
    bandwidth: float


def measure_machine(size: int = 2048, num_bytes: int = 2**28) -> tuple[Machine, dict[str, float]]:
    """The better of all ways to measure, and each of them by name: medians of several turns.

    Args:
      size: side of the square matrices.
      num_bytes: of the arrays that are copied or read; larger than any cache.
    """
    import jax
    import jax.numpy as jnp

    from jaxrl_kernels.bench import timing

    side = int((num_bytes // FLOAT32) ** 0.5)
    matrix, vector = jnp.ones((side, side), jnp.float32), jnp.ones(side, jnp.float32)
    rates = {"float32 product by XLA, GFLOP/s": timing.product_rate(size, jnp.float32)}
    moved = {
        "copy by XLA (read and write), GB/s": timing.copy_bandwidth(num_bytes),
        "matrix times vector by XLA (read), GB/s": matrix.nbytes / timing.seconds(jax.jit(jnp.dot), matrix, vector),
    }
    if jax.default_backend() == "cpu":  # numpy is of the same machine
        left, right = np.random.default_rng(0).standard_normal((2, size, size), np.float32)
        rates["float32 product by numpy, GFLOP/s"] = 2 * size**3 / _seconds(lambda: left @ right)
        source, target = np.ones((2, num_bytes // FLOAT32), np.float32)
        moved["copy by numpy (read and write), GB/s"] = 2 * num_bytes / _seconds(lambda: np.copyto(target, source))
    machine = Machine(max(rates.values()), max(moved.values()))
    return machine, {name: value / 1e9 for name, value in (rates | moved).items()}


def _seconds(call) -> float:
    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(_REPEATS))


def weights(config: ModelConfig) -> tuple[int, int]:
    """``(W, O)`` of the module's formulas."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.num_layers * layer, config.vocab_size * config.hidden_size


def _per_key(config: ModelConfig) -> int:
    return 4 * config.num_layers * config.num_heads * config.head_size


def prefill_flops(config: ModelConfig, prompt_tokens: int) -> float:
    """Of one prompt."""
    cached = prompt_tokens - 1
    return 2 * weights(config)[0] * cached + _per_key(config) * cached * (cached + 1) / 2


def decode_flops(config: ModelConfig, rows: int, context: int) -> float:
    """Of one step."""
    return rows * (2 * sum(weights(config)) + _per_key(config) * context)


def decode_bytes(config: ModelConfig, rows: int, context: int) -> float:
    """Read in one step."""
    return FLOAT32 * (
        sum(weights(config)) + rows * context * 2 * config.num_layers * config.num_kv_heads * config.head_size
    )


def update_flops(config: ModelConfig, work: Workload) -> float:
    """Of all groups, forward and backward."""
    layers, output = weights(config)
    prompt, new = work.prompt_tokens, work.new_tokens
    seen = prompt * (prompt + 1) / 2 + work.samples * (new * prompt + new * (new + 1) / 2)
    group = 6 * layers * (prompt + work.samples * new) + 6 * output * work.samples * new + 3 * _per_key(config) * seen
    return work.prompts * group


def optimizer_bytes(config: ModelConfig) -> float:
    """Read and written by one update of AdamW."""
    layers, output = weights(config)
    return 7 * FLOAT32 * (layers + output * (1 if config.tie_embeddings else 2))


def generation_seconds(config: ModelConfig, traffic: Traffic, machine: Machine) -> dict[str, float]:
    """The least seconds of a load whose samples all run from the beginning: of prefill and of decode."""
    prefill = len(traffic.lengths) * prefill_flops(config, traffic.prompt_tokens) / machine.flops
    decode = 0.0
    for step in range(max(traffic.lengths)):
        rows = traffic.samples * sum(length > step for length in traffic.lengths)
        context = traffic.prompt_tokens + step
        by_products = decode_flops(config, rows, context) / machine.flops
        decode += max(by_products, decode_bytes(config, rows, context) / machine.bandwidth)
    return {"prefill": prefill, "decode": decode}


def figures(config: ModelConfig, work: Workload, machine: Machine) -> dict[str, float]:
    """Of one GRPO step, and of each load of the generation benchmark."""
    traffic = Traffic("step", (work.new_tokens,) * work.prompts, work.samples, work.prompt_tokens)
    steps = [(work.sequences, work.prompt_tokens + step) for step in range(work.new_tokens)]
    seconds = generation_seconds(config, traffic, machine)
    seconds["update"] = update_flops(config, work) / machine.flops
    seconds["optimizer"] = optimizer_bytes(config) / machine.bandwidth
    found = {
        "step: prefill, TFLOP": work.prompts * prefill_flops(config, work.prompt_tokens) / 1e12,
        "step: decode, TFLOP": sum(decode_flops(config, *step) for step in steps) / 1e12,
        "step: decode must read, GB": sum(decode_bytes(config, *step) for step in steps) / 1e9,
        "step: update, TFLOP": update_flops(config, work) / 1e12,
        "step: optimizer must move, GB": optimizer_bytes(config) / 1e9,
        **{f"step: {name} takes at least, s": value for name, value in seconds.items()},
        "step takes at least, s": sum(seconds.values()),
    }
    for load in TRAFFIC:
        least = sum(generation_seconds(config, load, machine).values())
        found |= {f"{load.name}: at least, s": least, f"{load.name}: at most, tokens/s": load.tokens / least}
    return found
