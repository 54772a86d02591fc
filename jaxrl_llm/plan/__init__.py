"""``python -m jaxrl_llm.main plan``: what a run needs on devices that are not here; `command.py` is its start."""
