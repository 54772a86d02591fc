"""Which implementation of row and prefill attention runs: the rule of `auto`, and explicit choices that can't run."""

import logging

import jax
import jax.numpy as jnp
import pytest

from jaxrl_kernels import choice, gpu_compile
from jaxrl_kernels.device import Device
from jaxrl_kernels.paged_attention import api as paged
from jaxrl_kernels.prefill_attention import api as prefill
from jaxrl_kernels.prefill_attention.cases import CASES as PREFILL_CASES
from jaxrl_kernels.prefill_attention.cases import inputs as prefill_inputs
from jaxrl_kernels.row_attention import api as rows
from jaxrl_kernels.row_attention.cases import CASES as ROW_CASES
from jaxrl_kernels.row_attention.cases import inputs as row_inputs

CPU = Device("cpu", "cpu")
T4 = Device("gpu", "Tesla T4", (7, 5), 40)
A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108)
H200 = Device("gpu", "NVIDIA H200", (9, 0), 132)
B200 = Device("gpu", "NVIDIA B200", (10, 0), 148)
AMD = Device("gpu", "AMD Instinct MI300X", None, 304)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "axes", "expected", "reason"),
    [
        (CPU, "float32", 64, (), "xla", "cpu: blocks in plain XLA"),
        (T4, "float16", 64, (), "xla", "needs compute capability 8.0 (Ampere) or more, and Tesla T4 has 7.5"),
        (AMD, "bfloat16", 128, (), "xla", "knows no compute capability of 'AMD Instinct MI300X'"),
        (A100, "float32", 80, (), "pallas_triton", "by rule and not yet by measurement"),
        (H200, "bfloat16", 128, (), "pallas_triton", "by rule and not yet by measurement"),
        (B200, "float16", 96, (), "pallas_triton", "by rule and not yet by measurement"),
        (H200, "bfloat16", 24, (), "xla", "multiple of 16, not 24"),
        (H200, "bfloat16", 128, ("data",), "xla", "over the mesh axes data: make them manual by jax.shard_map"),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_rule_of_auto(device, dtype, head_size, axes, expected, reason):
    found = choice.choose_for(device, dtype, head_size, axes)
    assert found.name == expected and reason in found.reason
    assert "choose" not in found.reason  # the reasons of explicit choices say what to choose; here it is chosen


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (CPU, "needs an NVIDIA GPU, and the program is for cpu; choose 'xla' or 'auto'"),
        (T4, "has 7.5; choose 'xla'"),
        (AMD, "not an NVIDIA GPU that it knows; choose 'xla'"),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_why_not(device, message):
    assert message in choice.why_not("pallas_triton", device, "bfloat16", 128)
    assert choice.why_not("xla", device, "bfloat16", 128) is None


def test_explicit_choice_never_falls_back():
    """Caught: the check of the device left out of either."""
    arrays = [jnp.asarray(value) for value in row_inputs(ROW_CASES[0]).values()]
    with pytest.raises(
        ValueError, match="row attention 'pallas_triton' needs an NVIDIA GPU, and the program is for cpu"
    ):
        jax.jit(lambda *a: rows.row_attention(*a, implementation="pallas_triton"))(*arrays)
    arrays = list(map(jnp.asarray, prefill_inputs(PREFILL_CASES[0]).values()))[:5]
    with pytest.raises(
        ValueError, match="prefill attention 'pallas_triton' needs an NVIDIA GPU, and the program is for"
    ):
        jax.jit(lambda *a: prefill.prefill_attention(*a, implementation="pallas_triton"))(*arrays)


def test_choice_follows_the_device_that_is_traced_for():
    for api, here in ((rows, "xla_tiles"), (prefill, "xla")):
        assert api.choose() == here
        with gpu_compile.target(gpu_compile.A100):
            assert api.choose() == "pallas_triton" and api.choose(jnp.bfloat16, 24) == "xla"


def test_auto_takes_xla_for_keys_of_another_dtype():
    """Queries in float32 over a cache in bfloat16 are no error on a GPU either. Caught: the dtypes not compared."""
    struct = jax.ShapeDtypeStruct
    q, ids = struct((8, 2, 64), jnp.float32), struct((8,), jnp.int32)
    pool = struct((3, 4, 2, 64), jnp.bfloat16)
    arguments = (q, q, q, ids, ids, (pool, pool), struct((4, 2), jnp.int32))
    assert gpu_compile.kernel_targets(gpu_compile.lower(prefill.prefill_attention, *arguments)) == ()
    assert gpu_compile.kernel_targets(gpu_compile.lower(prefill.prefill_attention, *arguments[:5])) == ("triton",)
    wide, narrow = (struct((1, 8, 2, 64), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    fields = (struct((1, 8), jnp.int32),) * 2
    for keys, kernels in ((narrow, ()), (wide, ("triton",))):
        text = gpu_compile.lower(rows.row_attention, wide, keys, keys, *fields)
        assert gpu_compile.kernel_targets(text) == kernels


def test_auto_says_what_it_took_and_why(caplog):
    """Once for each kernel and choice, however many layers are traced. Caught: any of the three that says nothing; a
    line for each layer; the reason of the device where the dtypes decide."""
    choice.tell.cache_clear()
    struct, ids = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((8,), jnp.int32)
    wide, narrow = (struct((8, 2, 64), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    pages = struct((3, 4, 2, 64), jnp.float32)
    row = [struct((1, *x.shape), x.dtype) for x in (wide, wide, wide, ids, ids)]

    def layers(*arguments):
        return [rows.row_attention(*arguments) for _ in range(2)]

    with caplog.at_level(logging.INFO, "jaxrl_kernels"):
        jax.eval_shape(layers, *row)
        jax.eval_shape(prefill.prefill_attention, wide, wide, wide, ids, ids)
        jax.eval_shape(prefill.prefill_attention, wide, narrow, narrow, ids, ids)
        jax.eval_shape(paged.paged_attention, wide, pages, pages, struct((8, 2), jnp.int32), ids)
        gpu_compile.lower(layers, *row)
    cpu = "xla (cpu: blocks in plain XLA; the kernel is for NVIDIA GPUs)"
    told = [record.getMessage() for record in caplog.records]
    assert told[:4] == [
        "row attention: xla_tiles (cpu: tiles in plain XLA; the kernel is for NVIDIA GPUs)",
        f"prefill attention: {cpu}",
        "prefill attention: xla (queries, keys and pages differ in dtype)",
        "paged attention: xla (cpu: the page gather by XLA; the kernels are for NVIDIA GPUs)",
    ]
    assert len(told) == 5 and told[4].startswith("row attention: pallas_triton (NVIDIA H200: ")
