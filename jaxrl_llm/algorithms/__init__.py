"""The algorithms, in one visible dict. A new one is a file beside this one and a line here, or a file of a user's."""

from __future__ import annotations

from jaxrl_llm.algorithms.cispo import CISPO
from jaxrl_llm.algorithms.dapo import DAPO
from jaxrl_llm.algorithms.distillation import DISTILLATION
from jaxrl_llm.algorithms.dpo import DPO, ONLINE_DPO
from jaxrl_llm.algorithms.dr_grpo import DR_GRPO
from jaxrl_llm.algorithms.gdpo import GDPO
from jaxrl_llm.algorithms.gmpo import GMPO
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.gspo import GSPO
from jaxrl_llm.algorithms.interface import Algorithm
from jaxrl_llm.algorithms.ippo import IPPO
from jaxrl_llm.algorithms.kto import KTO
from jaxrl_llm.algorithms.pass_at_k import PASS_AT_K
from jaxrl_llm.algorithms.ppo import PPO
from jaxrl_llm.algorithms.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE
from jaxrl_llm.algorithms.remax import REMAX
from jaxrl_llm.algorithms.reward_model import REWARD_MODEL_TRAINING
from jaxrl_llm.algorithms.rloo import RLOO
from jaxrl_llm.algorithms.sapo import SAPO
from jaxrl_llm.algorithms.sft import SFT

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        PPO,
        GRPO,
        DR_GRPO,
        DAPO,
        RLOO,
        REINFORCE_PLUS_PLUS,
        REINFORCE_PLUS_PLUS_BASELINE,
        REMAX,
        GSPO,
        GMPO,
        CISPO,
        SAPO,
        PASS_AT_K,
        GDPO,
        IPPO,
        DISTILLATION,
        ONLINE_DPO,
        DPO,
        KTO,
        REWARD_MODEL_TRAINING,
        SFT,
    )
}


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or that of a user's file, ``path.py:its_name``.

    Raises:
      UserError: there is none, or it is none.
    """
    from jaxrl_llm.algorithms.user_file import load  # not at the top: it needs the configuration, which needs this

    if ":" in name:
        return load(name)
    return ALGORITHMS[name]
