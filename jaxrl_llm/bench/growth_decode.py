"""Growth of generation: tokens per second against batch and context, and the cache against live tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.bench.growth import Model, Row, Size, repeat
from jaxrl_llm.config import MeshConfig, RolloutConfig
from jaxrl_llm.decoding.engine import Dispatch, Engine
from jaxrl_llm.decoding.pages import PageAllocator, pages_for
from jaxrl_llm.decoding.request import Request, SamplingParams, sample_seeds
from jaxrl_llm.decoding.sample import Sample
from jaxrl_llm.decoding.scheduler import Plan
from jaxrl_llm.sharding import GENERATION, make_mesh
from jaxrl_llm.types import Params


class WatchedEngine(Engine):
    """An engine that waits for prefill, and knows its seconds and those of the rest, decode with its host work.

    Attributes:
      watch: called with the samples of each decode dispatch when its tokens are there, before finished ones give their
        pages back.
    """

    prefill_s = 0.0
    allocators: list[PageAllocator]
    watch: Callable[[list[Sample]], None] | None = None

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.queue_while_waiting = False  # so that nothing is queued where it waits for prefill

    @property
    def decode_s(self) -> float:
        """Of the last call."""
        return self.stats.seconds - self.prefill_s

    def _take_allocators(self, gen_params: Params, reuse: bool) -> list[PageAllocator]:
        self.prefill_s = 0.0
        self.allocators = super()._take_allocators(gen_params, reuse)
        return self.allocators

    def _prefill(self, gen_params: Params, plan: Plan) -> None:
        start = time.perf_counter()
        super()._prefill(gen_params, plan)
        jax.block_until_ready(self._pools)
        self.prefill_s += time.perf_counter() - start

    def _receive(self, gen_params: Params, dispatch: Dispatch) -> list[Sample]:
        received = super()._receive(gen_params, dispatch)
        if self.watch is not None and received:
            self.watch(received)
        return received


def one_device() -> Mesh:
    return make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1), jax.devices()[:1])


def _weights(model: Model, mesh: Mesh) -> Params:
    shardings = GENERATION.shardings(mesh, model.decoder.generation_axes())
    return jax.jit(model.decoder.generation_params, out_shardings=shardings)(model.params)


def _request(model: Model, turn: int, row: int, prompt: int, new: int) -> Request:
    """A random prompt, another one each turn, so that nothing is found in the cache; answered at full length."""
    ids = np.random.default_rng([turn, row]).integers(1, model.decoder.config.vocab_size, prompt)
    sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True)
    return Request(ids.astype(np.int32), sampling, sample_seeds(0, turn, row, 1))


def against_batch(model: Model, size: Size) -> Iterator[Row]:
    """As many slots as sequences."""
    mesh = one_device()
    weights = _weights(model, mesh)
    for batch in size.batches:
        context = size.batch_prompt + size.batch_tokens
        engine = WatchedEngine(model.decoder, mesh, RolloutConfig(num_slots=batch), context=context)

        def serve(turn: int, engine: WatchedEngine = engine, batch: int = batch) -> float:
            new = size.batch_tokens if turn else 1  # turn 0 compiles
            engine.generate(weights, [_request(model, turn, row, size.batch_prompt, new) for row in range(batch)])
            return engine.decode_s

        serve(0)
        seconds, repeats = repeat(size, serve)
        tokens = batch * size.batch_tokens
        yield {
            "batch": batch,
            "tokens/s": tokens / seconds,
            "ms a step": 1e3 * seconds / size.batch_tokens,
            "repeats": repeats,
        }
        engine.release()


def against_context(model: Model, size: Size) -> Iterator[Row]:
    """One engine for all: a dispatch reads only as much of its page table as the longest sequence needs, in steps of
    twice the length."""
    mesh = one_device()
    weights = _weights(model, mesh)
    longest = max(size.contexts) + size.context_tokens
    engine = WatchedEngine(model.decoder, mesh, RolloutConfig(num_slots=size.context_batch), context=longest)
    for context in size.contexts:
        prefill: list[float] = []

        def serve(turn: int, context: int = context, prefill: list[float] = prefill) -> float:
            rows = range(size.context_batch)
            engine.generate(weights, [_request(model, turn, row, context, size.context_tokens) for row in rows])
            prefill.append(engine.prefill_s)
            return engine.decode_s

        serve(0)
        decode, repeats = repeat(size, serve)
        yield {
            "context": context,
            "prefill tokens/s": size.context_batch * (context - 1) / float(np.median(prefill[1:])),
            "decode tokens/s": size.context_batch * size.context_tokens / decode,
            "ms a decode step": 1e3 * decode / size.context_tokens,
            "repeats": repeats,
        }
    engine.release()


def cache_memory(model: Model, size: Size) -> Iterator[Row]:
    """Prompts and completions of ragged length; what the page allocators have given out at the time, beside what a
    cache of the longest length for every slot would take. Ten moments of the run, evenly spread, and the fullest."""
    slots, longest, count = size.load
    mesh = one_device()
    weights = _weights(model, mesh)
    # Short dispatches: pages for their tokens are given out before, and those of one more where it is queued ahead.
    rollout = RolloutConfig(num_slots=slots, tokens_per_dispatch=min(16, longest // 16))
    engine = WatchedEngine(model.decoder, mesh, rollout, context=longest)
    moments: list[dict[str, int]] = []

    def watch(samples: list[Sample]) -> None:
        moments.append(
            {
                "running": len(samples),
                "live tokens": sum(sample.position for sample in samples),
                "pages in use": sum(one.num_pages - one.num_free for one in engine.allocators),
            }
        )

    engine.watch = watch
    random = np.random.default_rng(1)
    lengths = random.integers(longest // 16, longest // 2, (count, 2))
    engine.generate(weights, [_request(model, 1, row, *pair) for row, pair in enumerate(lengths.tolist())])
    pools: list[Any] = jax.tree.leaves(engine._pools)
    page_bytes = sum(pool.nbytes for pool in pools) / (engine.num_pages * engine.num_replicas)
    whole = slots * pages_for(longest, rollout.page_size) * page_bytes
    chosen = {int(index) for index in np.linspace(0, len(moments) - 1, min(10, len(moments)))}
    chosen.add(max(range(len(moments)), key=lambda index: moments[index]["pages in use"]))
    for index in sorted(chosen):
        moment = moments[index]
        used = moment["pages in use"] * page_bytes
        yield {
            "dispatch": index + 1,
            **moment,
            "MiB": used / 2**20,
            "MiB at full length": whole / 2**20,
            "of that": used / whole,
        }
    engine.release()
