"""Reinforcement learning of large language models in JAX.

Importing the package imports neither jax nor anything else that is slow: reward workers and ``--help`` depend on it.
What is exported loads at its first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.backends import get_available_backends
    from jaxrl_llm.config import default_config
    from jaxrl_llm.errors import RunStopped, UserError
    from jaxrl_llm.generation import chat, generate
    from jaxrl_llm.rl_trainer import RLTrainer

# transformers is here for tokenizers and configurations: its advice that models need PyTorch only worries.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__all__ = ["RLTrainer", "RunStopped", "UserError", "chat", "default_config", "generate", "get_available_backends"]

_MODULES = {
    "RLTrainer": "jaxrl_llm.rl_trainer",
    "RunStopped": "jaxrl_llm.errors",
    "UserError": "jaxrl_llm.errors",
    "chat": "jaxrl_llm.generation",
    "default_config": "jaxrl_llm.config",
    "generate": "jaxrl_llm.generation",
    "get_available_backends": "jaxrl_llm.backends",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("jaxrl-llm")
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxrl_llm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
