"""Chunked projection in plain XLA: the production path on every backend so far.

Chunks without a counted token are skipped at run time (`token_chunks`). Forward keeps only log-probability and
entropy; backward computes a chunk's logits again and uses their closed-form gradient::

    z = h W' / temperature,  p = softmax(z),  l = log p[y],  H = -sum p log p
    dl/dz_j = 1[j = y] - p_j                 dH/dz_j = -p_j (log p_j + H)

The gradient of the weight is added up over chunks in float32, whatever the dtype of the weight.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrl_kernels import token_chunks


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def token_logprobs_xla(hidden, weight, tokens, mask, temperature, vocab_size, chunk_tokens, mesh_axes):
    outputs, _ = _forward(hidden, weight, tokens, mask, temperature, vocab_size, chunk_tokens, mesh_axes)
    return outputs


def _forward(hidden, weight, tokens, mask, temperature, vocab_size, chunk_tokens, mesh_axes):
    weight = token_chunks.place(weight, mesh_axes, "vocabulary", None)
    chunks, num_used, restore = _chunks(hidden, tokens, mask, temperature, chunk_tokens, mesh_axes)

    def one(index, chunk):
        def compute():
            logits, hits = _logits(chunk, weight, vocab_size, mesh_axes)  # [n, V]
            peak = logits.max(-1)
            exponentials = jnp.exp(logits - peak[:, None])
            total = exponentials.sum(-1)
            log_total = jnp.log(total) + peak
            mean_logit = (exponentials * logits).sum(-1) / total
            logprob = jnp.where(hits, logits, 0.0).sum(-1) - log_total
            counted = chunk["mask"].reshape(-1)
            kept = (logprob, log_total - mean_logit)
            logprob, entropy = (jnp.where(counted, value, 0.0).reshape(chunk["mask"].shape) for value in kept)
            return logprob, entropy

        nothing = jnp.zeros(chunk["mask"].shape, jnp.float32)
        return index + 1, token_chunks.if_used(index < num_used, mesh_axes, compute, lambda: (nothing, nothing))

    _, (logprobs, entropy) = jax.lax.scan(one, jnp.int32(0), chunks)
    outputs = restore(logprobs), restore(entropy)
    return outputs, (hidden, weight, tokens, mask, temperature, *outputs)


def _backward(vocab_size, chunk_tokens, mesh_axes, saved, cotangents):
    hidden, weight, tokens, mask, temperature, logprobs, entropy = saved
    d_logprobs, d_entropy = cotangents
    extra = {"logprob": logprobs, "entropy": entropy, "d_logprob": d_logprobs, "d_entropy": d_entropy}
    weight = token_chunks.place(weight, mesh_axes, "vocabulary", None)
    chunks, num_used, restore = _chunks(hidden, tokens, mask, temperature, chunk_tokens, mesh_axes, extra)

    def one(carry, chunk):
        index, d_weight = carry

        def compute(d_weight):
            logits, hits = _logits(chunk, weight, vocab_size, mesh_axes)
            flat = {name: chunk[name].reshape(-1) for name in (*extra, "mask", "temperature")}
            chosen_logit = jnp.where(hits, logits, 0.0).sum(-1)
            log_total = jnp.where(flat["mask"], chosen_logit - flat["logprob"], 0.0)  # finite where masked, too
            log_p = logits - log_total[:, None]
            p = jnp.exp(log_p)
            scale = jnp.where(flat["mask"], 1.0 / flat["temperature"], 0.0)
            of_logprob = (flat["d_logprob"] * scale)[:, None]
            of_entropy = (flat["d_entropy"] * scale)[:, None]
            d_logits = jnp.where(hits, of_logprob, 0.0) - p * (
                of_logprob + of_entropy * (log_p + flat["entropy"][:, None])
            )
            d_logits = d_logits.astype(weight.dtype)
            d_hidden = jnp.einsum("nv,vd->nd", d_logits, weight).reshape(chunk["hidden"].shape)
            rows = chunk["hidden"].reshape(-1, hidden.shape[2])
            added = jnp.einsum("nv,nd->vd", d_logits, rows, preferred_element_type=jnp.float32)
            return d_hidden, d_weight + added

        def skip(d_weight):
            return jnp.zeros(chunk["hidden"].shape, weight.dtype), d_weight

        d_hidden, d_weight = token_chunks.if_used(index < num_used, mesh_axes, compute, skip, d_weight)
        return (index + 1, d_weight), d_hidden

    start = (jnp.int32(0), jnp.zeros(weight.shape, jnp.float32))
    (_, d_weight), d_hidden = jax.lax.scan(one, start, chunks)
    d_hidden = token_chunks.before_each(restore(d_hidden))  # [R, T, D]
    return d_hidden.astype(hidden.dtype), d_weight.astype(weight.dtype), None, None, jnp.zeros_like(temperature)


token_logprobs_xla.defvjp(_forward, _backward)


def _chunks(hidden, tokens, mask, temperature, chunk_tokens, mesh_axes, extra=None):
    fields = {"tokens": tokens, "temperature": temperature, **(extra or {})}
    return token_chunks.chunks({"hidden": hidden}, fields, mask, chunk_tokens, mesh_axes)


def _logits(chunk, weight, vocab_size, mesh_axes):
    """Tempered float32 logits ``[n, V]`` of a chunk, and where each token's own logit stands."""
    values = token_chunks.logits(chunk["hidden"], weight, chunk["mask"], chunk["temperature"], vocab_size, mesh_axes)
    column = jnp.arange(weight.shape[0], dtype=jnp.int32)[None, :]
    return values, column == chunk["tokens"].reshape(-1).astype(jnp.int32)[:, None]
