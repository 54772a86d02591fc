"""Generation and a GRPO step of a random model: what a device does with the whole of it.

The model's part of ``python -m jaxrl_kernels.bench --check``. Needs no files, no tokenizer and no reward: the tokens of
a random model stand for those of a real one, as far as time goes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.grpo import GRPOOptions
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.config import HybridEngineConfig, MeshConfig, OptimizerConfig, RolloutConfig
from jaxrl_llm.decoding.engine import Engine
from jaxrl_llm.decoding.request import Request, SamplingParams, sample_seeds
from jaxrl_llm.hybrid_engine import HybridEngine
from jaxrl_llm.models.config import ModelConfig, RopeConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.sharding import TRAINING, batch_shards, make_mesh
from jaxrl_llm.types import Completion, Params


@dataclasses.dataclass(frozen=True)
class Work:
    """A model and what it has to do.

    Attributes:
      batches: sequences generated at once, each measured for itself.
      prompts, samples: of the GRPO step.
    """

    model: ModelConfig
    dtype: str
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    prompts: int
    samples: int
    row_tokens: int


def _model(vocabulary: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int, head_size: int):
    return ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        max_position=32768,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        windows=(None,) * layers,
        tie_embeddings=True,
        qkv_bias=True,
        eos_token_ids=(0,),
    )


WORK = {
    # The shape of Qwen2.5-1.5B.
    "full": Work(_model(151936, 1536, 8960, 28, 12, 2, 128), "bfloat16", (1, 64, 256), 128, 128, 8, 8, 2048),
    "small": Work(_model(4096, 128, 384, 4, 4, 2, 32), "float32", (1, 16), 32, 32, 2, 4, 256),
    "tiny": Work(_model(64, 16, 32, 1, 2, 1, 8), "float32", (2,), 4, 4, 2, 2, 24),
}
"""By the names of the benchmark's sizes."""


def measure(size_name: str) -> Iterator[tuple[str, float]]:
    """Figures by name, one after the other, so that a time limit loses only the rest. All on one device; the second of
    two runs is measured, the first compiles."""
    work = WORK[size_name]
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1), jax.devices()[:1])
    decoder = Decoder(work.model)
    params = jax.jit(decoder.init, out_shardings=TRAINING.shardings(mesh, decoder.logical_axes()))(jax.random.key(0))
    yield "model parameters", float(sum(leaf.size for leaf in jax.tree.leaves(params)))
    hybrid = HybridEngine(decoder, mesh, HybridEngineConfig(), work.dtype)
    generation_params = hybrid.to_generation(params)
    # One engine for all, so that they share its compiled programs.
    engine = Engine(
        decoder,
        mesh,
        RolloutConfig(num_slots=max(*work.batches, work.prompts * work.samples)),
        context=work.prompt_tokens + work.new_tokens,
        dtype=jnp.dtype(work.dtype),
    )
    for batch in work.batches:
        for turn in range(2):
            engine.generate(generation_params, requests(work, batch, 1, turn))
        yield f"generation at batch {batch}, tokens/s", engine.stats.tokens / engine.stats.seconds
    del generation_params
    yield from _grpo_step(work, decoder, mesh, hybrid, engine, params)
    engine.release()


def requests(work: Work, prompts: int, samples: int, turn: int) -> list[Request]:
    """Random prompts, other ones each turn, answered at full length."""
    random = np.random.default_rng(turn)
    sampling = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True)
    return [
        Request(
            random.integers(1, work.model.vocab_size, work.prompt_tokens).astype(np.int32),
            sampling,
            sample_seeds(0, turn, prompt, samples),
        )
        for prompt in range(prompts)
    ]


def _grpo_step(
    work: Work, decoder: Decoder, mesh: Mesh, hybrid: HybridEngine, engine: Engine, params: Params
) -> Iterator[tuple[str, float]]:
    """Layout change, generation of every group, one AdamW update; the reward is a random number."""
    optimizer = make_optimizer(OptimizerConfig(), 100)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    role, role_shardings = update.init_role(params, optimizer, shardings, mesh)
    del params
    forward = update.Forward(decoder, 1.0, jnp.dtype(work.dtype), "full", 1024)
    options = GRPOOptions()
    step = update.make_update(forward, ALGORITHMS["grpo"], options, optimizer, 1.0, role_shardings, mesh)
    shape = packing.RowShape.of(work.row_tokens, work.row_tokens, batch_shards(mesh))
    seconds: dict[str, float] = {}
    for turn in range(2):
        start = time.perf_counter()
        asked = requests(work, work.prompts, work.samples, turn)
        completions = engine.generate(hybrid.to_generation(role.params), asked)
        generated = time.perf_counter()
        batch, _ = packing.pack(
            sequences_of(asked, completions),
            shape,
            aggregation=options.loss_aggregation,
            max_response_tokens=work.new_tokens,
            max_micro_batches=packing.micro_batches_for(
                work.prompts * work.samples, work.prompt_tokens + work.new_tokens, shape
            ),
        )
        role, metrics = step(
            role,
            update.put_rows(batch, mesh),
            jnp.int32(batch.num_micro_batches),
            jnp.float32(batch.denominator),
            old_is_actor=True,
        )
        metrics = {name: float(value) for name, value in metrics.items()}
        end = time.perf_counter()
        seconds = {"step": end - start, "generation": generated - start, "update": end - generated}
    name = f"GRPO, {work.prompts} prompts x {work.samples}, {work.prompt_tokens} + {work.new_tokens} tokens"
    yield f"{name}: step, s", seconds["step"]
    yield "  of it generation with its layout, s", seconds["generation"]
    yield "  of it the update, s", seconds["update"]
    yield "  largest log-prob difference, decoder against trainer", metrics["rollout/logprob_diff_max"]


def sequences_of(asked: list[Request], completions: list[list[Completion]]) -> Sequences:
    """The training sequences of every group, with random advantages."""
    random = np.random.default_rng(0)
    made = Sequences([], [], np.repeat(np.arange(len(asked), dtype=np.int32), [len(group) for group in completions]))
    made.advantages, made.sampler_logprobs = [], []
    for request, group in zip(asked, completions, strict=True):
        count = len(request.prompt_ids)
        for completion in group:
            mask = np.arange(count + len(completion.token_ids)) >= count
            made.tokens.append(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int32))
            made.loss_mask.append(mask)
            made.advantages.append(np.where(mask, random.normal(), 0).astype(np.float32))
            made.sampler_logprobs.append(np.concatenate([np.zeros(count, np.float32), completion.logprobs]))
    return made
