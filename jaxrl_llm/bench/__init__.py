"""Benchmarks: ``python -m jaxrl_llm.bench``."""
