"""Tokens per second of the decoder on fixed traffic, and of vLLM on the same; and what the decoder counted."""

from __future__ import annotations

import statistics
import time

from jaxrl_llm.bench import peers
from jaxrl_llm.bench.traffic import CONTEXT, NUM_SLOTS, TRAFFIC

COUNTED = {
    "decode alone, tokens/s": "decode_tokens_per_s",
    "rows of decode steps that made no token": "wasted_fraction",
    "host fraction": "host_fraction",
}
"""What is told of the engine's own figures, `EngineStats`, by the name of its figure."""


def measure(model: str, repeats: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """By name of the traffic, medians after one turn that compiles: seconds, prefill included, and the figures of
    `COUNTED`."""
    import jax
    import numpy as np

    from jaxrl_llm.config import MeshConfig, RolloutConfig
    from jaxrl_llm.decoding.engine import Engine
    from jaxrl_llm.decoding.request import Request, SamplingParams, sample_seeds
    from jaxrl_llm.models.loading import load_model
    from jaxrl_llm.sharding import GENERATION, make_mesh

    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1), jax.devices()[:1])
    decoder, params = load_model(model)
    arrange = jax.jit(decoder.generation_params, out_shardings=GENERATION.shardings(mesh, decoder.generation_axes()))
    weights = arrange(params)
    del params
    engine = Engine(decoder, mesh, RolloutConfig(num_slots=NUM_SLOTS), context=CONTEXT)

    def serve(traffic, turn: int) -> dict[str, float]:
        requests = [
            Request(
                np.asarray(ids, np.int32),
                SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True),
                sample_seeds(0, turn, row, traffic.samples),
            )
            for row, (ids, count) in enumerate(zip(traffic.prompts(turn), traffic.lengths, strict=True))
        ]
        start = time.perf_counter()
        engine.generate(weights, requests)
        seconds = time.perf_counter() - start
        assert engine.stats.tokens == traffic.tokens, (engine.stats.tokens, traffic.tokens)
        return {"seconds": seconds, **{name: getattr(engine.stats, field) for name, field in COUNTED.items()}}

    seconds, counted = {}, {}
    for traffic in TRAFFIC:
        serve(traffic, 0)
        turns = [serve(traffic, turn) for turn in range(1, repeats + 1)]
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        seconds[traffic.name], counted[traffic.name] = medians.pop("seconds"), medians
    return seconds, counted


def measure_vllm(python: str, model: str, repeats: int) -> dict[str, float]:
    """The same by vLLM in another environment, as it comes."""
    return peers.run(python, "vllm_generate.py", model, {"repeats": repeats}, allocator=False)


def figures(seconds: dict[str, float]) -> dict[str, float]:
    """Tokens per second by name."""
    return {f"{traffic.name}: tokens/s": traffic.tokens / seconds[traffic.name] for traffic in TRAFFIC}
