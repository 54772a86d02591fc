"""Dr. GRPO: GRPO without its two biases.

    A_i = r_i - mean(r_group)                     no division by the standard deviation: easy prompts count no more
    loss = sum_i sum_t l_{i,t} / (max_new_tokens · sequences)          a constant divisor: long answers count in full

arXiv:2503.20783. The loss is PPO's clipped one; `max_new_tokens` is the largest response length of the run.
"""

from __future__ import annotations

import dataclasses

from jaxrl_llm.algorithms import aggregation, grpo, on_policy
from jaxrl_llm.config import option


@dataclasses.dataclass(frozen=True)
class DrGRPOOptions(grpo.GRPOOptions):
    """Options of `algorithm` when its name is `dr_grpo`: those of `grpo` with other defaults."""

    loss_aggregation: str = option("seq-mean-token-sum-norm", "how token losses become one", choices=aggregation.MODES)
    advantage_normalization: str = option(
        "none", "divide the centred reward by the group's standard deviation, or not", choices=("std", "none")
    )


DR_GRPO = on_policy.algorithm("dr_grpo", DrGRPOOptions, grpo.advantages)
