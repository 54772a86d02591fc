"""Checks and times every kernel on the device at hand: ``python -m jaxrl_kernels.bench``."""
