"""How a decode dispatch reads and writes the paged KV cache: the two ways behind one interface.

`PagedCache` attends through the page table at every step, the way of GPU kernels. `GatheredCache` decodes on dense
copies of the rows' pages, and writes the new tokens back when a dispatch ends: a CPU has no kernel that follows page
ids, and gathering at every step costs more than the attention itself. The copies serve as many dispatches as have the
same rows, since to make them takes as long as a step or two. Both hold the same values, so tokens don't depend on the
choice. A cache object is made inside a jitted program and lives as long as it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.paged_attention.api import paged_attention
from jaxrl_llm.models.placement import TENSOR_AXIS

Pool = tuple[Float[Array, "P S K h"], Float[Array, "P S K h"]]
"""Keys and values of one layer."""

DenseRows = tuple[Float[Array, "B K c h t"], Float[Array, "B K n h"]]
"""The same of B rows, each with its n tokens side by side; of keys, c chunks of t tokens each."""

GATHERED = "gathered"
"""The name of `GatheredCache` among the choices of ``rollout.attention``."""

_MASKED = -1e30

_CHUNK_TOKENS = 64
"""Of the keys in `GatheredCache`. A CPU's product reads those of a chunk one behind another; with all of a row in one,
it jumps by the row's length (64 rows of 256 tokens: 1.2 ms a layer, in chunks 0.7)."""


class Step(NamedTuple):
    """Where the rows of one decode step stand.

    Attributes:
      active: rows that decode a token; the others write nothing and read nothing.
      position: of the token that is decoded, the number of tokens cached before it.
    """

    active: Bool[Array, " B"]
    position: Int[Array, " B"]


def write_pages(
    pool: Pool, k: Float[Array, "n K h"], v: Float[Array, "n K h"], page: Int[Array, " n"], offset: Int[Array, " n"]
) -> Pool:
    """Puts n tokens' keys and values in their places; the places are distinct, those beyond the pool dropped."""
    keys, values = pool

    def put(pages: Array, tokens: Array) -> Array:
        return pages.at[page, offset].set(tokens.astype(pages.dtype), mode="drop", unique_indices=True)

    return put(keys, k), put(values, v)


def _page_of(page_table: Int[Array, "B M"], position: Array, page_size: int) -> Array:
    columns = (position // page_size).reshape(len(page_table), -1)
    return jnp.take_along_axis(page_table, columns, axis=1, mode="clip").reshape(position.shape)


def _splits_heads() -> bool:
    """Whether the mesh in context has several devices in a tensor group, over which XLA would split the program."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape.get(TENSOR_AXIS, 1) > 1 and kinds[TENSOR_AXIS] != AxisType.Manual


class PagedCache:
    """Pages in the pools, read by a paged attention implementation."""

    def __init__(self, page_table: Int[Array, "B M"], implementation: str):
        self.page_table = page_table
        self.implementation = implementation

    def attend(
        self,
        state: list[Any],
        layer: int,
        step: Step,
        q: Float[Array, "B H h"],
        k: Float[Array, "B K h"],
        v: Float[Array, "B K h"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Array, "B H h"]:
        """Writes the token's key and value into ``state[layer]``, then attends to what the row holds."""
        num_pages, page_size = state[layer][0].shape[:2]
        page = _page_of(self.page_table, step.position, page_size)
        # Idle rows write nowhere: page ids beyond the pool are dropped (all different: indices must be unique).
        page = jnp.where(step.active, page, num_pages + jnp.arange(page.shape[0], dtype=page.dtype))

        def write_and_attend(pool, q, k, v, page, offset, page_table, lengths):
            pool = write_pages(pool, k, v, page, offset)
            out = paged_attention(
                q,
                pool[0],
                pool[1],
                page_table,
                lengths,
                scale=scale,
                window=window,
                implementation=self.implementation,
            )
            return pool, out

        heads, pages, whole = PartitionSpec(None, TENSOR_AXIS), PartitionSpec(None, None, TENSOR_AXIS), PartitionSpec()
        if _splits_heads():
            # A kernel is not partitioned by XLA: each device of a tensor group calls it on its own heads.
            write_and_attend = jax.shard_map(
                write_and_attend,
                in_specs=(pages, heads, heads, heads, whole, whole, whole, whole),
                out_specs=(pages, heads),
                axis_names={TENSOR_AXIS},
                check_vma=False,
            )
        state[layer], out = write_and_attend(
            state[layer],
            q,
            k,
            v,
            page,
            step.position % page_size,
            self.page_table,
            jnp.where(step.active, step.position + 1, 0),
        )
        return out

    def close(self, state: list[Any], pools: list[Pool], start: Int[Array, " B"], made: Int[Array, " B"]) -> list[Pool]:
        """The pools with the ``made`` tokens of each row from position ``start`` on."""
        return state


class GatheredCache:
    """Each row's tokens in dense arrays, keys in chunks ``[B, K, c, h, t]`` and values ``[B, K, n, h]``: what the
    CPU's batched products read fastest. Costs a second copy of the live cache.

    Args:
      most_tokens: tokens a row can make in the dispatch.
    """

    def __init__(self, page_table: Int[Array, "B M"], most_tokens: int):
        self.page_table = page_table
        self.most_tokens = most_tokens

    def open(self, pools: list[Pool], position: Int[Array, " B"]) -> list[Any]:
        def gather(pages: Array) -> Array:
            tokens = pages.at[self.page_table].get(mode="promise_in_bounds")
            return tokens.reshape(len(self.page_table), -1, *pages.shape[2:])

        def rows(pool: Pool) -> DenseRows:
            keys, values = gather(pool[0]), gather(pool[1])
            # Entries never written may be NaN, and 0 * NaN would leak; keys need no care, their scores are replaced.
            cached = jnp.arange(values.shape[1])[None, :] < position[:, None]
            values = jnp.where(cached[:, :, None, None], values, 0)
            num_rows, num_tokens = keys.shape[:2]
            chunks = keys.reshape(num_rows, -1, math.gcd(num_tokens, _CHUNK_TOKENS), *keys.shape[2:])
            return chunks.transpose(0, 3, 1, 4, 2), values.transpose(0, 2, 1, 3)

        return [rows(pool) for pool in pools]

    def attend(
        self,
        state: list[Any],
        layer: int,
        step: Step,
        q: Float[Array, "B H h"],
        k: Float[Array, "B K h"],
        v: Float[Array, "B K h"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Array, "B H h"]:
        keys, values = state[layer]
        num_rows, num_kv_heads, num_chunks, head_size, chunk = keys.shape
        num_tokens = num_chunks * chunk
        row = jnp.arange(num_rows)
        place = jnp.where(step.active, step.position, num_tokens)  # beyond the end: dropped
        options: dict[str, Any] = {"mode": "drop", "unique_indices": True}
        keys = keys.at[row, :, place // chunk, :, place % chunk].set(k.astype(keys.dtype), **options)
        values = values.at[row, :, place].set(v.astype(values.dtype), **options)
        state[layer] = keys, values
        column = jnp.arange(num_tokens)[None, :]
        seen = column <= step.position[:, None]
        if window is not None:
            seen &= column > step.position[:, None] - window
        grouped = q.reshape(num_rows, num_kv_heads, 1, -1, head_size)
        group = grouped.shape[3]
        grouped = jnp.broadcast_to(grouped, (num_rows, num_kv_heads, num_chunks, group, head_size))
        scores = jnp.einsum("bkcgd,bkcdt->bkcgt", grouped, keys, preferred_element_type=jnp.float32) * scale
        scores = scores.transpose(0, 1, 3, 2, 4).reshape(num_rows, num_kv_heads, group, num_tokens)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, _MASKED), axis=-1).astype(values.dtype)
        out = jnp.einsum("bkgt,bktd->bkgd", weights, values, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype)

    def close(self, state: list[Any], pools: list[Pool], start: Int[Array, " B"], made: Int[Array, " B"]) -> list[Pool]:
        num_pages, page_size = pools[0][0].shape[:2]
        token = jnp.arange(self.most_tokens)[None, :]
        position = start[:, None] + token
        page = _page_of(self.page_table, position, page_size)
        nowhere = num_pages + jnp.arange(page.size, dtype=page.dtype).reshape(page.shape)
        page = jnp.where(token < made[:, None], page, nowhere)

        def write(pool: Pool, rows: DenseRows) -> Pool:
            row = jnp.arange(len(position))[:, None]
            chunk = rows[0].shape[-1]
            keys = rows[0].at[row, :, position // chunk, :, position % chunk].get(mode="clip")
            values = rows[1].at[row, :, position].get(mode="clip")
            shape = (-1, *pool[0].shape[2:])
            keys, values = keys.reshape(shape), values.reshape(shape)
            return write_pages(pool, keys, values, page.reshape(-1), (position % page_size).reshape(-1))

        return [write(pool, rows) for pool, rows in zip(pools, state, strict=True)]
