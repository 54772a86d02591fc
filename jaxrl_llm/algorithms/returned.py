"""What the functions of an algorithm give back, checked where it comes back: a wrong length would broadcast in silence,
and a memory that can't be saved would end the run at its first checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.interface import Algorithm, Objective, Role, Sequences
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Rows, TokenOutputs, ValueOutputs

_ROWS, _COLUMNS = 2, 8


def checked_memory(algorithm: Algorithm, part: str, memory: Any) -> dict[str, float]:
    """What `init` or `after_step` (the ``part``) returned, as plain floats that a checkpoint can hold.

    Raises:
      UserError: it is no flat dict of numbers.
    """
    try:
        plain = {key: float(value) for key, value in memory.items()} if isinstance(memory, Mapping) else None
    except (TypeError, ValueError):
        plain = None
    if plain is None or not all(isinstance(key, str) for key in plain):
        raise UserError(
            f"{algorithm.name}: {part} gives {memory!r:.120}; it must be a dict of numbers by name, which is what a "
            "checkpoint keeps of an algorithm."
        )
    return plain


def check_sequences(algorithm: Algorithm, prepared: Mapping[str, Any], trained: tuple[Role, ...]) -> None:
    """Raises UserError unless what `prepare` gave belongs to trained roles and all its lists are aligned."""
    names = [role.name for role in trained]
    for name, sequences in prepared.items():
        if name not in names or not isinstance(sequences, Sequences):
            raise UserError(
                f"{algorithm.name}: prepare gives {type(sequences).__name__} for {name!r}; it must give Sequences, or "
                f"a dict of them by trained role ({', '.join(names)})."
            )
        lengths = [len(tokens) for tokens in sequences.tokens]
        fields: dict[str, Any] = {}
        for field in (
            "loss_mask",
            "group",
            "partner",
            "advantages",
            "old_logprobs",
            "ref_logprobs",
            "sampler_logprobs",
        ):
            fields[field] = getattr(sequences, field)
        fields |= {f"extras[{field!r}]": values for field, values in sequences.extras.items()}
        for field, values in fields.items():
            if values is not None:
                _check_field(f"{algorithm.name}: {field} of the sequences that prepare gives", field, values, lengths)


def _check_field(where: str, field: str, values: Any, lengths: list[int]) -> None:
    if len(values) != len(lengths):
        raise UserError(f"{where} has {len(values)} entries for {len(lengths)} sequences.")
    if field in ("group", "partner"):
        return
    for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if np.shape(value) != (length,) and not (field.startswith("extras") and np.ndim(value) == 0):
            raise UserError(
                f"{where} has the shape {np.shape(value)} for sequence {index}, which has {length} tokens with the "
                "prompt's: one entry for each is needed."
            )


def check_losses(algorithm: Algorithm, options: Any) -> None:
    """Traces every loss on rows of zeros, on no device.

    Raises:
      UserError: one fails, or gives something else than an `Objective` of sums.
    """
    rows = Rows.zeros((_ROWS, _COLUMNS), algorithm.extras(options))
    zeros = np.zeros((_ROWS, _COLUMNS), np.float32)
    for role in algorithm.trained_roles(options):
        outputs: Any = TokenOutputs(zeros, zeros)  # pyright: ignore[reportArgumentType]
        if role.head == "values":
            outputs = ValueOutputs(zeros, zeros)  # pyright: ignore[reportArgumentType]
        if role.head == "both":
            outputs = outputs._replace(values=zeros)
        if role.head != "values" and algorithm.divergence(options) is not None:
            outputs = outputs._replace(divergence=zeros)
        where = f"{algorithm.name}: the loss of {role.name}"
        try:
            found = jax.eval_shape(functools.partial(algorithm.loss_of(role.name), options), outputs, rows)
        except Exception as error:
            raise UserError(f"{where} fails on rows of zeros: {type(error).__name__}: {error}") from error
        if not isinstance(found, Objective):
            raise UserError(f"{where} gives a {type(found).__name__}; it must give an Objective.")
        shapes: dict[str, Any] = {"total": found.total, **found.weighted, **found.maxima}
        for name, pair in found.counted.items():
            shapes |= {f"{name} (sum)": pair[0], f"{name} (count)": pair[1]}
        wrong = [f"{name} {leaf.shape}" for name, leaf in shapes.items() if leaf.shape != ()]
        if wrong:
            raise UserError(f"{where} gives {', '.join(wrong)}; all must be sums over the rows, numbers of shape ().")
