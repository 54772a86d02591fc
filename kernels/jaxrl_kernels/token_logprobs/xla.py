"""Chunked projection in plain XLA: the production path on every backend so far.

Each row's counted tokens are moved to its front, so that the chunks behind the longest row hold none and are
skipped at run time. Forward keeps only log-probability and entropy; backward computes a chunk's logits again and
uses their closed-form gradient::

    z = h W' / temperature,  p = softmax(z),  l = log p[y],  H = -sum p log p
    dl/dz_j = 1[j = y] - p_j                 dH/dz_j = -p_j (log p_j + H)

The gradient of the weight is added up over chunks in float32, whatever the dtype of the weight; that of a constant
weight is left out of the loop.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

MASKED = -1e30  # finite, so that 0 * MASKED is 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def token_logprobs_xla(hidden, weight, tokens, mask, temperature, vocab_size, chunk_tokens, mesh_axes, weight_gradient):
    outputs, _ = _forward(
        hidden, weight, tokens, mask, temperature, vocab_size, chunk_tokens, mesh_axes, weight_gradient
    )
    return outputs


def _forward(hidden, weight, tokens, mask, temperature, vocab_size, chunk_tokens, mesh_axes, weight_gradient):
    del weight_gradient
    weight = _place(weight, mesh_axes, "vocabulary", None)
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
        return index + 1, _if_used(index < num_used, mesh_axes, compute, lambda: (nothing, nothing))

    _, (logprobs, entropy) = jax.lax.scan(one, jnp.int32(0), chunks)
    outputs = restore(logprobs), restore(entropy)
    return outputs, (hidden, weight, tokens, mask, temperature, *outputs)


def _backward(vocab_size, chunk_tokens, mesh_axes, weight_gradient, saved, cotangents):
    hidden, weight, tokens, mask, temperature, logprobs, entropy = saved
    d_logprobs, d_entropy = cotangents
    extra = {"logprob": logprobs, "entropy": entropy, "d_logprob": d_logprobs, "d_entropy": d_entropy}
    weight = _place(weight, mesh_axes, "vocabulary", None)
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
            if d_weight is None:
                return d_hidden, None
            rows = chunk["hidden"].reshape(-1, hidden.shape[2])
            added = jnp.einsum("nv,nd->vd", d_logits, rows, preferred_element_type=jnp.float32)
            return d_hidden, d_weight + added

        def skip(d_weight):
            return jnp.zeros(chunk["hidden"].shape, weight.dtype), d_weight

        d_hidden, d_weight = _if_used(index < num_used, mesh_axes, compute, skip, d_weight)
        return (index + 1, d_weight), d_hidden

    start = (jnp.int32(0), jnp.zeros(weight.shape, jnp.float32) if weight_gradient else None)
    (_, d_weight), d_hidden = jax.lax.scan(one, start, chunks)
    d_previous = restore(d_hidden)  # [R, T, D], at the token it predicts
    d_hidden = jnp.roll(d_previous, -1, axis=1)  # column 0 predicts nothing and is 0, so nothing wraps around
    d_weight = None if d_weight is None else d_weight.astype(weight.dtype)
    return d_hidden.astype(hidden.dtype), d_weight, None, None, jnp.zeros_like(temperature)


token_logprobs_xla.defvjp(_forward, _backward)


def _chunks(hidden, tokens, mask, temperature, chunk_tokens, mesh_axes, extra=None):
    """Counted tokens first in each row, cut into chunks ``[C, R, c, ...]``.

    Returns the chunks by name, how many of them hold a counted token, and the way back to ``[R, T, ...]``.
    """
    num_rows, num_tokens = tokens.shape
    width = max(1, min(num_tokens, chunk_tokens // num_rows))
    num_chunks = -(-num_tokens // width)
    mask = mask & (jnp.arange(num_tokens) > 0)[None, :]
    order = jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)  # [R, T]
    num_used = -(-mask.sum(1).max() // width)

    def cut(value, index):
        value = jnp.take_along_axis(value, index.reshape(index.shape + (1,) * (value.ndim - 2)), axis=1)
        padding = [(0, 0), (0, num_chunks * width - num_tokens)] + [(0, 0)] * (value.ndim - 2)
        value = jnp.pad(value, padding).reshape(num_rows, num_chunks, width, *value.shape[2:])
        return _place(jnp.moveaxis(value, 1, 0), mesh_axes, None, "rows", *[None] * (value.ndim - 2))

    def restore(value):
        value = jnp.moveaxis(value, 0, 1).reshape(num_rows, num_chunks * width, *value.shape[3:])
        place = jnp.argsort(order, axis=1)  # where each token went
        return jnp.take_along_axis(value, place.reshape(place.shape + (1,) * (value.ndim - 2)), axis=1)

    fields = {"tokens": tokens, "mask": mask, "temperature": temperature, **(extra or {})}
    chunks = {name: cut(value, order) for name, value in fields.items()}
    states = cut(hidden, jnp.maximum(order - 1, 0))  # the state that predicts a token stands before it
    chunks["hidden"] = jnp.where(chunks["mask"][..., None], states, 0)  # NaN at a masked place must not spread
    return chunks, num_used, restore


def _if_used(used, mesh_axes, compute, skip, *operands):
    """`compute` where the chunk holds a counted token, else `skip`; both give the same for a chunk without any.

    XLA:CPU may run a collective inside a conditional and one outside it in another order on each device, and then
    waits for ever (seen on jax 0.10.2 with 8 devices). So several CPU devices compute every chunk.
    """
    simulated = mesh_axes is not None and jax.default_backend() == "cpu" and _mesh_size() > 1
    return compute(*operands) if simulated else jax.lax.cond(used, compute, skip, *operands)


def _mesh_size():
    return jax.sharding.get_abstract_mesh().size


def _place(value, mesh_axes, *kinds):
    """Constrains dimensions of the kind 'rows' or 'vocabulary' to the mesh axes that split them; no-op without."""
    if mesh_axes is None:
        return value
    names = dict(zip(("rows", "vocabulary"), mesh_axes, strict=True))
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*(names.get(kind) for kind in kinds)))


def _logits(chunk, weight, vocab_size, mesh_axes):
    """Tempered float32 logits ``[n, V]`` of a chunk, and where each token's own logit stands."""
    rows = chunk["hidden"].reshape(-1, weight.shape[1])
    rows = _place(rows, mesh_axes, "rows", None)
    logits = jnp.einsum("nd,vd->nv", rows, weight, preferred_element_type=jnp.float32)
    logits = _place(logits, mesh_axes, "rows", "vocabulary")
    temperature = jnp.where(chunk["mask"], chunk["temperature"], 1.0).reshape(-1)
    logits = logits / temperature[:, None]
    column = jnp.arange(weight.shape[0], dtype=jnp.int32)[None, :]
    if vocab_size < weight.shape[0]:
        logits = jnp.where(column < vocab_size, logits, MASKED)
    return logits, column == chunk["tokens"].reshape(-1).astype(jnp.int32)[:, None]
