"""Entry point: checks shapes, chooses the implementation, which is never replaced silently."""

import jax
import jax.numpy as jnp

from jaxrl_kernels.token_logprobs.reference import token_logprobs_reference
from jaxrl_kernels.token_logprobs.xla import Options, token_logprobs_xla

IMPLEMENTATIONS = {"xla": token_logprobs_xla, "reference": token_logprobs_reference}


def token_logprobs(
    hidden,
    weight,
    tokens,
    mask,
    temperature,
    *,
    vocab_size=None,
    chunk_tokens=1024,
    vocab_chunk=0,
    mesh_axes=None,
    weight_gradient=True,
    implementation="auto",
):
    """``logprobs[r, t] = log softmax(hidden[r, t - 1] @ weight.T / temperature)[tokens[r, t]]`` and its entropy.

    Differentiable in ``hidden`` and, with ``weight_gradient``, in ``weight``; the temperature is a constant (its
    gradient is zero).

    Args:
      hidden: ``[R, T, D]``; values at masked places are never used, NaN included.
      weight: ``[V, D]``; may be sharded over V.
      tokens: int ``[R, T]``.
      mask: bool ``[R, T]``; True where the token counts. Column 0 has no predecessor and never counts.
      temperature: above 0, a scalar or ``[R, T]``.
      vocab_size: rows of ``weight`` beyond it only pad the array and have probability 0; None counts all.
      chunk_tokens: number of tokens of all rows together whose logits exist at one time.
      vocab_chunk: entries of the vocabulary whose logits exist at one time; where the vocabulary is split, of each
        device's part. 0: all. Less memory and the same values up to the order of sums.
      mesh_axes: ``(axes that split R, axis that splits V)`` of the mesh in context (``jax.set_mesh``): chunks and
        logits are then kept split so, and the weight is gathered over all other axes. None leaves it to XLA.
      weight_gradient: False takes ``weight`` as a constant: nothing of its size is computed in the backward pass.
      implementation: ``auto`` (``xla``), ``xla`` or ``reference``.

    Returns:
      ``(logprobs, entropy)``, float32 ``[R, T]`` in nats, 0 where masked.
    """
    if hidden.ndim != 3 or weight.ndim != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(f"hidden must be [R, T, D] and weight [V, D]; got {hidden.shape} and {weight.shape}")
    if tokens.shape != hidden.shape[:2] or mask.shape != hidden.shape[:2]:
        raise ValueError(f"tokens and mask must be {hidden.shape[:2]}; got {tokens.shape} and {mask.shape}")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be bool; got {mask.dtype}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}")
    if vocab_chunk < 0:
        raise ValueError(f"vocab_chunk must be 0, for the whole vocabulary at once, or above; got {vocab_chunk}")
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(f"vocab_size must be in [1, {weight.shape[0]}], the rows of weight; got {vocab_size}")
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; known are auto, {', '.join(IMPLEMENTATIONS)}")
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    if temperature.ndim not in (0, 2):
        raise ValueError(f"temperature must be a scalar or {tokens.shape}; got {temperature.shape}")
    temperature = jnp.broadcast_to(temperature, tokens.shape)
    options = Options(vocab_size, chunk_tokens, vocab_chunk, mesh_axes, weight_gradient)
    return IMPLEMENTATIONS[name](hidden, weight, tokens, mask, temperature, options)
