"""The decoder of rollouts: requests in, completions out, by continuous batching over a paged KV cache.

Each replica (an index of the mesh's data, pipeline and fsdp axes) has its own slots and its own pool of pages.
The programs run under ``jax.shard_map`` over those axes, so page ids are local to a replica and no collective
touches the cache; the tensor axis is left to XLA. One round of the loop in :meth:`Engine.generate`:
schedule -> prefill -> copy pages -> decode -> receive, with one transfer to the device per program and one back.
A round is queued before the tokens of the last one are read (`Scheduler.plan_ahead` says where it can be): its samples
start where that one ends, which the device knows, and it is read while the next one runs.

Prefill caches all but the last token of a prompt; that one is the first input of decode, so every sampled token
comes from the same program and prefill makes no logits.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxrl_kernels.device import target_device
from jaxrl_kernels.paged_attention.api import choose_for
from jaxrl_llm import processes, turns
from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.decoding import buckets, rows
from jaxrl_llm.decoding.cache import GATHERED
from jaxrl_llm.decoding.host_clock import HostClock
from jaxrl_llm.decoding.intake import Intake
from jaxrl_llm.decoding.pages import PageAllocator, pages_for
from jaxrl_llm.decoding.programs import Programs
from jaxrl_llm.decoding.request import Request
from jaxrl_llm.decoding.sample import Sample
from jaxrl_llm.decoding.scheduler import Plan, Prefill, Scheduler
from jaxrl_llm.decoding.stopping import TextStream
from jaxrl_llm.errors import RunStopped, UserError
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import REPLICA_AXES, replica_count
from jaxrl_llm.types import Completion, Params

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called after every dispatch with the number of finished samples and of all."""


OnText = Callable[[int, int, str], None]
"""Called with the index of a request, that of its sample, and the text that the sample's response has gained."""


@dataclasses.dataclass
class EngineStats:
    """Counts of one :meth:`Engine.generate` call.

    Attributes:
      tokens: tokens in the completions. ``prefill_tokens`` were computed without being sampled.
      dispatches: decode programs run; ``decode_steps`` are the steps of their loops.
      found_tokens: of the prompts, were cached already, by another prompt or an earlier call with the same weights.
      preemptions: samples that lost their pages and were computed again.
      compiles: programs met for the first time; 0 after :meth:`Engine.warmup`.
      host_s: of ``seconds``, those in which the host worked and nothing was running on the device.
      row_steps: of decode programs, rows times steps; in ``made_tokens`` of them a row made a token, in the others it
        had ended or was never taken.
      decode_s: of the dispatches that no prefill or copy came before, in which ``decode_tokens`` were made.
    """

    tokens: int = 0
    seconds: float = 0.0
    prefill_tokens: int = 0
    found_tokens: int = 0
    dispatches: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    compiles: int = 0
    host_s: float = 0.0
    row_steps: int = 0
    made_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0

    @property
    def host_fraction(self) -> float:
        """Of the time, the device's in which it waited for the host."""
        return self.host_s / max(self.seconds, 1e-9)

    @property
    def wasted_fraction(self) -> float:
        """Of the rows of all decode steps, those that made no token."""
        return 1 - self.made_tokens / max(self.row_steps, 1)

    @property
    def decode_tokens_per_s(self) -> float:
        """Of decode alone; 0 where every dispatch came behind a prefill."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A decode dispatch that was queued: its samples by replica, each in its row, and what it will return.

    Attributes:
      queued_s: when, by `time.perf_counter`.
      alone: whether it was queued behind nothing but another decode.
    """

    running: list[list[Sample | None]]
    num_rows: int
    output: jax.Array
    queued_s: float
    alone: bool = True


@dataclasses.dataclass(frozen=True)
class Kept:
    """Dense copies of the running samples' pages (``attention`` ``gathered``): whose is in which row, by replica."""

    running: list[list[Sample | None]]
    num_rows: int
    num_columns: int
    arrays: list[Any]

    def rows_for(
        self, running: list[list[Sample]], num_rows: int, num_columns: int
    ) -> list[list[Sample | None]] | None:
        """The samples in the rows of their copies, None in those of the others; None if one has no copy of that
        size."""
        if (num_rows, num_columns) != (self.num_rows, self.num_columns):
            return None
        if any(set(samples) - set(here) for samples, here in zip(running, self.running, strict=True)):
            return None
        return [
            [sample if sample in samples else None for sample in here]
            for samples, here in zip(map(set, running), self.running, strict=True)
        ]


class Engine:
    """Generates completions with one decoder on one mesh.

    Parameters are given to each call, in the generation arrangement and layout (``Decoder.generation_params``,
    ``sharding.GENERATION``; in another layout on the same mesh, each dispatch gathers them first). The pool's memory
    stays until :meth:`release`; what it caches is found by a later call only where that asks for it (``reuse``) and has
    the very same arrays, so new weights never meet old keys.

    Attributes:
      attention: how decode reads the cache, ``rollout.attention`` with ``auto`` decided.
      queue_while_waiting: whether a dispatch is queued before the last one is read also while samples wait for a slot
        (`Scheduler.plan_ahead`): everywhere but on CPUs. There the host takes 0.3 % of the time (SmolLM2), and slots
        that are filled late cost 1 to 18 % more steps where ids or strings end samples.

    Args:
      tokenizer: a Hugging Face tokenizer. Without one, completions have no text, stop strings are refused and
        every id of the vocabulary can be sampled.
      context: most tokens of prompt and response together; None is the model's. A smaller one saves pages and
        programs to compile.
      fit_pages: where ``rollout.num_pages`` is 0, have as many pages as the memory holds that is free when pools are
        first made, at most enough of all slots.
      dtype: of the parameters that `generate` will be given; what ``attention='auto'`` stands for depends on it.

    Raises:
      UserError: options that don't fit the model or the mesh.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        rollout: RolloutConfig,
        tokenizer: Any = None,
        *,
        context: int | None = None,
        dtype: Any = jnp.float32,
        fit_pages: bool = False,
    ):
        self.decoder = decoder
        self.mesh = mesh
        self.rollout = rollout
        self.intake = Intake(decoder.config, tokenizer, context)
        self.context = self.intake.context
        self.attention = _attention_of(rollout, mesh, decoder, dtype)
        self.queue_while_waiting = mesh.devices.flat[0].platform != "cpu"
        self.stats = EngineStats()
        self._clock = HostClock(self._idle)  # of the call that runs
        self._received_s = 0.0  # when the last dispatch was, by `time.perf_counter`
        self.num_replicas = replica_count(mesh)
        self.num_pages = _checked_num_pages(rollout, self.context)
        _check_tensor_axis(decoder, mesh)
        self._fit_pages = fit_pages and rollout.num_pages == 0
        self._buckets = buckets.Buckets.of(rollout, self.context, fine=self.attention == GATHERED)
        self._seen: set[tuple[Any, ...]] = set()
        self._pools: list[Any] | None = None
        self._kept: Kept | None = None
        self._progress: jax.Array | None = None  # where the rows of the last decode dispatch ended
        self._allocators: list[PageAllocator] | None = None
        self._weights: list[weakref.ref[jax.Array]] = []
        self._build(
            Programs(
                decoder,
                num_tokens=self.intake.num_tokens,
                tokens_per_dispatch=min(rollout.tokens_per_dispatch, self.context),  # no sequence has more
                attention=self.attention,
                replica_axes=tuple(axis for axis in REPLICA_AXES if mesh.shape[axis] > 1),
            )
        )

    def _build(self, programs: Programs) -> None:
        """The jitted programs over all replicas, and the shardings of their inputs and outputs."""
        replicas = PartitionSpec(REPLICA_AXES)
        # Manual over the replicas; `tensor` too where it has one index, as XLA then partitions nothing.
        manual = set(self.mesh.axis_names) if self.mesh.shape["tensor"] == 1 else set(REPLICA_AXES)
        self._rows_sharding = NamedSharding(self.mesh, replicas)
        self._pool_sharding = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXES, None, "tensor"))
        pools = [(self._pool_sharding, self._pool_sharding)] * self.decoder.config.num_layers
        dense = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXES, "tensor"))
        kept = [(dense, dense)] * self.decoder.config.num_layers if self.attention == GATHERED else []
        whole = NamedSharding(self.mesh, PartitionSpec())

        def over_replicas(function, in_specs, out_specs):
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=manual,
                check_vma=False,
            )

        one, each = PartitionSpec(), replicas
        self._decode_program = jax.jit(
            over_replicas(programs.decode, (one, each, each, each, each), (each, each, each, each)),
            donate_argnums=(1, 2),
            # tokens go to every process: all schedule alike
            out_shardings=(pools, kept, whole, self._rows_sharding),
        )
        self._gather_program = jax.jit(over_replicas(programs.gather, (each, each, each), each), out_shardings=kept)
        self._prefill_program, self._prefill_on_context_program = (
            jax.jit(over_replicas(programs.prefill, specs, each), donate_argnums=1, out_shardings=pools)
            for specs in ((one, each, each), (one, each, each, each))
        )
        self._copy_program = jax.jit(
            over_replicas(programs.copy_pages, (each, each), each), donate_argnums=0, out_shardings=pools
        )
        self._pool_program = jax.jit(self._zero_pools, static_argnums=0, out_shardings=pools)

    # -- The life of the cache -----------------------------------------------------------------------------

    def _zero_pools(self, dtype):
        config = self.decoder.config
        pages = self.num_replicas * self.num_pages
        shape = (pages, self.rollout.page_size, config.num_kv_heads, config.head_size)
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]

    def _ensure_pools(self, gen_params: Params) -> None:
        dtype = gen_params["embed"]["weight"].dtype
        if self._pools is not None:
            first = self._pools[0][0]
            # An interrupted call may have given its pools to a program that never returned.
            if first.is_deleted() or first.dtype != dtype:
                self._pools = None
        if self._pools is None:
            if self._fit_pages:  # once: other pools would need other programs
                self.num_pages, self._fit_pages = self._pages_that_fit(dtype), False
            self._check_memory(dtype)
            self._pools = self._pool_program(dtype)
            self._progress = self._put(
                np.zeros((self.num_replicas * self.rollout.num_slots, rows.PROGRESS_WIDTH), np.int32)
            )
            self._allocators = None

    def _take_allocators(self, gen_params: Params, reuse: bool) -> list[PageAllocator]:
        """The page allocators, for one call: one that is interrupted doesn't give them back, and the next begins anew.
        Without ``reuse`` they have forgotten what they cached, and in any case what other weights cached."""
        allocators, self._allocators = self._allocators, None
        leaves = jax.tree.leaves(gen_params)
        same = len(leaves) == len(self._weights) and all(
            known() is leaf for known, leaf in zip(self._weights, leaves, strict=True)
        )
        self._weights = [weakref.ref(leaf) for leaf in leaves]
        if allocators is None:
            return [PageAllocator(self.num_pages) for _ in range(self.num_replicas)]
        if not (same and reuse):
            for allocator in allocators:
                allocator.forget()
        return allocators

    def _check_memory(self, dtype: Any) -> None:
        """Refuses pools larger than a device: XLA's error names no option, and on a CPU the process is just killed."""
        rollout = self.rollout
        needed = self.num_pages * self._page_bytes(dtype)
        available = memory_bytes(self.mesh.local_devices[0])
        if needed > available:
            raise UserError(
                f"The key/value cache needs {needed / 2**30:.3g} GiB on each device, which has "
                f"{available / 2**30:.3g}: {self.num_pages} pages of rollout.page_size = {rollout.page_size} tokens "
                f"(rollout.num_pages = {rollout.num_pages}; 0 is enough for rollout.num_slots = {rollout.num_slots} "
                f"sequences of {self.context} tokens). Lower rollout.num_slots or rollout.num_pages, or the page size: "
                "a page holds tokens of one sequence."
            )

    def _page_bytes(self, dtype: Any) -> int:
        """Of one page on each device of a replica."""
        config = self.decoder.config
        heads = config.num_kv_heads // self.mesh.shape["tensor"]
        return 2 * config.num_layers * self.rollout.page_size * heads * config.head_size * jnp.dtype(dtype).itemsize

    def _pages_that_fit(self, dtype: Any) -> int:
        """The same number on all processes: the fullest device decides, and a tenth is left to the programs."""
        free = min(free_bytes(device) for device in self.mesh.local_devices)
        pages = min(self.num_pages, int(0.9 * free) // self._page_bytes(dtype))
        pages = min(processes.exchange(lambda: pages))
        least = pages_for(self.context, self.rollout.page_size) + 1
        if pages < least:
            raise UserError(
                f"hybrid_engine.kv_cache_policy = 'dynamic': {free / 2**30:.3g} GiB are free on a device, which hold "
                f"{pages} pages of rollout.page_size = {self.rollout.page_size} tokens; one sequence of {self.context} "
                f"tokens and a page to copy into need {least}. Shorten sequences, raise rollout.tensor, or offload."
            )
        logger.info("key/value cache: %d pages on each replica, of %d for all slots", pages, self.num_pages)
        return pages

    def release(self) -> None:
        """Frees the KV pools; the next call allocates them again."""
        for pool in jax.tree.leaves(self._pools):
            if not pool.is_deleted():
                pool.delete()
        self._pools = self._allocators = self._kept = None

    close = release

    # -- Generation ----------------------------------------------------------------------------------------

    def generate(
        self,
        gen_params: Params,
        requests: Sequence[Request],
        *,
        reuse: bool = False,
        progress: Progress | None = None,
        on_text: OnText | None = None,
    ) -> list[list[Completion]]:
        """Completions by request and sample, in the order asked for.

        Args:
          gen_params: the weights of this call, in the generation arrangement and layout.
          reuse: whether prompts that go on where sequences of earlier calls with the same weights were (the next turn
            of a conversation) find those in the cache. Log-probabilities then round as in the earlier calls; without,
            a call's bits do not depend on those before it.
          on_text: is told of every sample's text after each dispatch.

        Raises:
          UserError: a request that can't be served; raised before anything runs.
          RunStopped: the model gave a log-probability that is not a number.
        """
        start = time.perf_counter()
        self._clock = HostClock(self._idle)
        self._kept = None
        samples = [self.intake.samples(index, request) for index, request in enumerate(requests)]
        self._ensure_pools(gen_params)
        allocators = self._take_allocators(gen_params, reuse)
        scheduler = Scheduler(
            allocators,
            num_slots=self.rollout.num_slots,
            page_size=self.rollout.page_size,
            tokens_per_dispatch=min(self.rollout.tokens_per_dispatch, self.context),
            prefill_tokens=self.rollout.prefill_tokens,
            queue_while_waiting=self.queue_while_waiting,
        )
        for group in samples:
            if group:
                scheduler.add(group)
        stats = self.stats = EngineStats()
        total = scheduler.num_unfinished
        streams = {sample: self.intake.stream(sample) for group in samples for sample in group} if on_text else {}
        ahead: Dispatch | None = None
        while scheduler.num_unfinished:
            dispatch = ahead or self._round(gen_params, scheduler.schedule())
            following = scheduler.plan_ahead()
            ahead = None if following is None else self._round(gen_params, following, dispatch)
            received = self._receive(gen_params, dispatch)
            if on_text is not None:
                for sample in received:
                    self._show(sample, streams[sample], on_text)
            for replica in range(self.num_replicas):
                for sample in scheduler.finish(replica):
                    sample.finished_s = time.perf_counter()
                    stats.tokens += len(sample.tokens)
            if progress is not None:
                progress(total - scheduler.num_unfinished, total)
        if ahead is not None:  # of samples that have all ended: no token counts, but its time does
            self._receive(gen_params, ahead)
        completions = [[self.intake.completion(sample) for sample in group] for group in samples]
        self._allocators, self._kept = allocators, None
        stats.host_s = self._clock.stop()
        stats.preemptions = scheduler.num_preemptions
        stats.found_tokens = scheduler.num_found_tokens
        stats.seconds = time.perf_counter() - start
        return completions

    def _round(self, gen_params: Params, plan: Plan, before: Dispatch | None = None) -> Dispatch:
        for sample in itertools.chain(*plan.running):
            sample.started_s = time.perf_counter() if sample.started_s < 0 else sample.started_s
        self._prefill(gen_params, plan)
        self._copy_pages(plan)
        alone = not any(plan.prefills) and not any(plan.copies)
        return dataclasses.replace(self._decode(gen_params, plan.running, before), alone=alone)

    def _show(self, sample: Sample, stream: TextStream, on_text: OnText) -> None:
        done = sample.finish_reason
        new = stream.rest(self.intake.completion(sample).text) if done else stream.news(sample.tokens)
        if new:
            on_text(sample.request, sample.index, new)

    def _prefill(self, gen_params: Params, plan: Plan) -> None:
        capacity, page_size = self._buckets.prefill_tokens[-1], self.rollout.page_size
        bins = [rows.bins_of(pieces, capacity, self._buckets.context_pages, page_size) for pieces in plan.prefills]
        for turn in range(max(len(of_replica) for of_replica in bins)):
            pieces = [of_replica[turn] if turn < len(of_replica) else [] for of_replica in bins]
            counts = [sum(len(piece.tokens) for piece in row) for row in pieces]
            self.stats.prefill_tokens += sum(counts)
            on_context = any(piece.start for row in pieces for piece in row)
            self._run_prefill(gen_params, pieces, self._buckets.prefill(max(counts)), on_context)

    def _run_prefill(
        self, gen_params: Params, pieces: Sequence[Sequence[Prefill]], num_tokens: int, on_context: bool
    ) -> None:
        self._met("prefill", num_tokens, on_context)
        page_size = self.rollout.page_size
        packed = self._put(np.stack([rows.pack_prefill(row, num_tokens, page_size, self.num_pages) for row in pieces]))
        if not on_context:
            with self._clock.queueing():
                self._pools = self._prefill_program(gen_params, self._pools, packed)
            return
        context = np.stack([rows.pack_context(row, self._buckets.context_pages, page_size) for row in pieces])
        with self._clock.queueing():
            self._pools = self._prefill_on_context_program(gen_params, self._pools, packed, self._put(context))

    def _copy_pages(self, plan: Plan) -> None:
        if any(plan.copies):
            self._run_copy(plan.copies)

    def _run_copy(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._met("copy")
        pairs = np.zeros((self.num_replicas, self.rollout.num_slots, 2), np.int32)  # a slot starts once a round
        pairs[:, :, 1] = self.num_pages + np.arange(self.rollout.num_slots)[None, :]  # dropped
        for replica, of_replica in enumerate(copies):
            pairs[replica, : len(of_replica)] = np.asarray(of_replica, np.int32).reshape(-1, 2)
        with self._clock.queueing():
            self._pools = self._copy_program(self._pools, self._put(pairs))

    def _decode(self, gen_params: Params, running: list[list[Sample]], before: Dispatch | None = None) -> Dispatch:
        """Queues a decode dispatch. ``before``: the last one, where it was not read yet (see `rows.pack_decode`)."""
        num_rows = self._buckets.decode_rows(max(len(samples) for samples in running))
        most_pages = max(len(sample.pages) for samples in running for sample in samples)
        num_columns = self._buckets.table_columns(most_pages)
        return self._run_decode(gen_params, running, num_rows, num_columns, before)

    def _receive(self, gen_params: Params, dispatch: Dispatch) -> list[Sample]:
        """Waits for a dispatch; its samples take their tokens and are returned. One that the dispatch before has ended
        takes nothing: where a stop string did, which the device doesn't know, it has made more."""
        with turns.waiting(), self._clock.waiting():  # a wait for a turn counts as the host's
            output = np.asarray(dispatch.output)
        steps, count, tokens, logprobs = rows.unpack_tokens(output)
        stats, made_in_all, now = self.stats, int(count.sum()), time.perf_counter()
        stats.dispatches += 1
        stats.decode_steps += steps
        stats.row_steps += steps * len(count)
        stats.made_tokens += made_in_all
        if dispatch.alone:
            stats.decode_s += now - max(dispatch.queued_s, self._received_s)
            stats.decode_tokens += made_in_all
        self._received_s = now
        received = []
        for replica, samples in enumerate(dispatch.running):
            for row, sample in enumerate(samples, start=replica * dispatch.num_rows):
                if sample is None or sample.finish_reason:
                    continue
                made = count[row]
                if not made:
                    raise RuntimeError("a sample got no token: the scheduler and the device program disagree")
                if not np.isfinite(logprobs[row, :made]).all():
                    dtype = gen_params["embed"]["weight"].dtype
                    raise RunStopped(
                        f"Generation, request {sample.request}, sample {sample.index}: the model gave a log-probability"
                        " that is not a finite number. Its weights have probably diverged: look at the learning rate "
                        f"and the gradient norm of the last update, and at the dtype of compute ({dtype}); then "
                        "resume from an earlier checkpoint."
                    )
                sample.receive(tokens[row, :made].tolist(), logprobs[row, :made].tolist())
                received.append(sample)
        return received

    def _run_decode(
        self,
        gen_params: Params,
        running: list[list[Sample]],
        num_rows: int,
        num_columns: int,
        before: Dispatch | None = None,
    ) -> Dispatch:
        self._met("decode", num_rows, num_columns)
        placed = None if self._kept is None else self._kept.rows_for(running, num_rows, num_columns)
        in_rows: list[list[Sample | None]] = [list(samples) for samples in running] if placed is None else placed
        sources = [None] * self.num_replicas if before is None else before.running
        packed = self._put(
            np.concatenate(
                [
                    rows.pack_decode(samples, num_rows, num_columns, source)
                    for samples, source in zip(in_rows, sources, strict=True)
                ]
            )
        )
        arrays = [] if placed is None or self._kept is None else self._kept.arrays
        queued_s = time.perf_counter()
        with self._clock.queueing():
            if self.attention == GATHERED and placed is None:
                self._kept = None  # its memory is free before the new copies are made
                arrays = self._gather_program(self._pools, packed, self._progress)
            self._pools, arrays, output, self._progress = self._decode_program(
                gen_params, self._pools, arrays, packed, self._progress
            )
        if self.attention == GATHERED:
            self._kept = Kept(in_rows, num_rows, num_columns, arrays)
        return Dispatch(in_rows, num_rows, output, queued_s)

    def _idle(self) -> bool:
        """Whether all programs have ended: each returns the pools, which the next one takes."""
        return self._pools is None or all(array.is_ready() for array in self._pools[0])

    def _put(self, array: np.ndarray) -> jax.Array:
        """To the devices, first dimension over replicas. Every process holds the same array and gives its part."""
        return jax.make_array_from_callback(array.shape, self._rows_sharding, lambda index: array[index])

    def _met(self, *program: Any) -> None:
        if program not in self._seen:
            self._seen.add(program)
            self.stats.compiles += 1

    # -- Compilation ---------------------------------------------------------------------------------------

    def warmup(self, gen_params: Params) -> int:
        """Compiles every program that any request can need, by running each on no samples; returns how many."""
        self.stats = EngineStats()
        self._ensure_pools(gen_params)
        nobody: list[list[Any]] = [[] for _ in range(self.num_replicas)]
        for num_tokens in self._buckets.prefill_tokens:
            for on_context in (False, True):
                self._run_prefill(gen_params, nobody, num_tokens, on_context)
        self._run_copy(nobody)
        for num_rows in self._buckets.rows:
            for num_columns in self._buckets.columns:
                self._run_decode(gen_params, nobody, num_rows, num_columns)
        self._kept = None
        logger.info("generation: %d programs compiled, all that any request can need", self.stats.compiles)
        return self.stats.compiles

    def decode_text(self, gen_params: Params) -> str | None:
        """The largest decode program as compiled, for a look at its copies and collectives."""
        self._ensure_pools(gen_params)
        num_rows, num_columns = self._buckets.rows[-1], self._buckets.columns[-1]
        packed = self._put(np.zeros((self.num_replicas * num_rows, rows.decode_width(num_columns)), np.int32))
        gathered = self.attention == GATHERED
        kept = self._gather_program(self._pools, packed, self._progress) if gathered else []
        return self._decode_program.lower(gen_params, self._pools, kept, packed, self._progress).compile().as_text()


def _attention_of(rollout: RolloutConfig, mesh: Mesh, decoder: Decoder, dtype: Any) -> str:
    """The choice of ``rollout.attention`` on this mesh; ``auto`` gathers pages once a dispatch on CPUs."""
    if rollout.attention != "auto":
        return rollout.attention
    with use_abstract_mesh(mesh.abstract_mesh):  # its devices may be others than this process's default
        device = target_device()
    if device.platform == "cpu":
        logger.info("Attention of decode: gathered (cpu: pages are gathered once a dispatch)")
        return GATHERED
    choice = choose_for(device, dtype, decoder.config.head_size, rollout.page_size)
    logger.info("Attention of decode: %s (%s)", choice.name, choice.reason)
    return choice.name


def memory_bytes(device: Any) -> int:
    """What the device has in all; for a simulated one, its share of the machine's memory."""
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def free_bytes(device: Any) -> int:
    """What of `memory_bytes` no array takes; where the device doesn't count, by the arrays that are alive."""
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics["bytes_in_use"]
    shards = (shard for array in jax.live_arrays() if not array.is_deleted() for shard in array.addressable_shards)
    return memory_bytes(device) - sum(shard.data.nbytes for shard in shards if shard.device == device)


def _checked_num_pages(rollout: RolloutConfig, context: int) -> int:
    """Pages per replica. By default every slot can reach full length, and one more prompt can be kept beside."""
    longest = pages_for(context, rollout.page_size)
    if rollout.num_pages == 0:
        return (rollout.num_slots + 1) * longest
    if rollout.num_pages < longest + 1:
        raise UserError(
            f"rollout.num_pages is {rollout.num_pages}, but one sequence of {context} tokens needs {longest} pages of "
            f"{rollout.page_size} tokens and one to copy. Use at least {longest + 1}, or 0 for enough of all slots."
        )
    return rollout.num_pages


def _check_tensor_axis(decoder: Decoder, mesh: Mesh) -> None:
    tensor = mesh.shape["tensor"]
    if decoder.config.num_kv_heads % tensor:
        raise UserError(
            f"Tensor groups of generation have {tensor} devices (rollout.tensor, or mesh.tensor where that is 0). That "
            f"does not divide the model's {decoder.config.num_kv_heads} key/value heads, over which the cache is "
            "split. Use a divisor of that number."
        )
