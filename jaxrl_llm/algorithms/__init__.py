"""The algorithms, in one visible dict. A new one is a file beside this one and a line here."""

from __future__ import annotations

from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.interface import Algorithm
from jaxrl_llm.algorithms.sft import SFT

ALGORITHMS: dict[str, Algorithm] = {"grpo": GRPO, "sft": SFT}
