"""A teacher on devices of its own: it reads the policy's rows there, and what it says of them comes to the policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import update
from jaxrl_llm.algorithms.interface import Divergence
from jaxrl_llm.crossing import cross
from jaxrl_llm.sharding import TRAINING, batch_sharding
from jaxrl_llm.types import MiniBatch, Params
from jaxrl_llm.update import Forward, TeacherReading


class ApartTeacher:
    """Brings final hidden states ``[M, R, T, D]``, or the likeliest tokens where the divergence is of these alone
    (``top_k``). The teacher's output weight crosses once: a teacher never changes.

    Args:
      forward: the teacher's.
      mesh, policy: where it is, and where the update is.
    """

    def __init__(self, forward: Forward, divergence: Divergence, mesh: Mesh, policy: Mesh):
        self.forward, self.mesh, self.policy = forward, mesh, policy
        self._read = update.make_reading(forward, divergence, mesh)
        self._with_weight = not divergence.top_k
        self._weight: jax.Array | None = None

    def read(self, params: Params, batch: MiniBatch) -> TeacherReading:
        """What the teacher says of the policy's rows, on the policy's devices."""
        said = self._read(params, update.put_rows(batch, self.mesh), np.int32(batch.num_micro_batches))
        if self._with_weight and self._weight is None:
            self._weight = self._brought_weight(params)
        leaves, structure = jax.tree.flatten(said)
        brought = cross(leaves, [batch_sharding(self.policy, ndim=4, row_dimension=1)] * len(leaves))
        return dataclasses.replace(jax.tree.unflatten(structure, brought), weight=self._weight)

    def _brought_weight(self, params: Params) -> jax.Array:
        weight: Any = self.forward.decoder.output_weight(params).astype(self.forward.dtype)
        (brought,) = cross([weight], [TRAINING.sharding(self.policy, ("vocab", "embed"))])
        return brought
