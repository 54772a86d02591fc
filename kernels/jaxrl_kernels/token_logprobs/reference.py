"""The specification: dense, float32, the whole [R, T, V]. For tests and tiny inputs."""

import jax
import jax.numpy as jnp


def token_logprobs_reference(hidden, weight, tokens, mask, temperature, options):
    weight = weight if options.weight_gradient else jax.lax.stop_gradient(weight)
    mask = mask & (jnp.arange(mask.shape[1]) > 0)[None, :]
    previous = jnp.roll(hidden, 1, axis=1)
    previous = jnp.where(mask[:, :, None], previous, 0)
    logits = jnp.einsum(
        "rtd,vd->rtv", previous.astype(jnp.float32), weight[: options.vocab_size].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
    log_probabilities = jax.nn.log_softmax(logits / temperature[:, :, None], axis=-1)  # [R, T, V]
    chosen = jnp.take_along_axis(log_probabilities, tokens[:, :, None], axis=-1)[:, :, 0]
    entropy = -(jnp.exp(log_probabilities) * log_probabilities).sum(-1)
    return jnp.where(mask, chosen, 0.0), jnp.where(mask, entropy, 0.0)
