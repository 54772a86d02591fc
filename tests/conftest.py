"""What every test runs under: the CPU as 8 devices, strict ranks, signatures checked at run time.

The environment is set before anything imports jax, which reads it once.
"""

import gc
import importlib.metadata
import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# Compiling is most of the suite's time, and what is compiled runs for a moment: a CPU's programs are made quickly, in a
# fifth of the time, rather than to be fast. JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles them as a run does.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if (
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    and importlib.metadata.version("jaxlib").startswith("0.10.")  # later ones have no such flag
    and "--xla_cpu_use_fusion_emitters" not in os.environ["XLA_FLAGS"]  # twice would be another key of the cache
):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach the network
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["MPLBACKEND"] = "Agg"
# The cache of what was compiled is on disk, so that a second run is fast; a variable moves it.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(tempfile.gettempdir()) / f"jaxrl_llm_test_cache_{os.getuid()}"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import cloudpickle
import pytest
from jaxtyping import install_import_hook

import tests

# Every annotation of the two packages is checked at each call: shapes, dtypes and plain types. As for a type
# checker, an int passes where a float is expected.
install_import_hook(
    ["jaxrl_llm", "jaxrl_kernels"], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

# Reward workers get a test's function itself. By name each would import the test's file for it, and with that jax.
cloudpickle.register_pickle_by_value(tests)


@pytest.fixture(autouse=True)
def programs_for_gpus(request):
    """Are compiled as they will run: a test reads what they hold and send."""
    if not hasattr(request.module, "gpu_compile"):
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")


HERE = pathlib.Path(__file__).parent
LONGEST = (
    "test_trainer.py",
    "decoding/test_engine.py",
    "test_update_meshes.py",
    "test_gpu_programs.py",
    "test_tiny_configurations.py",
    "test_staleness.py",
    "launch/test_several_processes.py",
    "test_placement.py",
    "kernels/test_gpu_compile.py",
    "models/test_decoder.py",
    "test_plan.py",
)
"""Files that take the longest, in whole minutes on a slow machine."""


def pytest_collection_modifyitems(items):
    """Long files come first: at the end one would leave the other processes without work."""
    place = {HERE / name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish():
    """What is imported stays, and tracing makes many objects that go by themselves: to look for cycles as often as
    Python does takes a fifth of a test's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
