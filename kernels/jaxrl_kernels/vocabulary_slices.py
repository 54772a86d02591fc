"""The vocabulary in slices, for kernels that make logits of a few of its entries at a time.

Where a mesh splits the vocabulary, each device walks over its own part: a slice is then one of every part, no slice
moves between devices, and what is added up over slices is added up over parts afterwards.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_kernels.token_chunks import MASKED, place, size_of

ALIGNED = 128
"""Entries that a slice's width is a multiple of where its largest width allows it: matrix units work in such tiles."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """How ``weight``, ``[V, D]``, is cut. The last slice of a part may begin within the one before it; what they share
    counts in the earlier one alone.

    Attributes:
      parts: into how many the mesh splits V.
      length: entries of a part.
      width: entries of a slice of a part.
      vocab_size: entries that count, of all parts; the others have the logit ``MASKED``.
      mesh_axes: as in `token_chunks.place`.
    """

    parts: int
    length: int
    width: int
    vocab_size: int
    mesh_axes: tuple | None

    @classmethod
    def of(cls, num_entries, vocab_size, most, mesh_axes):
        """Slices as even as they can be, of at most ``most`` entries of a part."""
        parts = size_of("vocabulary", mesh_axes)
        length = num_entries // parts
        even = -(-length // -(-length // most))
        aligned = -(-even // ALIGNED) * ALIGNED
        return cls(parts, length, aligned if aligned <= min(most, length) else even, vocab_size, mesh_axes)

    @property
    def count(self):
        """Slices of a part."""
        return -(-self.length // self.width)

    def split(self, weight):
        """``[V, D]`` as ``[P, L, D]``."""
        return place(weight.reshape(self.parts, self.length, -1), self.mesh_axes, "vocabulary", None, None)

    def join(self, weight):
        """``[P, L, D]`` as ``[V, D]``."""
        return place(weight.reshape(self.parts * self.length, -1), self.mesh_axes, "vocabulary", None)

    def read(self, weight, index):
        """One slice of ``[P, L, D]``: ``[P, w, D]``."""
        return jax.lax.dynamic_slice_in_dim(weight, self._start(index), self.width, axis=1)

    def add(self, weight, index, added):
        """``[P, L, D]`` with ``added``, ``[P, w, D]``, in one slice; 0 where an entry counts in another slice."""
        added = self.read(weight, index) + added
        return jax.lax.dynamic_update_slice_in_dim(weight, added, self._start(index), axis=1)

    def logits(self, rows, weight, index, temperature, tokens):
        """Tempered float32 logits ``[n, P, w]`` of one slice, and where each token's own one stands.

        Args:
          rows: ``[n, D]``.
          weight: the slice, ``[P, w, D]``.
          temperature, tokens: ``[n]``.
        """
        within = (self._start(index) + jnp.arange(self.width, dtype=jnp.int32))[None, :]
        entry = jnp.arange(self.parts, dtype=jnp.int32)[:, None] * self.length + within
        hits = entry[None] == tokens[:, None, None]
        values = jnp.einsum("nd,pvd->npv", rows, weight, preferred_element_type=jnp.float32)
        values = place(values, self.mesh_axes, "rows", "vocabulary", None) / temperature[:, None, None]
        if self.width * self.count == self.length and self.vocab_size == self.parts * self.length:
            return values, hits
        counts = (within >= index * self.width) & (entry < self.vocab_size)  # [P, w]
        return jnp.where(counts[None], values, MASKED), counts[None] & hits

    def _start(self, index):
        return jnp.minimum(index * self.width, self.length - self.width)
