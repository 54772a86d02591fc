"""Entry points: check shapes, choose the implementation, which is never replaced silently.

``beta`` says which divergence of the teacher's distribution Q and the student's P, as in GKD (arXiv:2306.13649):

* 0: forward KL, ``KL(Q || P)``.
* 1: reverse KL, ``KL(P || Q)``.
* between: generalised Jensen-Shannon, ``beta KL(Q || M) + (1 - beta) KL(P || M)`` with ``M = beta Q + (1 - beta) P``.
  Its limits at 0 and 1 are 0, and not the two above.

Only the student learns: the teacher's arrays, the mask and the temperature are constants (their gradient is zero).
"""

import jax
import jax.numpy as jnp

from jaxrl_kernels.token_divergence.reference import token_divergence_reference
from jaxrl_kernels.token_divergence.xla import token_divergence_xla

IMPLEMENTATIONS = {"xla": token_divergence_xla, "reference": token_divergence_reference}


def token_divergence(
    student_hidden,
    student_weight,
    teacher_hidden,
    teacher_weight,
    mask,
    temperature=1.0,
    *,
    beta=1.0,
    vocab_size=None,
    chunk_tokens=1024,
    mesh_axes=None,
    weight_gradient=True,
    implementation="auto",
):
    """Divergence at each token of the distributions that it was drawn from, over the whole vocabulary.

    ``P[r, t] = softmax(student_hidden[r, t - 1] @ student_weight.T / temperature)``, and Q likewise the teacher's.
    Differentiable in ``student_hidden`` and, with ``weight_gradient``, in ``student_weight``. It is not multiplied by
    the temperature's square.

    Args:
      student_hidden: ``[R, T, D]``; values at masked places are never used, NaN included (the teacher's too).
      student_weight: ``[V, D]``; may be sharded over V.
      teacher_hidden: ``[R, T, E]`` of the same tokens; E may be another width.
      teacher_weight: ``[U, E]``: row i is the same token as row i of ``student_weight``.
      mask: bool ``[R, T]``; True where the token counts. Column 0 has no predecessor and never counts.
      temperature: above 0, a scalar or ``[R, T]``; divides both models' logits.
      beta: in [0, 1], a Python number; see the module's text.
      vocab_size: rows of either weight beyond it only pad the array and have probability 0. None where both have
        equally many and all count.
      chunk_tokens: number of tokens of all rows together whose logits exist at one time (both models').
      mesh_axes: ``(axes that split R, axis that splits V)``, as in `token_logprobs`.
      weight_gradient: False takes ``student_weight`` as a constant: nothing of its size is computed in the backward
        pass.
      implementation: ``auto`` (``xla``), ``xla`` or ``reference``.

    Returns:
      float32 ``[R, T]`` in nats, 0 where masked.
    """
    if teacher_hidden.ndim != 3 or teacher_weight.ndim != 2 or teacher_hidden.shape[2] != teacher_weight.shape[1]:
        raise ValueError(
            "teacher_hidden must be [R, T, E] and teacher_weight [U, E]; "
            f"got {teacher_hidden.shape} and {teacher_weight.shape}"
        )
    if teacher_hidden.shape[:2] != student_hidden.shape[:2]:
        raise ValueError(
            "student_hidden and teacher_hidden must be of the same tokens; "
            f"got {student_hidden.shape[:2]} and {teacher_hidden.shape[:2]}"
        )
    rows = student_weight.shape[0], teacher_weight.shape[0]
    if vocab_size is None and rows[0] != rows[1]:
        raise ValueError(
            f"student_weight has {rows[0]} rows and teacher_weight {rows[1]}: give the vocab_size that they share"
        )
    teacher = {"hidden": teacher_hidden, "weight": teacher_weight}
    return _call(
        student_hidden, student_weight, teacher, mask, temperature,
        beta, vocab_size, min(rows), chunk_tokens, mesh_axes, weight_gradient, implementation,
    )  # fmt: skip


def top_k_divergence(
    student_hidden,
    student_weight,
    teacher_ids,
    teacher_logprobs,
    mask,
    temperature=1.0,
    *,
    beta=1.0,
    vocab_size=None,
    chunk_tokens=1024,
    mesh_axes=None,
    weight_gradient=True,
    implementation="auto",
):
    """The same from the teacher's most probable tokens alone, for a teacher whose logits are not here.

    At each token the vocabulary becomes k + 1 classes: every candidate for itself, and all other tokens together
    (the tail). The divergence is that of the two distributions over these classes. It is at most the one over the
    whole vocabulary, and 0 only where the student has the teacher's probability of every candidate; how the student
    spreads the tail's mass does not matter. The student's masses, the tail's included, come from its logits over the
    whole vocabulary, the teacher's tail is ``1 - sum(exp(teacher_logprobs))``. Of either a tail below 1e-7 counts as
    1e-7, which bounds the divergence where rounding leaves the teacher none.

    Args:
      teacher_ids: int ``[R, T, k]``, candidates for token t itself; distinct. One below 0, or from ``vocab_size`` on,
        is absent (a teacher that gave fewer than k), and its mass belongs to the tail.
      teacher_logprobs: ``[R, T, k]``, nats, of the teacher's full distribution at the same temperature. Anything,
        -inf and NaN included, may stand where the candidate is absent or the token masked.

    The rest is as in `token_divergence`, the gradient too.
    """
    if teacher_ids.ndim != 3 or teacher_ids.shape[:2] != student_hidden.shape[:2] or not teacher_ids.shape[2]:
        raise ValueError(
            f"teacher_ids must be [R, T, k] with [R, T] = {student_hidden.shape[:2]} and k of at least 1; "
            f"got {teacher_ids.shape}"
        )
    if teacher_logprobs.shape != teacher_ids.shape:
        raise ValueError(f"teacher_logprobs must be {teacher_ids.shape} as teacher_ids; got {teacher_logprobs.shape}")
    teacher = {"ids": teacher_ids.astype(jnp.int32), "logprobs": teacher_logprobs.astype(jnp.float32)}
    return _call(
        student_hidden, student_weight, teacher, mask, temperature,
        beta, vocab_size, student_weight.shape[0], chunk_tokens, mesh_axes, weight_gradient, implementation,
    )  # fmt: skip


def _call(
    hidden, weight, teacher, mask, temperature,
    beta, vocab_size, most, chunk_tokens, mesh_axes, weight_gradient, implementation,
):  # fmt: skip
    """Checks what both have in common. ``most`` is the largest vocabulary that the arrays allow."""
    if hidden.ndim != 3 or weight.ndim != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(
            f"student_hidden must be [R, T, D] and student_weight [V, D]; got {hidden.shape} and {weight.shape}"
        )
    if mask.shape != hidden.shape[:2] or mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be bool {hidden.shape[:2]}; got {mask.dtype} {mask.shape}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1]: 0 is forward KL, 1 reverse KL; got {beta}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}")
    vocab_size = most if vocab_size is None else vocab_size
    if not 0 < vocab_size <= most:
        raise ValueError(f"vocab_size must be in [1, {most}], the rows of the weights; got {vocab_size}")
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}; known are auto, {', '.join(IMPLEMENTATIONS)}")
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    if temperature.ndim not in (0, 2):
        raise ValueError(f"temperature must be a scalar or {mask.shape}; got {temperature.shape}")
    temperature = jnp.broadcast_to(temperature, mask.shape)
    teacher = jax.tree.map(jax.lax.stop_gradient, teacher)
    options = (float(beta), vocab_size, chunk_tokens, weight_gradient, mesh_axes)
    return IMPLEMENTATIONS[name](hidden, weight, teacher, mask, temperature, options)
