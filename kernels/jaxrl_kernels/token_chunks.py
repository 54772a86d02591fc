"""Tokens of packed rows in chunks, for kernels that make logits of a few tokens at a time.

Each row's counted tokens are moved to its front, so that the chunks behind the longest row hold none and are skipped
at run time.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

MASKED = -1e30
"""Logit and log-probability of what does not count: finite, so that 0 * MASKED is 0."""


def chunks(states, fields, mask, chunk_tokens, mesh_axes):
    """Counted tokens first in each row, cut into chunks ``[C, R, c, ...]``.

    Args:
      states: hidden states ``[R, T, D]`` by name. The state that predicts a token stands one place before it, and
        comes with that token; where masked it is 0, since NaN at a masked place must not spread.
      fields: values ``[R, T, ...]`` of the tokens themselves, by name.
      mask: which tokens count, of those that have a predecessor.

    Returns:
      The chunks by name (``mask`` among them), how many of them hold a counted token, and the way back of a value
      from ``[C, R, c, ...]`` to ``[R, T, ...]``.
    """
    num_rows, num_tokens = mask.shape
    width = max(1, min(num_tokens, chunk_tokens // num_rows))
    num_chunks = -(-num_tokens // width)
    mask = mask & (jnp.arange(num_tokens) > 0)[None, :]
    order = jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)  # [R, T]
    num_used = -(-mask.sum(1).max() // width)

    def cut(value, index):
        value = jnp.take_along_axis(value, index.reshape(index.shape + (1,) * (value.ndim - 2)), axis=1)
        padding = [(0, 0), (0, num_chunks * width - num_tokens)] + [(0, 0)] * (value.ndim - 2)
        value = jnp.pad(value, padding).reshape(num_rows, num_chunks, width, *value.shape[2:])
        return place(jnp.moveaxis(value, 1, 0), mesh_axes, None, "rows", *[None] * (value.ndim - 2))

    def restore(value):
        value = jnp.moveaxis(value, 0, 1).reshape(num_rows, num_chunks * width, *value.shape[3:])
        back = jnp.argsort(order, axis=1)  # where each token went
        return jnp.take_along_axis(value, back.reshape(back.shape + (1,) * (value.ndim - 2)), axis=1)

    cut_fields = {name: cut(value, order) for name, value in {**fields, "mask": mask}.items()}
    before = jnp.maximum(order - 1, 0)
    counted = cut_fields["mask"][..., None]
    return (
        cut_fields | {name: jnp.where(counted, cut(value, before), 0) for name, value in states.items()},
        num_used,
        restore,
    )


def before_each(d_states):
    """Gradients ``[R, T, D]`` that stand at the tokens, moved to the states that predict them."""
    return jnp.roll(d_states, -1, axis=1)  # column 0 predicts nothing and is 0, so nothing wraps around


def if_used(used, mesh_axes, compute, skip, *operands):
    """`compute` where the chunk holds a counted token, else `skip`; both give the same for a chunk without any.

    XLA:CPU may run a collective inside a conditional and one outside it in another order on each device, and then
    waits for ever (seen on jax 0.10.2 with 8 devices). So several CPU devices compute every chunk.
    """
    simulated = mesh_axes is not None and jax.default_backend() == "cpu" and _mesh_size() > 1
    return compute(*operands) if simulated else jax.lax.cond(used, compute, skip, *operands)


def _mesh_size():
    return jax.sharding.get_abstract_mesh().size


def place(value, mesh_axes, *kinds):
    """Constrains dimensions of the kind 'rows' or 'vocabulary' to the mesh axes that split them; no-op without."""
    if mesh_axes is None:
        return value
    names = _by_kind(mesh_axes)
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*(names.get(kind) for kind in kinds)))


def size_of(kind, mesh_axes):
    """Into how many parts the mesh splits a dimension of the kind 'rows' or 'vocabulary'."""
    names = None if mesh_axes is None else _by_kind(mesh_axes)[kind]
    names = (names,) if isinstance(names, str) else names or ()
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in names)


def _by_kind(mesh_axes):
    return dict(zip(("rows", "vocabulary"), mesh_axes, strict=True))


def logits(states, weight, mask, temperature, vocab_size, mesh_axes):
    """Tempered float32 logits ``[n, V]`` of a chunk's states ``[R, c, D]``; ``MASKED`` from `vocab_size` on.

    Args:
      mask, temperature: ``[R, c]``; where masked the temperature is not looked at.
    """
    rows = place(states.reshape(-1, weight.shape[1]), mesh_axes, "rows", None)
    values = jnp.einsum("nd,vd->nv", rows, weight, preferred_element_type=jnp.float32)
    values = place(values, mesh_axes, "rows", "vocabulary")
    values = values / jnp.where(mask, temperature, 1.0).reshape(-1)[:, None]
    if vocab_size < weight.shape[0]:
        column = jnp.arange(weight.shape[0], dtype=jnp.int32)[None, :]
        values = jnp.where(column < vocab_size, values, MASKED)
    return values
