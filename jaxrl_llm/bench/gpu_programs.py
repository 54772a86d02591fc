"""The whole decode dispatch and training step of a Llama-3.1-8B-shaped model, compiled for H200s that are not here.

    JAX_PLATFORMS=cpu python -m jaxrl_llm.bench.gpu_programs                  a table: memory, seconds to compile
    JAX_PLATFORMS=cpu python -m jaxrl_llm.bench.gpu_programs --layers 4 --json FILE --vocab-chunk 16384

Needs the CUDA plugin of jax's version, no GPU and no weights (see `jaxrl_kernels.gpu_compile`). The programs are the
project's own: those of `Engine` and `update.make_update`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re
import time
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_kernels import gpu_compile
from jaxrl_llm import packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.grpo import GRPOOptions
from jaxrl_llm.config import MeshConfig, OptimizerConfig, RolloutConfig
from jaxrl_llm.models import low_precision
from jaxrl_llm.models.config import ModelConfig, RopeConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.plan.abstract_roles import with_shardings
from jaxrl_llm.plan.programs import Generation, Program, update_program
from jaxrl_llm.sharding import TRAINING, batch_shards, make_mesh

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    padded_vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    max_position=131072,
    norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0, type="llama3", factor=8.0, original_max_position=8192),
    windows=(None,) * 32,
)
"""The shape of Llama 3.1 8B."""

MESHES = {
    "1": MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1),
    "tensor 8": MeshConfig(data=1, fsdp=1, tensor=8, pipeline=1),
    "fsdp 4 x tensor 2": MeshConfig(data=1, fsdp=4, tensor=2, pipeline=1),
}


def with_layers(num_layers: int, config: ModelConfig = LLAMA_8B) -> ModelConfig:
    return dataclasses.replace(config, num_layers=num_layers, windows=config.windows[:1] * num_layers)


def gpu_mesh(config: MeshConfig) -> Mesh:
    """The project's mesh over compile-only H200s."""
    count = config.data * config.fsdp * config.tensor * config.pipeline
    return make_mesh(config, gpu_compile.devices(count))


def decode_program(
    config: ModelConfig,
    mesh: Mesh,
    *,
    num_slots: int = 64,
    context: int = 4096,
    attention: str = "auto",
    weight_dtype: str = low_precision.COMPUTE,
) -> Program:
    """One decode dispatch of the engine in bfloat16, with pools for all slots at full length on each replica."""
    rollout = RolloutConfig(num_slots=num_slots, page_size=16, attention=attention, weight_dtype=weight_dtype)
    return Generation(Decoder(config), mesh, rollout, context, jnp.bfloat16).decode()


def training_program(
    config: ModelConfig,
    mesh: Mesh,
    *,
    row_tokens: int = 4096,
    micro_batches: int = 4,
    vocab_chunk: int = 0,
    moments_on_host: bool = False,
) -> Program:
    """One update: GRPO, AdamW with a float32 state, bfloat16 compute, one row per batch shard, layers computed again
    for the backward pass.

    Args:
      moments_on_host: as with ``hybrid_engine.offload_optimizer``.
    """
    decoder = Decoder(config)
    optimizer = make_optimizer(OptimizerConfig(name="adamw"), 100)
    params = with_shardings(decoder.abstract_params(), TRAINING.shardings(mesh, decoder.logical_axes()))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    role_shardings = update.role_shardings_of(params, optimizer, shardings, mesh, moments_on_host=moments_on_host)
    opt_state = with_shardings(jax.eval_shape(optimizer.init, params), role_shardings.opt_state)
    chunk_tokens = 1024 * batch_shards(mesh)
    forward = update.Forward(decoder, 1.0, jnp.bfloat16, "full", chunk_tokens, vocab_chunk=vocab_chunk)
    step = update.make_update(forward, ALGORITHMS["grpo"], GRPOOptions(), optimizer, 1.0, role_shardings, mesh)
    shape = packing.RowShape.of(row_tokens, row_tokens, batch_shards(mesh))
    return update_program(step, update.RoleState(params, opt_state), shape, micro_batches, mesh)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a compiled program.

    Attributes:
      kind: as HLO calls it; the start of an asynchronous one counts, its end does not.
      dtype: of its largest result.
      largest: entries of that.
    """

    kind: str
    dtype: str
    largest: int


def operations(text: str, kinds: Collection[str]) -> list[Operation]:
    """The operations of these kinds in optimised HLO, in its order, those inside fusions and loops once each."""
    found = []
    for results, kind in re.findall(r"= (.*?) ([a-z][a-z-]*?)(?:-start)?\(", text):
        if kind in kinds:
            sizes = [
                (math.prod(int(n) for n in dims.split(",") if n), dtype)
                for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", results)
            ]
            largest, dtype = max(sizes)
            found.append(Operation(kind, dtype, largest))
    return found


def measure(config: ModelConfig, vocab_chunk: int = 0) -> list[dict[str, Any]]:
    """Compiles every program for every mesh; a row of figures each. Training on one device fits with the optimizer's
    state in the host's memory only."""
    found = []
    training = functools.partial(training_program, vocab_chunk=vocab_chunk)
    on_host = functools.partial(training, moments_on_host=True)
    kinds = {"decode": decode_program, "training": training, "training, moments on the host": on_host}
    for kind, program_of in kinds.items():
        for name, sizes in MESHES.items():
            program = program_of(config, gpu_mesh(sizes))
            start = time.perf_counter()
            report = program.compile()
            found.append(
                {
                    "program": kind,
                    "H200s": name,
                    "argument_bytes": report.argument_bytes,
                    "temporary_bytes": report.temporary_bytes,
                    "host_bytes": report.host_argument_bytes,
                    "compile_s": time.perf_counter() - start,
                    "kernels": len(report.kernels),
                }
            )
            print(table_row(found[-1]), flush=True)
    return found


def table_row(figures: dict[str, Any]) -> str:
    """A line of the table in Markdown."""
    total = figures["argument_bytes"] + figures["temporary_bytes"]
    return (
        f"| {figures['program']} | {figures['H200s']} | {figures['argument_bytes'] / 1e9:.2f} | "
        f"{figures['temporary_bytes'] / 1e9:.2f} | {total / 1e9:.1f} | {figures['host_bytes'] / 1e9:.1f} | "
        f"{figures['kernels']} | "
        f"{figures['compile_s']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.bench.gpu_programs", description=__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_8B.num_layers)
    parser.add_argument("--vocab-chunk", type=int, default=0, help="training.logprob_vocab_chunk")
    parser.add_argument("--json", default="", help="write the figures here")
    arguments = parser.parse_args()
    if reason := gpu_compile.missing():
        raise SystemExit(reason)
    print(f"Llama-3.1-8B shape, {arguments.layers} layers, jax {jax.__version__}; GB per device\n")
    print("| program | H200s | arguments | temporaries | sum | host | kernels | compile s |")
    print("|---|---|---|---|---|---|---|---|")
    figures = measure(with_layers(arguments.layers), arguments.vocab_chunk)
    if arguments.json:
        about = {
            "layers": arguments.layers,
            "vocab_chunk": arguments.vocab_chunk,
            "jax": jax.__version__,
            "programs": figures,
        }
        pathlib.Path(arguments.json).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
