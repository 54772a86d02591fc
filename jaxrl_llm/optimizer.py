"""AdamW with warm-up and a schedule, by optax. Master parameters and moments are float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.host_memory import rests_on_host
from jaxrl_llm.models.platform import compiles_for_cpu
from jaxrl_llm.optimizer_pieces import step_in_pieces


def learning_rate(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Learning rate of update k (from 0): linear warm-up from ``peak / warmup_steps``, then constant,
    cosine or linear decay.

    The decay ends at ``final_fraction`` of the peak with update `total_updates`. Each role counts its own updates: a
    policy that rests while its critic warms up begins its warm-up afterwards, as in verl, and its decay ends with its
    last update (verl's, given the steps of the whole run, ends earlier on its curve).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = max(total_updates - warmup, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    else:
        after = optax.linear_schedule(peak, peak * config.final_fraction, rest)
    if not warmup:
        return after
    # Update 0 already learns a little: a first update of rate 0 would waste a rollout.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup])


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """The transformation after clipping (`apply` clips, since it also reports the norm)."""
    schedule = learning_rate(config, total_updates)
    if config.name == "sgd":
        return optax.sgd(schedule)
    return optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay)


def apply(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    opt_state: Any,
    params: Any,
    clip_norm: float,
    denominator: Float[Array, ""] | float = 1.0,
) -> tuple[Any, Any, Float[Array, ""], Bool[Array, ""]]:
    """One update from the gradient of the whole optimizer batch, ``gradients / denominator``; in pieces where the
    optimizer's state rests in the host's memory.

    The norm is global: over every parameter and every shard, after accumulation. A norm that is not finite
    leaves parameters and optimizer as they were (the caller stops the run); NaN is never written.

    Args:
      gradients: float32 sums over the batch. Dividing and clipping is one factor, and one pass over them.
      clip_norm: largest norm; 0 = no clipping.

    Returns:
      New parameters and optimizer state, the norm before clipping, and whether the update was made.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients))) / denominator
    finite = jnp.isfinite(norm)
    scale = jnp.float32(1.0)
    if clip_norm:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
    whole = not any(rests_on_host(leaf) for leaf in jax.tree.leaves(opt_state))

    def step(gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        gradients = jax.tree.map(lambda leaf: leaf * (scale / denominator), gradients)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax mixes both
            updates, new_state = optimizer.update(gradients, opt_state, params)
            new_params = optax.apply_updates(params, updates)

        new_params = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_params, params)
        made = finite & (not whole or _known_after(new_params))
        return new_params, jax.tree.map(lambda new, old: jnp.where(made, new, old), new_state, opt_state)

    new_params, new_state = (step if whole else functools.partial(step_in_pieces, step))(gradients, opt_state, params)
    return new_params, new_state, norm, finite


def _known_after(params: Any) -> Bool[Array, ""] | bool:
    """True; on one CPU XLA learns it when these parameters are there.

    The new parameters and the new moments are both computed from the old moments. XLA:CPU does not see that one may
    wait for the other, and copies the moments when the program begins: twice the model's size, held while activations
    are at their most. Fusions of several outputs, as on GPUs, read them once.
    """
    if not compiles_for_cpu() or jax.sharding.get_abstract_mesh().size > 1:
        return True
    first = sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(params))
    return (first == first) | jnp.isnan(first)
