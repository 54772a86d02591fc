"""JAX RL for LLMs."""
