"""The specification: dense, float32, the whole [R, T, V]. For tests and tiny inputs."""

import jax
import jax.numpy as jnp

LEAST_TAIL = 1e-7


def token_divergence_reference(hidden, weight, teacher, mask, temperature, options):
    beta, vocab_size, _, weight_gradient, _ = options
    weight = weight if weight_gradient else jax.lax.stop_gradient(weight)
    mask = mask & (jnp.arange(mask.shape[1]) > 0)[None, :]
    log_p = _log_probabilities(hidden, weight, mask, temperature, vocab_size)
    if "weight" in teacher:
        log_q = _log_probabilities(teacher["hidden"], teacher["weight"], mask, temperature, vocab_size)
    else:
        log_p, log_q = _classes(log_p, teacher["ids"], teacher["logprobs"], mask, vocab_size)
    if beta == 0:
        divergence = _kl(log_q, log_p)
    elif beta == 1:
        divergence = _kl(log_p, log_q)
    else:
        log_m = jnp.log(beta * jnp.exp(log_q) + (1 - beta) * jnp.exp(log_p))
        divergence = beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)
    return jnp.where(mask, divergence, 0.0)


def _kl(log_a, log_b):
    """KL(a || b) over the last axis; what has no probability in a adds nothing."""
    there = log_a > -jnp.inf
    difference = jnp.where(there, log_a, 0) - jnp.where(there, log_b, 0)
    return jnp.where(there, jnp.exp(log_a) * difference, 0).sum(-1)


def _log_probabilities(hidden, weight, mask, temperature, vocab_size):
    """``[R, T, V]`` of the distribution that each token was drawn from."""
    previous = jnp.where(mask[:, :, None], jnp.roll(hidden, 1, axis=1), 0)
    logits = jnp.einsum(
        "rtd,vd->rtv", previous.astype(jnp.float32), weight[:vocab_size].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
    return jax.nn.log_softmax(logits / temperature[:, :, None], axis=-1)


def _classes(log_p, ids, logprobs, mask, vocab_size):
    """Log-probabilities ``[R, T, k + 1]`` of the candidates and the tail, the student's and the teacher's."""
    there = (ids >= 0) & (ids < vocab_size) & mask[:, :, None]
    one_hot = jax.nn.one_hot(jnp.where(there, ids, -1), vocab_size)  # [R, T, k, V], 0 where absent
    p = jnp.einsum("rtkv,rtv->rtk", one_hot, jnp.exp(log_p), precision=jax.lax.Precision.HIGHEST)
    p_tail = ((1 - one_hot.sum(2)) * jnp.exp(log_p)).sum(-1)
    q = jnp.where(there, jnp.exp(jnp.where(there, logprobs, 0)), 0)
    masses = []
    for candidates, tail in ((p, p_tail), (q, 1 - q.sum(-1))):
        tail = jnp.maximum(tail, LEAST_TAIL)[:, :, None]
        masses.append(jnp.concatenate([jnp.where(there, candidates, 1), tail], -1))
    there = jnp.concatenate([there, jnp.ones_like(there[:, :, :1])], -1)
    return tuple(jnp.where(there, jnp.log(mass), -jnp.inf) for mass in masses)
