"""From a classifier's logits to one score per text: which label, and as what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.errors import UserError

OUTPUTS = ("logit", "probability")


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of a classifier.

    Attributes:
      names: by index.
      independent: each label is a yes or no of its own (``multi_label_classification``), not one choice among all.
    """

    names: tuple[str, ...]
    independent: bool = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Labels:
        """Labels of a ``config.json``, which has two where it doesn't say."""
        named = hf.get("id2label")
        if named:
            names = tuple(str(named[key]) for key in sorted(named, key=int))
        else:
            count = hf.get("num_labels")
            names = tuple(f"LABEL_{index}" for index in range(2 if count is None else count))
        return cls(names, independent=hf.get("problem_type") == "multi_label_classification")

    def check(self, label: int | None, output: str) -> None:
        """Refuses a choice that this classifier doesn't have.

        Raises:
          UserError: ``output`` is unknown, or ``label`` is missing or out of range.
        """
        if output not in OUTPUTS:
            raise UserError(f"The reward model's output is {output!r}; allowed: {', '.join(map(repr, OUTPUTS))}.")
        listed = ", ".join(f"{index} ({name})" for index, name in enumerate(self.names))
        if label is None and len(self.names) > 1:
            raise UserError(
                f"The reward model has {len(self.names)} labels: {listed}. Set label to the index of the one whose "
                "score is the reward."
            )
        if label is not None and not 0 <= label < len(self.names):
            raise UserError(f"The reward model's label is {label}, but its labels are {listed}. Set one of these.")

    def scores(self, logits: Float[Array, "N C"], label: int | None, output: str) -> Float[Array, " N"]:
        """One score per text, float32.

        ``logit`` is the log-odds of the label: the logit itself where it is the only one or independent of the
        others, else ``logit - logsumexp(the others)``. ``probability`` is the sigmoid of that, which for one choice
        among all is their softmax.
        """
        logits = logits.astype(jnp.float32)
        index = label or 0
        odds = logits[:, index]
        if len(self.names) > 1 and not self.independent:
            others = jnp.concatenate([logits[:, :index], logits[:, index + 1 :]], axis=1)
            odds = odds - jax.nn.logsumexp(others, axis=1)
        return jax.nn.sigmoid(odds) if output == "probability" else odds
