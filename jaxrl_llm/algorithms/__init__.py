"""The algorithms, in one visible dict. A new one is a file beside this one and a line here, or a file of a user's."""

from __future__ import annotations

from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.interface import Algorithm
from jaxrl_llm.algorithms.sft import SFT

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (GRPO, SFT)}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or that of a user's file, ``path.py:its_name``.

    Raises:
      UserError: there is none, or it is none.
    """
    from jaxrl_llm.algorithms.user_file import load  # not at the top: it needs the configuration, which needs this

    if ":" in name:
        return load(name)
    return ALGORITHMS[name]
