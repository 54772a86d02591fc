"""Chunked projections in plain XLA.

The logits of both models exist for one chunk of tokens at a time; chunks without a counted token are skipped at run
time (`token_chunks`). Forward keeps nothing but the divergences; backward computes a chunk's logits again and uses
the closed-form gradient. With the student's classes p, the teacher's q, and D a sum over classes::

    g = dD / d log p      forward KL: -q      reverse KL: p (log p - log q)      between: (1 - beta) p (log p - log m)
    dD/dz = g - p sum(g)  where a class is one logit z

(terms of g that are a constant times p drop out of the second line, and are left out of the first). A class of several
logits, the tail of the top-k form, spreads its g over them like the student spreads its mass.

The gradient of the weight is added up over chunks in float32, whatever the dtype of the weight; that of a constant
weight is left out of the loop.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxrl_kernels import token_chunks
from jaxrl_kernels.token_chunks import MASKED

LEAST_TAIL = 1e-7


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def token_divergence_xla(hidden, weight, teacher, mask, temperature, options):
    return _forward(hidden, weight, teacher, mask, temperature, options)[0]


def _forward(hidden, weight, teacher, mask, temperature, options):
    mesh_axes = options[-1]
    weight = token_chunks.place(weight, mesh_axes, "vocabulary", None)
    chunks, num_used, restore, compare = _prepare(hidden, weight, teacher, mask, temperature, options)

    def one(index, chunk):
        def compute():
            divergence, _ = compare(chunk)
            return jnp.where(chunk["mask"], divergence.reshape(chunk["mask"].shape), 0.0)

        nothing = jnp.zeros(chunk["mask"].shape, jnp.float32)
        return index + 1, token_chunks.if_used(index < num_used, mesh_axes, compute, lambda: nothing)

    _, divergence = jax.lax.scan(one, jnp.int32(0), chunks)
    return restore(divergence), (hidden, weight, teacher, mask, temperature)


def _backward(options, saved, cotangent):
    hidden, weight, teacher, mask, temperature = saved
    weight_gradient, mesh_axes = options[-2:]
    extra = {"cotangent": cotangent}
    weight = token_chunks.place(weight, mesh_axes, "vocabulary", None)
    chunks, num_used, restore, compare = _prepare(hidden, weight, teacher, mask, temperature, options, extra)

    def one(carry, chunk):
        index, d_weight = carry

        def compute(d_weight):
            _, d_logits = compare(chunk)
            counted = chunk["mask"].reshape(-1, 1)
            scale = chunk["cotangent"].reshape(-1, 1) / jnp.where(counted, chunk["temperature"].reshape(-1, 1), 1.0)
            d_logits = jnp.where(counted, scale * d_logits, 0.0).astype(weight.dtype)
            d_hidden = jnp.einsum("nv,vd->nd", d_logits, weight).reshape(chunk["student"].shape)
            if d_weight is None:
                return d_hidden, None
            rows = chunk["student"].reshape(-1, hidden.shape[2])
            added = jnp.einsum("nv,nd->vd", d_logits, rows, preferred_element_type=jnp.float32)
            return d_hidden, d_weight + added

        def skip(d_weight):
            return jnp.zeros(chunk["student"].shape, weight.dtype), d_weight

        d_hidden, d_weight = token_chunks.if_used(index < num_used, mesh_axes, compute, skip, d_weight)
        return (index + 1, d_weight), d_hidden

    start = (jnp.int32(0), jnp.zeros(weight.shape, jnp.float32) if weight_gradient else None)
    (_, d_weight), d_hidden = jax.lax.scan(one, start, chunks)
    d_hidden = token_chunks.before_each(restore(d_hidden))
    d_weight = None if d_weight is None else d_weight.astype(weight.dtype)
    return d_hidden.astype(hidden.dtype), d_weight, None, None, None


token_divergence_xla.defvjp(_forward, _backward)


def _prepare(hidden, weight, teacher, mask, temperature, options, extra=None):
    """Chunks, how many are used, the way back, and ``compare``: a chunk's divergences ``[n]`` and their gradient
    ``[n, V]`` with respect to the student's tempered logits."""
    beta, vocab_size, chunk_tokens, _, mesh_axes = options
    states = {"student": hidden}
    fields = {"temperature": temperature, **(extra or {})}
    if "weight" in teacher:
        teacher_weight = token_chunks.place(teacher["weight"], mesh_axes, "vocabulary", None)
        states["teacher"] = teacher["hidden"]
    else:
        fields |= {"ids": teacher["ids"], "logprobs": teacher["logprobs"]}
    chunks, num_used, restore = token_chunks.chunks(states, fields, mask, chunk_tokens, mesh_axes)

    def compare(chunk):
        tempered = chunk["mask"], chunk["temperature"], vocab_size, mesh_axes
        logits = token_chunks.logits(chunk["student"], weight, *tempered)
        if "weight" not in teacher:
            return _compare_classes(logits, chunk, vocab_size, beta)
        teacher_logits = token_chunks.logits(chunk["teacher"], teacher_weight, *tempered)
        missing = max(0, logits.shape[1] - teacher_logits.shape[1])  # the two may be padded differently
        teacher_logits = jnp.pad(teacher_logits, ((0, 0), (0, missing)), constant_values=MASKED)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        log_q = jax.nn.log_softmax(teacher_logits[:, : logits.shape[1]], axis=-1)
        terms, slopes = _divergence(log_p, log_q, beta)
        return terms.sum(-1), slopes - jnp.exp(log_p) * slopes.sum(-1, keepdims=True)

    return chunks, num_used, restore, compare


def _divergence(log_p, log_q, beta):
    """Each class's share of the divergence, and its g (see the module's text)."""
    if beta == 0:
        q = jnp.exp(log_q)
        return q * (log_q - log_p), -q
    p = jnp.exp(log_p)
    if beta == 1:
        terms = p * (log_p - log_q)
        return terms, terms
    log_m = jnp.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    slopes = (1 - beta) * p * (log_p - log_m)
    return beta * jnp.exp(log_q) * (log_q - log_m) + slopes, slopes


def _compare_classes(logits, chunk, vocab_size, beta):
    """The candidates and the tail. Absent candidates have probability 0 on both sides and add nothing."""
    num_columns = logits.shape[1]
    ids = chunk["ids"].reshape(logits.shape[0], -1)
    logprobs = chunk["logprobs"].reshape(ids.shape)
    there = (ids >= 0) & (ids < vocab_size)
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    column = jnp.where(there, ids, num_columns)  # beyond the last: dropped by a scatter
    is_candidate = jnp.zeros(logits.shape, bool).at[row, column].set(True, mode="drop")

    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    log_tail = jax.nn.logsumexp(jnp.where(is_candidate, MASKED, logits), axis=-1, keepdims=True) - log_total
    candidates = jnp.take_along_axis(logits, jnp.where(there, ids, 0), axis=1) - log_total
    log_least = math.log(LEAST_TAIL)
    log_p = jnp.concatenate([jnp.where(there, candidates, MASKED), jnp.maximum(log_tail, log_least)], axis=1)

    logprobs = jnp.where(there, logprobs, MASKED)
    teacher_mass = jnp.minimum(jax.nn.logsumexp(logprobs, axis=-1, keepdims=True), math.log1p(-LEAST_TAIL))
    log_q = jnp.concatenate([logprobs, jnp.log(-jnp.expm1(teacher_mass))], axis=1)

    terms, slopes = _divergence(log_p, log_q, beta)
    of_tail = jnp.where(log_tail > log_least, slopes[:, -1:], 0.0)
    of_candidates = jnp.where(there, slopes[:, :-1], 0.0)
    total = of_candidates.sum(-1, keepdims=True) + of_tail
    log_probabilities = logits - log_total
    d_logits = jnp.where(is_candidate, 0.0, of_tail * jnp.exp(jnp.minimum(log_probabilities - log_tail, 0.0)))
    d_logits = d_logits - jnp.exp(log_probabilities) * total
    return terms.sum(-1), d_logits.at[row, column].add(of_candidates, mode="drop")
