"""The decoder: one definition that trains, scores and generates.

A :class:`Decoder` holds only its configuration, is hashable and hence a static argument of a jit; parameters are
a plain nested dict that every method takes::

    {'embed': {'weight': [V, D]},
     'blocks': {'run_0': {...}},          # consecutive identical layers, every leaf stacked [L, ...]
     'final_norm': {'scale': [D]},
     'lm_head': {'weight': [V, D]}}       # absent where the embedding is also the output

Weights keep their heads apart: q ``[D, H, h]``, k and v ``[D, K, h]``, o ``[H, h, D]``, gate and up ``[D, F]``,
down ``[F, D]``. Compute runs in the dtype of the parameters given; norms, rotations, softmaxes and
log-probabilities are in float32.

A decoder with `lora` has adapters beside the matrices that they belong to (q_lora_a ``[D, r]``, q_lora_b
``[r, H, h]``, and so on, float32); the same decoder without reads the base parameters alone (``models/lora.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels import token_chunks
from jaxrl_kernels.row_attention.api import NO_WINDOW, row_attention
from jaxrl_kernels.token_logprobs.api import token_logprobs
from jaxrl_llm.models import arrangement, low_precision, pipeline
from jaxrl_llm.models.blocks import Block, RMSNorm
from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.placement import gather_layer, look_up, pipeline_stages, place, row_shards, splitting_axes
from jaxrl_llm.models.platform import compiles_for_cpu
from jaxrl_llm.models.rope import rope_tables
from jaxrl_llm.types import Params, TokenOutputs

Attend = Callable[[int, Float[Array, "*n H h"], Float[Array, "*n K h"], Float[Array, "*n K h"]], Float[Array, "*n H h"]]
"""``attend(layer, q, k, v)``: the attention of generation, with its cache. q and k are rotated, q is not scaled."""

DEFAULT_CHUNK_TOKENS = 1024

REMAT: dict[str, Any] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a layer keeps for its backward pass, by name; None keeps everything."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer of the Llama family tree; see the module for its parameters."""

    config: ModelConfig
    lora: Lora | None = None

    def with_lora(self, lora: Lora | None) -> Decoder:
        """The same model with these adapters in its parameters in place of any; None for the base alone."""
        return dataclasses.replace(self, lora=lora)

    # --- parameters -------------------------------------------------------------------------------------------

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters, normal with the model's ``init_scale``; adapters, if any, change nothing yet."""
        config = self.config
        embed_key, head_key, blocks_key = jax.random.split(key, 3)

        def one_block(block_key: Array) -> Params:
            return nnx.to_pure_dict(nnx.state(Block(config, nnx.Rngs(block_key), lora=self.lora)))

        def table(table_key: Array) -> Params:
            shape = (config.padded_vocab_size, config.hidden_size)
            return {"weight": jax.random.normal(table_key, shape, jnp.float32) * config.init_scale}

        params: Params = {
            "embed": table(embed_key),
            "blocks": {
                name: jax.vmap(one_block)(jax.random.split(jax.random.fold_in(blocks_key, run.start), len(run)))
                for name, run in self.runs.items()
            },
            "final_norm": {"scale": jnp.ones((config.hidden_size,), jnp.float32)},
        }
        if not config.tie_embeddings:
            params["lm_head"] = table(head_key)
        return params

    def abstract_params(self) -> Params:
        """The parameters as ``jax.ShapeDtypeStruct``: nothing is allocated."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def logical_axes(self) -> Params:
        """The same tree with each parameter's tuple of logical axes."""
        return arrangement.axes_of(self.abstract_params(), arrangement.AXES)

    @property
    def runs(self) -> dict[str, range]:
        """Runs of consecutive layers with the same structure, by name. Windows differ as data, not as structure,
        so the models here have one run."""
        return {"run_0": range(self.config.num_layers)}

    def output_weight(self, params: Params) -> Float[Array, "V D"]:
        """The matrix that turns hidden states into logits: the embedding where the model ties them."""
        return (params["embed"] if self.config.tie_embeddings else params["lm_head"])["weight"]

    # --- training and scoring ---------------------------------------------------------------------------------

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        segment_ids: Int[Array, "R T"],
        prefix_ids: Int[Array, "R T"] | None = None,
        *,
        remat: str = "none",
        unroll: bool | None = None,
        schedule: pipeline.Schedule | None = None,
        sequence_parallel: bool = False,
    ) -> Float[Array, "R T D"]:
        """Hidden states after the final norm, in the dtype of the parameters.

        Where parameters are split over ``fsdp`` or ``pipeline``, trace this under ``jax.set_mesh`` (``placement.py``).

        Args:
          positions: restart at 0 with each segment.
          segment_ids: 0 is padding; a token sees its own segment only.
          prefix_ids: the segment that a token's segment continues and sees as well (a prompt that several completions
            of a row share); 0 or None for none. Positions go on where the prefix ends.
          remat: what the backward pass computes again. ``none``: nothing. ``full``: the layer, of which only its input
            ``[R, T, D]`` is kept. ``dots``: all but the products with weights.
          unroll: whether layers follow one another in the program, each on its own slice of the weights, or are one
            loop over the stack. Unrolled, a CPU needs no copies in and out of stacked arrays; compiling takes longer.
            None unrolls on CPUs.
          schedule: where the mesh has several stages: how the rows go through them (``pipeline.py``); layers are then
            in its order, see ``pipeline.arrange``. None is GPipe with as many micro-batches as stages.
          sequence_parallel: whether tokens are split over ``tensor`` too between the products with weights.
        """
        if remat not in REMAT:
            raise ValueError(f"remat is {remat!r}; it must be one of {', '.join(REMAT)}")
        residual = "sequence" if sequence_parallel else "rows"
        run_layers = functools.partial(self._layers, remat=remat, unroll=unroll, residual=residual)
        x = place(self._embed(params, tokens), "rows", None, None).reshape(tokens.size, -1)
        x = place(x, residual, None)
        prefix_ids = jnp.zeros_like(segment_ids) if prefix_ids is None else prefix_ids
        columns = positions, segment_ids, prefix_ids
        stages = pipeline_stages()
        if schedule is None and stages > 1:
            schedule = pipeline.Schedule(stages, micro_batches=stages)
        windows = np.array([NO_WINDOW if window is None else window for window in self.config.windows], np.int32)
        for name, run in self.runs.items():
            stacked, window = params["blocks"][name], windows[run.start : run.stop]
            if stages > 1:
                assert schedule is not None
                x = self._pipelined(schedule, run_layers, stacked, window, columns, x)
            else:
                x = run_layers({}, stacked, jnp.asarray(window), columns, x)
        hidden = self._final_norm(params, place(x, residual, None)).reshape(*tokens.shape, -1)
        return place(hidden, "rows", None, None)  # whole rows: outputs are computed of other tokens' states

    def _layers(
        self,
        trained: Params,
        frozen: Params,
        windows: Int[Array, " l"],
        columns: tuple[Int[Array, "R T"], Int[Array, "R T"], Int[Array, "R T"]],
        x: Float[Array, "N D"],
        *,
        remat: str,
        unroll: bool | None,
        residual: str,
    ) -> Float[Array, "N D"]:
        """Consecutive layers; the stacked parameters are those of both trees.

        Args:
          columns: positions, segment_ids and prefix_ids of the rows whose tokens x holds.
        """
        stacked = arrangement.merge_trees(frozen, trained)
        positions, segment_ids, prefix_ids = columns
        rows, num_tokens = positions.shape
        rope = rope_tables(self.config.rope, self.config.head_size, positions.reshape(-1))
        axes = splitting_axes(rows=rows, kv_heads=self.config.num_kv_heads)

        def layer(x: Float[Array, "N D"], layer_data: dict[str, Any]) -> tuple[Float[Array, "N D"], None]:
            def attend(q: Array, k: Array, v: Array) -> Array:
                q, k, v = (
                    place(value.reshape(rows, num_tokens, *value.shape[1:]), "rows", None, axis, None)
                    for value, axis in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads"))
                )
                attended = row_attention(
                    q,
                    k,
                    v,
                    positions,
                    segment_ids,
                    prefix_ids,
                    layer_data["window"],
                    scale=self.config.scale,
                    mesh_axes=None if axes is None else (axes[0], axes[1]),
                )
                attended = place(attended, "rows", None, "heads", None)
                return place(attended.reshape(rows * num_tokens, *attended.shape[2:]), "rows", "heads", None)

            block = self._block(gather_layer(layer_data["params"]), fused=False)
            return place(block(x, rope, attend, residual), residual, None), None

        if REMAT[remat] is not None:
            layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT[remat])
        if compiles_for_cpu() if unroll is None else unroll:
            for index, layer_params in enumerate(arrangement.unstack(stacked, len(windows))):
                x, _ = layer(x, {"params": layer_params, "window": windows[index]})
        else:
            x, _ = jax.lax.scan(layer, x, {"params": stacked, "window": windows})
        return x

    def _pipelined(
        self,
        schedule: pipeline.Schedule,
        run_layers: pipeline.Stage,
        stacked: Params,
        windows: np.ndarray,
        columns: tuple[Int[Array, "R T"], Int[Array, "R T"], Int[Array, "R T"]],
        x: Float[Array, "N D"],
    ) -> Float[Array, "N D"]:
        """The layers of a run over the pipeline's stages. A micro-batch takes as many rows of each shard."""
        rows, num_tokens = columns[0].shape
        shards, count = row_shards(), schedule.micro_batches
        if rows % (shards * count):
            raise ValueError(
                f"{rows} rows can't be cut into {count} micro-batches of as many rows on each of {shards} devices"
            )

        def cut(value: Array) -> Array:
            parts = jnp.moveaxis(value.reshape(shards, count, -1, value.shape[-1]), 1, 0)
            return place(parts.reshape(count, -1, value.shape[-1]), "micro_batches", "rows_of_micro_batch", None)

        base, adapters = arrangement.split_adapters(stacked)
        trained, frozen = (stacked, {}) if self.lora is None else (adapters, base)
        out = pipeline.run(
            schedule,
            run_layers,
            trained,
            frozen,
            jnp.asarray(windows[schedule.layer_order(len(windows))]),
            jax.tree.map(cut, columns),
            cut(x),
        )
        back = jnp.moveaxis(out.reshape(count, shards, -1, out.shape[-1]), 0, 1)
        return place(back.reshape(rows * num_tokens, -1), "rows", None)

    def token_logprobs(
        self,
        params: Params,
        hidden: Float[Array, "R T D"],
        tokens: Int[Array, "R T"],
        loss_mask: Bool[Array, "R T"],
        temperature: Float[Array, ""] | float,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        vocab_chunk: int = 0,
    ) -> TokenOutputs:
        """Log-probability of each row's own tokens, and the entropy of the distribution each was drawn from.

        ``logprobs[:, t] = log softmax(logits(hidden[:, t - 1]) / temperature)[tokens[:, t]]``, nats in float32; both
        outputs are 0 where ``loss_mask`` is False. Column 0 has no predecessor and is always 0.

        Args:
          chunk_tokens: logits exist for this many tokens at a time, over all rows and devices.
          vocab_chunk: and for this many entries of the vocabulary on a device; 0 for all.
        """
        logprobs, entropy = token_logprobs(
            hidden,
            self.output_weight(params),
            tokens,
            loss_mask,
            temperature,
            vocab_size=self.config.vocab_size,
            chunk_tokens=chunk_tokens,
            vocab_chunk=vocab_chunk,
            weight_gradient=self.lora is None,
            mesh_axes=splitting_axes(rows=tokens.shape[0], vocab=self.config.padded_vocab_size),
        )
        return TokenOutputs(logprobs=logprobs, entropy=entropy)

    def top_k_logprobs(
        self,
        params: Params,
        hidden: Float[Array, "R T D"],
        loss_mask: Bool[Array, "R T"],
        temperature: Float[Array, ""] | float,
        *,
        k: int,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> tuple[Int[Array, "R T k"], Float[Array, "R T k"]]:
        """The k likeliest tokens at each column as its predecessor predicts it, and their log-probs, float32; 0 where
        ``loss_mask`` is False or there is no predecessor, and nothing is projected for chunks of such columns alone.

        Args:
          k: at most the vocabulary.
          chunk_tokens: logits exist for this many tokens at a time, over all rows.
        """
        axes = splitting_axes(rows=hidden.shape[0], vocab=self.config.padded_vocab_size)
        weight = self.output_weight(params)
        chunks, num_used, restore = token_chunks.chunks({"hidden": hidden}, {}, loss_mask, chunk_tokens, axes)

        def one(index: Int[Array, ""], chunk: dict[str, Array]) -> tuple[Array, tuple[Array, Array]]:
            mask = chunk["mask"]
            shape = (*mask.shape, k)

            def compute() -> tuple[Array, Array]:
                tempered = mask, jnp.full(mask.shape, temperature, jnp.float32), self.config.vocab_size, axes
                logprobs = jax.nn.log_softmax(token_chunks.logits(chunk["hidden"], weight, *tempered), axis=-1)
                values, ids = jax.lax.top_k(logprobs, k)
                kept = mask[..., None]
                return jnp.where(kept, ids.reshape(shape), 0), jnp.where(kept, values.reshape(shape), 0.0)

            nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
            return index + 1, token_chunks.if_used(index < num_used, axes, compute, lambda: nothing)

        _, (ids, values) = jax.lax.scan(one, jnp.int32(0), chunks)
        return restore(ids), restore(values)

    # --- generation -------------------------------------------------------------------------------------------

    def generation_layer(self, run_params: Params, index: int, weight_dtype: str = low_precision.COMPUTE) -> Params:
        """Layer ``index`` of a stacked run in the generation arrangement (``arrangement.GENERATION_AXES``)."""
        base, adapters = arrangement.split_adapters(run_params)
        layer = arrangement.fuse_layer(jax.tree.map(lambda leaf: leaf[index], base))
        if weight_dtype != low_precision.COMPUTE:
            layer = low_precision.quantize_layer(layer, weight_dtype)
        return arrangement.merge_trees(layer, self.generation_adapters(adapters, index))

    def generation_adapters(self, run_adapters: Params, index: int) -> Params:
        """The adapters alone of layer ``index`` of a stacked run, in the generation arrangement."""
        return arrangement.fuse_adapters(jax.tree.map(lambda leaf: leaf[index], run_adapters), self.config)

    def generation_params(self, params: Params, weight_dtype: str = low_precision.COMPUTE) -> Params:
        """Every parameter in the generation arrangement: ``{'embed', 'layers': [L dicts], 'final_norm', 'lm_head'?}``.

        Pure and jittable; in the dtype given, but for the matrices of layers where ``weight_dtype`` (as in
        ``rollout.weight_dtype``) names another: see ``low_precision.py``.
        """
        layers = [
            self.generation_layer(params["blocks"][name], index, weight_dtype)
            for name, run in self.runs.items()
            for index in range(len(run))
        ]
        return {**{name: value for name, value in params.items() if name != "blocks"}, "layers": layers}

    def generation_axes(self, weight_dtype: str = low_precision.COMPUTE) -> Params:
        """Logical axes of :meth:`generation_params`, in the same structure."""
        tree = jax.eval_shape(lambda params: self.generation_params(params, weight_dtype), self.abstract_params())
        return arrangement.axes_of(tree, arrangement.GENERATION_AXES)

    def generation_hidden(
        self, gen_params: Params, tokens: Int[Array, "*n"], positions: Int[Array, "*n"], attend: Attend
    ) -> Float[Array, "*n D"]:
        """Hidden states after the final norm; tokens in any arrangement: ``[slots]`` in decode, ``[b, T]`` in prefill.

        ``attend`` is called once per layer, in order, and owns the cache: it writes k and v and returns what the
        queries read, scaled by ``config.scale`` and within ``config.windows[layer]``.
        """
        shape = tokens.shape
        rope = rope_tables(self.config.rope, self.config.head_size, positions.reshape(-1))
        x = self._embed(gen_params, tokens.reshape(-1))
        for index, layer_params in enumerate(gen_params["layers"]):

            def attend_flat(q: Array, k: Array, v: Array, index: int = index) -> Array:
                q, k, v = (value.reshape(*shape, *value.shape[1:]) for value in (q, k, v))
                return attend(index, q, k, v).reshape(-1, *q.shape[-2:])

            x = self._block(layer_params, fused=True)(x, rope, attend_flat)
        return self._final_norm(gen_params, x).reshape(*shape, -1)

    def logits(self, params: Params, hidden: Float[Array, "*n D"]) -> Float[Array, "*n V"]:
        """Float32 logits of a few tokens, of either arrangement's parameters; -inf in padded rows of the vocabulary."""
        weight = self.output_weight(params)
        if compiles_for_cpu():  # W @ x.T, as in `blocks.MLP`; the sampler reads the transposed result without a copy
            columns = jax.lax.optimization_barrier(hidden.reshape(-1, hidden.shape[-1]).T)
            flipped = jnp.einsum("vd,dn->vn", weight, columns, preferred_element_type=jnp.float32)
            logits = jax.lax.optimization_barrier(flipped).T.reshape(*hidden.shape[:-1], -1)
        else:
            logits = jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
        if self.config.padded_vocab_size == self.config.vocab_size:
            return logits
        real = jnp.arange(self.config.padded_vocab_size) < self.config.vocab_size
        return jnp.where(real.reshape((1,) * (hidden.ndim - 1) + (-1,)), logits, -jnp.inf)

    # --- pieces -----------------------------------------------------------------------------------------------

    def _block(self, params: Params, fused: bool) -> Block:
        quantized = low_precision.is_quantized(params)
        return nnx.merge(_block_definition(self.config, fused, self.lora, quantized), params)

    def _embed(self, params: Params, tokens: Int[Array, "*n"]) -> Float[Array, "*n D"]:
        return look_up(params["embed"]["weight"], tokens)

    def _final_norm(self, params: Params, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        norm = nnx.merge(_norm_definition(self.config.hidden_size, self.config.norm_eps), params["final_norm"])
        return norm(x)


@functools.cache
def _block_definition(config: ModelConfig, fused: bool, lora: Lora | None, quantized: bool) -> nnx.GraphDef:
    """The block without its values: what ``nnx.merge`` binds a dict of parameters to."""
    return nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0), fused, lora, quantized)))[0]


@functools.cache
def _norm_definition(size: int, epsilon: float) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: RMSNorm(size, epsilon)))[0]
