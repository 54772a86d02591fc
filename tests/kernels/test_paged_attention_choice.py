"""Which implementation of paged decode attention runs: the rule of `auto`, and explicit choices that can't run."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_kernels import gpu_compile
from jaxrl_kernels.device import Device, capability_of_kind, target_device
from jaxrl_kernels.paged_attention import api, cases

CPU = Device("cpu", "cpu")
T4 = Device("gpu", "Tesla T4", (7, 5), 40)
A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108)
L4 = Device("gpu", "NVIDIA L4", (8, 9), 58)
H200 = Device("gpu", "NVIDIA H200", (9, 0), 132)
B200 = Device("gpu", "NVIDIA B200", (10, 0), 148)
AMD = Device("gpu", "AMD Instinct MI300X", None, 304)
TPU = Device("tpu", "TPU v5e", None, 1)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "expected", "reason"),
    [
        (CPU, "float32", 64, "xla", "cpu: the page gather"),
        (TPU, "bfloat16", 128, "xla", "tpu: the page gather"),
        (T4, "float16", 64, "xla", "needs compute capability 8.0 (Ampere) or more, and Tesla T4 has 7.5"),
        (AMD, "bfloat16", 128, "xla", "knows no compute capability of 'AMD Instinct MI300X'"),
        (A100, "bfloat16", 128, "pallas_triton", "by rule and not yet by measurement"),
        (L4, "float32", 80, "pallas_triton", "by rule and not yet by measurement"),
        (H200, "bfloat16", 128, "pallas_triton", "'pallas_mosaic' can run too"),
        (B200, "bfloat16", 128, "pallas_triton", "by rule and not yet by measurement"),
        (H200, "bfloat16", 24, "xla", "multiple of 16, not 24"),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_rule_of_auto(device, dtype, head_size, expected, reason):
    choice = api.choose_for(device, dtype, head_size, 16)
    assert choice.name == expected and reason in choice.reason
    assert "choose" not in choice.reason  # the reasons of explicit choices say what to choose; here it is chosen
    assert ("can run too" in choice.reason) == (device is H200 and head_size == 128)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("pallas_triton", CPU, "needs an NVIDIA GPU, and the program is for cpu; choose 'xla' or 'auto'"),
        ("pallas_triton", T4, "has 7.5; choose 'xla'"),
        ("pallas_mosaic", CPU, "needs an NVIDIA GPU, and the program is for cpu; choose 'xla' or 'auto'"),
        ("pallas_mosaic", T4, "needs compute capability 9.x (Hopper), the only one with wgmma instructions, and Tesla"),
        ("pallas_mosaic", A100, "has 8.0; choose 'pallas_triton'"),
        ("pallas_mosaic", B200, "has 10.0; choose 'pallas_triton'"),
        ("pallas_mosaic", AMD, "has an unknown one; choose 'xla'"),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_why_not(name, device, message):
    """Caught: Blackwell let through to wgmma; Turing let through to Triton."""
    assert message in api.why_not(name, device, "bfloat16", 128, 16)
    assert api.why_not("xla", device, "bfloat16", 128, 16) is None


@pytest.mark.parametrize("name", ["pallas_triton", "pallas_mosaic"])
def test_explicit_choice_never_falls_back(name):
    """Caught: the check of the device left out of `paged_attention`."""
    arrays = jax.tree.map(jnp.asarray, cases.inputs(cases.CASES[0]))
    with pytest.raises(ValueError, match=f"paged attention '{name}' needs an NVIDIA GPU, and the program is for cpu"):
        jax.jit(lambda a: api.paged_attention(**a, implementation=name))(arrays)


def test_choice_follows_the_device_that_is_traced_for():
    """A mesh of GPUs in context decides, though this process has a CPU only. Caught: the default device asked alone."""
    assert target_device() == CPU and api.choose() == "xla"
    with gpu_compile.target(gpu_compile.H200):
        assert target_device() == H200 and api.choose() == "pallas_triton"
        assert api.choose(jnp.bfloat16, 24) == "xla"
    with gpu_compile.target(gpu_compile.A100):
        assert target_device() == A100
    assert target_device() == CPU


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA GeForce RTX 3090", (8, 6)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("Tesla T4", (7, 5)),
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("AMD Instinct MI300X", None),
    ],
)
def test_compute_capability_by_name(kind, expected):
    """NVIDIA's table of compute capabilities."""
    assert capability_of_kind(kind) == expected
