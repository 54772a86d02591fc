"""What is installed, and that importing it costs nothing."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import jaxrl_llm

ROOT = pathlib.Path(__file__).parent.parent


def run_python(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_kernels_is_a_source_root_and_no_package():
    """A package named `kernels` would hide the one that transformers looks for, and break its imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels" / "jaxrl_kernels" / "__init__.py").exists()


def test_the_wheel_holds_exactly_the_two_packages_and_the_assets(tmp_path: pathlib.Path):
    """Caught: `where = ["."]` alone (no jaxrl_kernels); assets missing from package-data."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxrl_llm", "kernels", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"jaxrl_llm", "jaxrl_kernels"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    for package, folder in (("jaxrl_llm", ROOT / "jaxrl_llm"), ("jaxrl_kernels", ROOT / "kernels" / "jaxrl_kernels")):
        files = {f"{package}/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()}
        missing = {name for name in files if "__pycache__" not in name} - set(names)
        assert not missing, f"not in the wheel: {sorted(missing)}"


def test_only_a_notebooks_reward_function_is_pickled():
    """It goes to workers of this process. What other processes and files say is read as JSON, numbers and texts."""
    users = {
        path.relative_to(ROOT).as_posix()
        for folder in ("jaxrl_llm", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(import|from) (pickle|cloudpickle|dill|marshal|shelve)\b", path.read_text(), re.MULTILINE)
    }
    assert users == {"jaxrl_llm/rewards/pool.py", "jaxrl_llm/rewards/worker.py"}


def test_importing_the_packages_imports_no_jax():
    """Reward workers and --help depend on it. Caught: RLTrainer imported at the top of the package."""
    code = (
        "import sys, jaxrl_llm, jaxrl_kernels; print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_importing_everything_starts_no_backend():
    """Caught: a jnp constant at module level."""
    code = """
import pkgutil, importlib, jaxrl_llm, jaxrl_kernels
for package in (jaxrl_llm, jaxrl_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__") and ".bench" not in module.name:
            importlib.import_module(module.name)
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run_python(code) == "False"


def test_transformers_still_finds_its_models():
    """What a package named `kernels` on the path would break."""
    assert run_python("from transformers import LlamaConfig; print('ok')") == "ok"


def test_the_version_is_that_of_the_installed_package():
    assert jaxrl_llm.__version__ == importlib.metadata.version("jaxrl-llm")


def test_every_exported_name_is_there():
    for name in jaxrl_llm.__all__:
        assert getattr(jaxrl_llm, name).__name__ == name
    assert set(jaxrl_llm.__all__) <= set(dir(jaxrl_llm))


def test_available_backends_are_measured(monkeypatch):
    """Caught: a wrong implementation reported as available because it runs."""
    from jaxrl_kernels.paged_attention import api

    def wrong(q, *_, **__):
        return q

    def unable(*_, **__):
        raise ValueError("needs a GPU")

    monkeypatch.setitem(api.IMPLEMENTATIONS, "wrong", wrong)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "unable", unable)
    found = jaxrl_llm.get_available_backends()
    assert found["platforms"] == {"cpu": 8}
    assert found["attention"]["xla"] is True and found["attention"]["auto"] == "xla"
    assert found["attention"]["wrong"].startswith("differs from the reference")
    assert found["attention"]["unable"] == "ValueError: needs a GPU"
    assert found["host_offload"] == {"pinned_host": True, "unpinned_host": True}


@pytest.mark.parametrize(("error", "told"), [(0.0, True), (0.1, "differs from the reference by")])
def test_the_hopper_kernel_is_tried_in_the_dtype_that_it_takes(monkeypatch, error, told):
    """As on an H200, with the reference in the kernel's place behind its own checks. Caught: float32, which it refuses;
    one that is wrong by more than bfloat16's rounding reported as available."""
    from jaxrl_kernels.device import Device
    from jaxrl_kernels.paged_attention import api, pallas_mosaic, reference

    dtypes = []

    def kernel(q, *arrays, num_cores, **options):
        dtypes.append(q.dtype.name)
        assert pallas_mosaic.why_not_shape(q.dtype, q.shape[-1], arrays[0].shape[1]) is None
        return reference.paged_attention(q, *arrays, **options) + error

    monkeypatch.setattr(api, "target_device", lambda: Device("gpu", "NVIDIA H200", (9, 0), 132))
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"reference": reference.paged_attention, "pallas_mosaic": kernel})
    found = jaxrl_llm.get_available_backends()["attention"]["pallas_mosaic"]
    assert dtypes == ["bfloat16"], found
    assert found is True if told is True else found.startswith(told)
