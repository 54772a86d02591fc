"""Chunked projection in plain XLA: the production path on every backend so far.

Chunks without a counted token are skipped at run time (`token_chunks`), and a chunk's logits exist for the whole
vocabulary or for a slice of it at a time (`vocabulary_slices`). Forward keeps only log-probability, entropy and the
logarithm of the sum; backward computes a chunk's logits again and uses their closed-form gradient::

    z = h W' / temperature,  p = softmax(z),  l = log p[y],  H = -sum p log p
    dl/dz_j = 1[j = y] - p_j                 dH/dz_j = -p_j (log p_j + H)

Over slices the sums of forward are taken relative to the largest logit so far, and multiplied whenever there is a
larger one.

The gradient of the weight is added up over chunks in float32, whatever the dtype of the weight; that of a constant
weight is left out of the loop. So is that of the states over slices.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels import token_chunks
from jaxrl_kernels.vocabulary_slices import Slices


class Options(NamedTuple):
    """As in `api.token_logprobs`."""

    vocab_size: int
    chunk_tokens: int
    vocab_chunk: int
    mesh_axes: tuple | None
    weight_gradient: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def token_logprobs_xla(hidden, weight, tokens, mask, temperature, options):
    outputs, _ = _forward(hidden, weight, tokens, mask, temperature, options)
    return outputs


def _forward(hidden, weight, tokens, mask, temperature, options):
    mesh_axes = options.mesh_axes
    weight = token_chunks.place(weight, mesh_axes, "vocabulary", None)
    chunks, num_used, restore = _chunks(hidden, tokens, mask, temperature, options)
    slices = _slices(weight, options)
    sums = _sums if slices is None else functools.partial(_sums_over_slices, slices=slices)

    def one(index, chunk):
        def compute():
            chosen, peak, total, mean_logit = sums(chunk, weight, options)
            log_total = jnp.log(total) + peak
            counted = chunk["mask"].reshape(-1)
            kept = (chosen - log_total, log_total - mean_logit, log_total)
            return tuple(jnp.where(counted, value, 0.0).reshape(chunk["mask"].shape) for value in kept)

        nothing = jnp.zeros(chunk["mask"].shape, jnp.float32)
        return index + 1, token_chunks.if_used(index < num_used, mesh_axes, compute, lambda: (nothing,) * 3)

    _, kept = jax.lax.scan(one, jnp.int32(0), chunks)
    logprobs, entropy, log_total = map(restore, kept)
    return (logprobs, entropy), (hidden, weight, tokens, mask, temperature, entropy, log_total)


def _sums(chunk, weight, options):
    """Per token its own logit, the largest one, the sum of exponentials relative to that, and their mean logit."""
    logits, hits = _logits(chunk, weight, options)  # [n, V]
    peak = logits.max(-1)
    exponentials = jnp.exp(logits - peak[:, None])
    total = exponentials.sum(-1)
    return jnp.where(hits, logits, 0.0).sum(-1), peak, total, (exponentials * logits).sum(-1) / total


def _sums_over_slices(chunk, weight, options, slices):
    """The same, a slice at a time."""
    parts = slices.split(weight)
    rows, tokens, temperature = _flat(chunk)

    def add(index, carry):
        chosen, peak, total, weighted = carry  # [n, P]: nothing crosses devices yet
        logits, hits = slices.logits(rows, slices.read(parts, index), index, temperature, tokens)
        higher = jnp.maximum(peak, logits.max(-1))
        exponentials = jnp.exp(logits - higher[:, :, None])
        kept = jnp.exp(peak - higher)
        return (
            chosen + jnp.where(hits, logits, 0.0).sum(-1),
            higher,
            total * kept + exponentials.sum(-1),
            weighted * kept + (exponentials * logits).sum(-1),
        )

    zeros, least = (
        token_chunks.place(jnp.full((len(tokens), slices.parts), start), options.mesh_axes, "rows", "vocabulary")
        for start in (jnp.float32(0.0), jnp.float32(token_chunks.MASKED))
    )
    chosen, peaks, totals, weighted = jax.lax.fori_loop(0, slices.count, add, (zeros, least, zeros, zeros))
    peak = peaks.max(-1)
    kept = jnp.exp(peaks - peak[:, None])
    total = (totals * kept).sum(-1)
    return chosen.sum(-1), peak, total, (weighted * kept).sum(-1) / total


def _backward(options, saved, cotangents):
    hidden, weight, tokens, mask, temperature, entropy, log_total = saved
    d_logprobs, d_entropy = cotangents
    extra = {"entropy": entropy, "log_total": log_total, "d_logprob": d_logprobs, "d_entropy": d_entropy}
    weight = token_chunks.place(weight, options.mesh_axes, "vocabulary", None)
    chunks, num_used, restore = _chunks(hidden, tokens, mask, temperature, options, extra)
    slices = _slices(weight, options)
    gradients = _gradients if slices is None else functools.partial(_gradients_over_slices, slices=slices)

    def one(carry, chunk):
        index, d_weight = carry

        def compute(d_weight):
            d_hidden, d_weight = gradients(chunk, weight, d_weight, options)
            return d_hidden.reshape(chunk["hidden"].shape), d_weight

        def skip(d_weight):
            return jnp.zeros(chunk["hidden"].shape, weight.dtype), d_weight

        d_hidden, d_weight = token_chunks.if_used(index < num_used, options.mesh_axes, compute, skip, d_weight)
        return (index + 1, d_weight), d_hidden

    start = (jnp.int32(0), jnp.zeros(weight.shape, jnp.float32) if options.weight_gradient else None)
    (_, d_weight), d_hidden = jax.lax.scan(one, start, chunks)
    d_hidden = token_chunks.before_each(restore(d_hidden))  # [R, T, D]
    d_weight = None if d_weight is None else d_weight.astype(weight.dtype)
    return d_hidden.astype(hidden.dtype), d_weight, None, None, jnp.zeros_like(temperature)


def _gradients(chunk, weight, d_weight, options):
    """Of the states of a chunk, ``[n, D]``, and that of the weight with the chunk's added."""
    logits, hits = _logits(chunk, weight, options)
    d_logits = _d_logits(chunk, logits, hits).astype(weight.dtype)
    d_hidden = jnp.einsum("nv,vd->nd", d_logits, weight)
    if d_weight is None:
        return d_hidden, None
    rows = chunk["hidden"].reshape(-1, weight.shape[1])
    return d_hidden, d_weight + jnp.einsum("nv,nd->vd", d_logits, rows, preferred_element_type=jnp.float32)


def _gradients_over_slices(chunk, weight, d_weight, options, slices):
    """The same, a slice at a time."""
    parts = slices.split(weight)
    rows, tokens, temperature = _flat(chunk)

    def add(index, carry):
        d_rows, d_parts = carry  # [n, P, D], [P, L, D]
        part = slices.read(parts, index)
        logits, hits = slices.logits(rows, part, index, temperature, tokens)
        d_logits = _d_logits(chunk, logits, hits).astype(weight.dtype)
        d_rows = d_rows + jnp.einsum("npv,pvd->npd", d_logits, part, preferred_element_type=jnp.float32)
        if d_parts is None:
            return d_rows, None
        added = jnp.einsum("npv,nd->pvd", d_logits, rows, preferred_element_type=jnp.float32)
        return d_rows, slices.add(d_parts, index, added)

    d_rows = jnp.zeros((rows.shape[0], slices.parts, rows.shape[1]), jnp.float32)
    d_rows = token_chunks.place(d_rows, options.mesh_axes, "rows", "vocabulary", None)
    d_parts = None if d_weight is None else slices.split(d_weight)
    d_rows, d_parts = jax.lax.fori_loop(0, slices.count, add, (d_rows, d_parts))
    return d_rows.sum(1).astype(weight.dtype), None if d_parts is None else slices.join(d_parts)


token_logprobs_xla.defvjp(_forward, _backward)


def _d_logits(chunk, logits, hits):
    """Gradient of logits ``[n, ...]`` before the temperature, whatever part of the vocabulary they are of."""
    ones = (1,) * (logits.ndim - 1)
    flat = {name: chunk[name].reshape(-1, *ones) for name in chunk if name != "hidden"}
    log_p = logits - flat["log_total"]  # 0 where masked
    scale = jnp.where(flat["mask"], 1.0 / flat["temperature"], 0.0)
    of_logprob, of_entropy = flat["d_logprob"] * scale, flat["d_entropy"] * scale
    return jnp.where(hits, of_logprob, 0.0) - jnp.exp(log_p) * (of_logprob + of_entropy * (log_p + flat["entropy"]))


def _slices(weight, options):
    """None where the whole vocabulary is at once."""
    if not options.vocab_chunk:
        return None
    slices = Slices.of(weight.shape[0], options.vocab_size, options.vocab_chunk, options.mesh_axes)
    return slices if slices.count > 1 else None


def _chunks(hidden, tokens, mask, temperature, options, extra=None):
    fields = {"tokens": tokens, "temperature": temperature, **(extra or {})}
    return token_chunks.chunks({"hidden": hidden}, fields, mask, options.chunk_tokens, options.mesh_axes)


def _flat(chunk):
    """States ``[n, D]``, tokens and temperature ``[n]``, 1 where masked."""
    temperature = jnp.where(chunk["mask"], chunk["temperature"], 1.0).reshape(-1)
    return chunk["hidden"].reshape(-1, chunk["hidden"].shape[2]), chunk["tokens"].reshape(-1), temperature


def _logits(chunk, weight, options):
    """Tempered float32 logits ``[n, V]`` of a chunk, and where each token's own logit stands."""
    values = token_chunks.logits(
        chunk["hidden"], weight, chunk["mask"], chunk["temperature"], options.vocab_size, options.mesh_axes
    )
    column = jnp.arange(weight.shape[0], dtype=jnp.int32)[None, :]
    return values, column == chunk["tokens"].reshape(-1).astype(jnp.int32)[:, None]
