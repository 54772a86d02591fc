"""What runs on the device: prefill, page copies and decode of one replica, each a plain function to be jitted.

The KV cache is a list over layers of (keys, values), each one pool ``[P, S, K, h]``. Never stacked: XLA would
copy a layer out of a stack before each use. Pools are donated by the engine, so every write is in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_kernels.prefill_attention.api import prefill_attention
from jaxrl_llm.decoding import rows
from jaxrl_llm.decoding.cache import GATHERED, DenseRows, GatheredCache, PagedCache, Pool, Step, write_pages
from jaxrl_llm.decoding.sampling import sample_tokens
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.types import Params


@dataclasses.dataclass(frozen=True)
class Programs:
    """The device programs of one decoder.

    Attributes:
      num_tokens: ids at or above it are never sampled.
      tokens_per_dispatch: most tokens a decode dispatch makes per row.
      attention: how decode reads the cache: ``gathered`` or an implementation of paged attention (see `cache`).
      replica_axes: mesh axes over which the programs run manually and have more than one replica.
    """

    decoder: Decoder
    num_tokens: int
    tokens_per_dispatch: int
    attention: str
    replica_axes: tuple[str, ...] = ()

    def prefill(
        self,
        gen_params: Params,
        pools: list[Pool],
        packed: Int[Array, "1 5 T"],
        context: Int[Array, "1 4 C"] | None = None,
    ) -> list[Pool]:
        """Writes keys and values of the tokens in ``packed`` (see `rows.PrefillRow`). No logits are made.

        ``context`` (see `rows.pack_context`): the pages that they read, those written in this call included.
        """
        config = self.decoder.config
        row = rows.unpack_prefill(packed[0])
        pools = list(pools)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            pools[layer] = write_pages(pools[layer], k, v, row.page, row.offset)
            return prefill_attention(
                q,
                k,
                v,
                row.position,
                row.sequence,
                None if context is None else pools[layer],
                None if context is None else context[0],
                scale=config.scale,
                window=config.windows[layer],
            )

        self.decoder.generation_hidden(gen_params, row.token, row.position, attend)
        return pools

    def copy_pages(self, pools: list[Pool], pairs: Int[Array, "1 n 2"]) -> list[Pool]:
        """Copies page ``pairs[0, i, 0]`` to page ``pairs[0, i, 1]``; destinations beyond the pool are dropped."""
        source, destination = pairs[0, :, 0], pairs[0, :, 1]

        def copy(pool: Array) -> Array:
            pages = pool.at[source].get(mode="promise_in_bounds")
            return pool.at[destination].set(pages, mode="drop", unique_indices=True)

        return jax.tree.map(copy, pools)

    def gather(self, pools: list[Pool], packed: Int[Array, "B W"], progress: Int[Array, "N 4"]) -> list[DenseRows]:
        """Dense copies of the rows' pages, for `decode` with the attention ``gathered``."""
        inputs = rows.unpack_decode(packed, progress)
        return GatheredCache(inputs.page_table, self.tokens_per_dispatch).open(pools, inputs.position)

    def decode(
        self,
        gen_params: Params,
        pools: list[Pool],
        kept: list[DenseRows],
        packed: Int[Array, "B W"],
        progress: Int[Array, "N 4"],
    ) -> tuple[list[Pool], list[DenseRows], Int[Array, "B w"], Int[Array, "N 4"]]:
        """Up to ``tokens_per_dispatch`` tokens for each active row of ``packed`` (see `rows.DecodeRows`).

        A row stops at a stop id or its token limit; the loop ends when all have. Returns the pools, the dense copies
        with the new tokens in them, the tokens as `rows.pack_tokens` lays them out, and the ``progress`` that the next
        dispatch can go on from.

        Args:
          kept: of `gather` or of the dispatch before, for the same rows and columns; empty for paged attention.
        """
        inputs = rows.unpack_decode(packed, progress)
        num_rows = packed.shape[0]
        most = self.tokens_per_dispatch
        cache = self._cache(inputs.page_table)

        def anywhere(active: Array) -> Array:
            """Whether any replica has an active row. All replicas must leave the loop at the same step: a collective
            that XLA places in the model may name every device, and would wait for one that has left."""
            count = jnp.sum(active, dtype=jnp.int32)
            return (jax.lax.psum(count, self.replica_axes) if self.replica_axes else count) > 0

        def unfinished(state: dict[str, Any]) -> Array:
            return (state["step"] < most) & state["unfinished"]

        def step(state: dict[str, Any]) -> dict[str, Any]:
            sampling = inputs.sampling._replace(generated=state["generated"])
            cached, hidden = self._decode_hidden(gen_params, state, cache)
            # Whole on every device of a tensor group: one all-gather, and none of the dozens of small collectives of a
            # sampler over a split vocabulary, which may not stand in a branch that only some replicas take.
            logits = jax.lax.with_sharding_constraint(self.decoder.logits(gen_params, hidden), PartitionSpec())
            token, logprob = sample_tokens(logits, sampling, num_tokens=self.num_tokens)
            active = state["active"]
            generated = state["generated"] + active
            stopped = jnp.any(token[:, None] == sampling.stop_ids, axis=1) | (generated >= inputs.max_tokens)
            return {
                "step": state["step"] + 1,
                "unfinished": anywhere(active & ~stopped),
                "active": active & ~stopped,
                "token": token,
                "position": state["position"] + active,
                "generated": generated,
                "tokens": state["tokens"].at[state["step"]].set(jnp.where(active, token, 0)),
                "logprobs": state["logprobs"].at[state["step"]].set(jnp.where(active, logprob, 0.0)),
                "cached": cached,
            }

        start = {
            "step": jnp.int32(0),
            "unfinished": anywhere(inputs.active),
            "active": inputs.active,
            "token": inputs.token,
            "position": inputs.position,
            "generated": inputs.sampling.generated,
            "tokens": jnp.zeros((most, num_rows), jnp.int32),
            "logprobs": jnp.zeros((most, num_rows), jnp.float32),
            "cached": kept if self.attention == GATHERED else list(pools),
        }
        end = jax.lax.while_loop(unfinished, step, start)
        count = end["generated"] - inputs.sampling.generated
        pools = cache.close(end["cached"], pools, inputs.position, count)
        kept = end["cached"] if self.attention == GATHERED else []
        tokens = rows.pack_tokens(end["step"], count, end["tokens"], end["logprobs"])
        at_end = (end[name] for name in ("active", "token", "position", "generated"))
        return pools, kept, tokens, rows.pack_progress(*at_end, num_slots=progress.shape[0])

    def _cache(self, page_table: Int[Array, "B M"]) -> PagedCache | GatheredCache:
        if self.attention == GATHERED:
            return GatheredCache(page_table, self.tokens_per_dispatch)
        return PagedCache(page_table, self.attention)

    def _decode_hidden(
        self, gen_params: Params, state: dict[str, Any], cache: PagedCache | GatheredCache
    ) -> tuple[list[Any], Float[Array, "B D"]]:
        """Runs one token per row through the model, its key and value written to the cache first."""
        config = self.decoder.config
        cached = list(state["cached"])
        where = Step(state["active"], state["position"])

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return cache.attend(cached, layer, where, q, k, v, scale=config.scale, window=config.windows[layer])

        hidden = self.decoder.generation_hidden(gen_params, state["token"], state["position"], attend)
        return cached, hidden
