"""Compiled programs kept on disk, so that a second run of the same shapes starts at once."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform

import jax


def enable_compilation_cache() -> pathlib.Path:
    """Turns jax's cache on for this process and returns its folder. Call it before the first program is compiled.

    ``JAX_COMPILATION_CACHE_DIR`` chooses another folder; ``JAX_ENABLE_COMPILATION_CACHE=false`` turns it off.
    """
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    folder = chosen or str(_default_folder())
    jax.config.update("jax_compilation_cache_dir", folder)
    # By default only programs that took a second are kept; a run has hundreds that take less and add up.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return pathlib.Path(folder)


def _default_folder() -> pathlib.Path:
    """A folder of this kind of CPU: a home directory may be shared by machines that can't run each other's code."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    cpu_info = pathlib.Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return base / "jaxrl_llm" / "xla" / hashlib.sha256(features.encode()).hexdigest()[:12]
