"""Growth of a GRPO update with the size of a group, with and without `training.share_prompts`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import packing, update
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.algorithms.grpo import GRPOOptions
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.bench.growth import Model, Row, Size, repeat
from jaxrl_llm.bench.growth_decode import one_device
from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.optimizer import make_optimizer
from jaxrl_llm.sharding import TRAINING


def against_group_size(model: Model, size: Size) -> Iterator[Row]:
    """One AdamW update on one group. Rows are exactly full, so that no time goes into padding; the program of a row
    length is compiled before it is measured."""
    mesh = one_device()
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6), 10_000)
    shardings = TRAINING.shardings(mesh, model.decoder.logical_axes())
    own = jax.tree.map(jnp.copy, jax.device_put(model.params, shardings))  # donated by each update
    role, role_shardings = update.init_role(own, optimizer, shardings, mesh)
    forward = update.Forward(model.decoder, 1.0, jnp.dtype(jnp.float32), "none", 1024)
    options = GRPOOptions()
    step = update.make_update(forward, ALGORITHMS["grpo"], options, optimizer, 1.0, role_shardings, mesh)
    compiled: set[int] = set()

    def run(batch: packing.MiniBatch, micro_batches: int) -> float:
        nonlocal role
        start = time.perf_counter()
        rows, denominator = update.put_rows(batch, mesh), jnp.float32(batch.denominator)
        role, metrics = step(role, rows, jnp.int32(micro_batches), denominator, old_is_actor=True)
        jax.block_until_ready((role, metrics))
        return time.perf_counter() - start

    for prompt in size.prompts:
        seconds: dict[int, float] = {}
        for group in size.groups:
            for shared in (False, True):
                row_tokens = _row_tokens(size, prompt, group, shared)
                batch, _ = packing.pack(
                    _group(model, prompt, size.update_tokens, group),
                    packing.RowShape(row_tokens, 1),
                    aggregation=options.loss_aggregation,
                    max_response_tokens=size.update_tokens,
                    max_micro_batches=max(size.groups),  # one shape for all
                    share_prompts=shared,
                )
                if row_tokens not in compiled:
                    compiled.add(row_tokens)
                    run(batch, 0)
                median, repeats = repeat(size, lambda _, batch=batch: run(batch, batch.num_micro_batches))
                seconds[shared] = median
                yield {
                    "prompt": prompt,
                    "group": group,
                    "prompts shared": "yes" if shared else "no",
                    "tokens computed": batch.num_micro_batches * row_tokens,
                    "s": median,
                    "times faster": seconds[False] / median,
                    "repeats": repeats,
                }


def _row_tokens(size: Size, prompt: int, group: int, shared: bool) -> int:
    """The longest rows of at most ``size.row_tokens`` that the group fills exactly."""
    of_each, once = (size.update_tokens, prompt) if shared else (prompt + size.update_tokens, 0)
    fitting = (count for count in range(1, group + 1) if once + count * of_each <= size.row_tokens)
    return once + max(count for count in fitting if group % count == 0) * of_each


def _group(model: Model, prompt: int, new: int, group: int) -> Sequences:
    """Completions of one random prompt, with random advantages that add up to 0."""
    random = np.random.default_rng([prompt, group])
    ids = random.integers(1, model.decoder.config.vocab_size, prompt + group * new).astype(np.int32)
    mask = np.arange(prompt + new) >= prompt
    advantages = random.normal(size=group)
    advantages -= advantages.mean()
    made = Sequences([], [], np.zeros(group, np.int32))
    made.advantages, made.sampler_logprobs = [], []
    for index in range(group):
        own = ids[prompt + index * new : prompt + (index + 1) * new]
        made.tokens.append(np.concatenate([ids[:prompt], own]))
        made.loss_mask.append(mask)
        made.advantages.append(np.where(mask, advantages[index], 0).astype(np.float32))
        made.sampler_logprobs.append(np.where(mask, -1.0, 0).astype(np.float32))
    return made
