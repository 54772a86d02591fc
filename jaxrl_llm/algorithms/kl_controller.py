"""The weight of the KL penalty between steps: one float, kept in the algorithm's memory and so saved with the run."""

from __future__ import annotations

import math

KL_CONTROLLERS = ("fixed", "adaptive")

ERROR_LIMIT = 0.2
"""The relative error counts up to this: one update changes the weight by at most ``0.2 n_steps / horizon``."""


def next_kl_coef(
    kl_coef: float,
    current_kl: float,
    *,
    kl_controller: str = "fixed",
    target_kl: float = 0.1,
    horizon: int = 10_000,
    n_steps: int = 1,
) -> float:
    """The weight for the next step.

    ``fixed``: unchanged. ``adaptive`` (Ziegler et al., arXiv:1909.08593, section 2.2)::

        kl_coef *= 1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon

    Args:
      current_kl: mean KL to the reference in this step, in nats, in the unit that `target_kl` is meant in (here per
        token, as in verl; Ziegler et al. take it per sequence). One that is not finite (no token was trained)
        changes nothing.
      n_steps: samples this step has used, which is the unit of `horizon`.

    Raises:
      ValueError: an unknown controller; a target or horizon that is not positive; more than ``5 horizon`` samples in
        a step, which would turn the weight's sign.
    """
    if kl_controller not in KL_CONTROLLERS:
        raise ValueError(f"kl_controller is {kl_controller!r}; it is one of {', '.join(KL_CONTROLLERS)}")
    if kl_controller == "fixed":
        return kl_coef
    if target_kl <= 0 or horizon <= 0:
        raise ValueError(f"the adaptive KL controller needs target_kl ({target_kl}) and horizon ({horizon}) above 0")
    if ERROR_LIMIT * n_steps >= horizon:
        raise ValueError(
            f"horizon={horizon} is too short for {n_steps} samples a step: one update would make kl_coef 0 or "
            f"negative. Set it to several times {n_steps}."
        )
    if not math.isfinite(current_kl):
        return kl_coef
    error = min(max(current_kl / target_kl - 1, -ERROR_LIMIT), ERROR_LIMIT)
    return kl_coef * (1 + error * n_steps / horizon)
