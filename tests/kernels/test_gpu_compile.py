"""The kernels compiled for GPUs that are not here: lowered always, to machine code where the CUDA plugin is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxrl_kernels import gpu_compile
from jaxrl_kernels.paged_attention import api, pallas_triton

MISSING = gpu_compile.missing()
needs_plugin = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
PLAIN = {}
ALL = {"window": 100, "soft_cap": 5.0, "scale": 0.2}
HEAD_SIZES = (64, 80, 96, 128)
KERNELS = [
    *[("pallas_triton", dtype) for dtype in ("float32", "bfloat16", "float16")],
    *[("pallas_mosaic", dtype) for dtype in ("bfloat16", "float16")],
]


def shapes(dtype, head_size, *, batch=8, num_heads=8, num_kv_heads=2, page_size=16, num_pages=100, columns=65):
    """Arguments of a decode step's attention: 65 columns of 16 tokens make several parts of each row."""
    pool = jax.ShapeDtypeStruct((num_pages, page_size, num_kv_heads, head_size), dtype)
    return (
        jax.ShapeDtypeStruct((batch, num_heads, head_size), dtype),
        pool,
        pool,
        jax.ShapeDtypeStruct((batch, columns), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def attention(name, **options):
    return functools.partial(api.paged_attention, implementation=name, **options)


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all_options"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("name", "dtype"), KERNELS)
def test_lowers_for_h200(name, dtype, head_size, options):
    """Caught, on jax 0.12: the deprecation of Pallas's Triton backend not silenced."""
    text = gpu_compile.lower(attention(name, **options), *shapes(dtype, head_size))
    assert gpu_compile.kernel_targets(text) == (name.removeprefix("pallas_"),)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [("pallas_triton", 1), ("pallas_triton", 12), ("pallas_triton", 256), ("pallas_mosaic", 8), ("pallas_mosaic", 256)],
)
def test_lowers_with_other_pages(name, page_size):
    text = gpu_compile.lower(attention(name), *shapes("bfloat16", 128, page_size=page_size))
    assert gpu_compile.kernel_targets(text) == (name.removeprefix("pallas_"),)


def test_auto_lowers_to_the_kernel_on_a_gpu():
    """`auto` on the CPU of this process is `xla`; traced for an H200 it is the kernel, and says nothing of a CPU."""
    assert gpu_compile.kernel_targets(gpu_compile.lower(attention("auto"), *shapes("bfloat16", 128))) == ("triton",)
    assert gpu_compile.kernel_targets(gpu_compile.lower(attention("xla"), *shapes("bfloat16", 128))) == ()


def test_lowering_refuses_what_triton_refuses():
    """The check can fail: tiles that are no power of two, which interpretation runs without a word."""

    def odd_tile(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    from jax.experimental import pallas as pl

    def double(x):
        return pl.pallas_call(
            odd_tile,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=pallas_triton._compiler_params(4, 2),
        )(x)

    with pytest.raises(Exception, match="power of 2"):
        gpu_compile.lower(double, jax.ShapeDtypeStruct((24,), jnp.float32))


def test_missing_plugin_is_named(monkeypatch):
    monkeypatch.setattr(gpu_compile.importlib.util, "find_spec", lambda name: None)
    assert gpu_compile.missing() == (
        f"jax-cuda13-pjrt is not installed: pip install --no-deps jax-cuda13-pjrt=={jax.__version__}"
    )
    with pytest.raises(NotImplementedError, match="jax-cuda13-pjrt is not installed"):
        gpu_compile.devices()


@needs_plugin
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("pallas_triton", "float32", PLAIN),
        ("pallas_triton", "bfloat16", ALL),
        ("pallas_triton", "float16", PLAIN),
        ("pallas_mosaic", "bfloat16", ALL),
    ],
)
def test_compiles_for_h200(name, dtype, head_size, options):
    """One kernel, and temporaries of a fraction of what the gather of pages would take."""
    arguments = shapes(dtype, head_size)
    report = gpu_compile.compile(attention(name, **options), *arguments)
    assert report.kernels == (name.removeprefix("pallas_"),)
    gathered = 2 * 8 * 65 * 16 * 2 * head_size * jnp.dtype(dtype).itemsize
    assert report.temporary_bytes < gathered / 4
    pools = 2 * arguments[1].size * jnp.dtype(dtype).itemsize
    assert pools < report.argument_bytes < pools * 1.1


@needs_plugin
def test_compiles_again_beside_a_persistent_cache(tmp_path):
    """Caught: the cache left on; jax then stores the program and fails to load it."""
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        for _ in range(2):
            jax.clear_caches()
            assert gpu_compile.compile(attention("auto"), *shapes("bfloat16", 64)).kernels == ("triton",)
        assert not list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@needs_plugin
def test_compiles_for_a100():
    report = gpu_compile.compile(attention("auto"), *shapes("bfloat16", 128), chip=gpu_compile.A100)
    assert report.kernels == ("triton",)


@needs_plugin
def test_shared_memory_that_overflows_is_caught():
    """The check can fail: lowering lets this pass, the compiler doesn't."""
    wasteful = functools.partial(
        pallas_triton.paged_attention, scale=1.0, window=None, soft_cap=None, block_tokens=512, num_stages=6
    )
    arguments = shapes("bfloat16", 128)
    assert gpu_compile.kernel_targets(gpu_compile.lower(wasteful, *arguments)) == ("triton",)
    with pytest.raises(Exception, match=r"(?i)shared memory|RESOURCE_EXHAUSTED"):
        gpu_compile.compile(wasteful, *arguments)


@needs_plugin
@pytest.mark.parametrize("name", ["pallas_triton", "pallas_mosaic"])
def test_heads_split_over_eight_devices(name):
    """Manual over the tensor axis each device reads its own heads and its own part of the pool: no collective, no copy
    of a pool."""
    mesh = Mesh(np.array(gpu_compile.devices(8)), ("tensor",))
    heads, pages, whole = PartitionSpec(None, "tensor"), PartitionSpec(None, None, "tensor"), PartitionSpec()
    specs = heads, pages, pages, whole, whole
    step = jax.jit(jax.shard_map(attention(name), mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False))
    arguments = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(shapes("bfloat16", 128, num_heads=32, num_kv_heads=8, num_pages=4096), specs, strict=True)
    ]
    report = gpu_compile.compile(step, *arguments, mesh=mesh)
    assert report.kernels == (name.removeprefix("pallas_"),)
    assert not COLLECTIVE.search(report.text)
    pool_bytes = arguments[1].size * 2 // 8
    assert report.argument_bytes < 2.1 * pool_bytes and report.temporary_bytes < pool_bytes / 8


def test_automatic_sharding_is_refused_and_auto_avoids_it():
    """Over eight devices and outside of `shard_map` a kernel would gather the pools (all-gather, 16 times the memory of
    a device's own part). Caught: the axes of the mesh not looked at."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2, 4), ("data", "tensor"), abstract_device=device)
    arguments = shapes("bfloat16", 128)

    def trace(name, axis_names=None):
        function = attention(name)
        if axis_names is not None:
            function = jax.shard_map(
                function,
                in_specs=(PartitionSpec(),) * 5,
                out_specs=PartitionSpec(),
                axis_names=axis_names,
                check_vma=False,
            )
        return str(jax.jit(function).trace(*arguments).jaxpr)

    with use_abstract_mesh(mesh):
        with pytest.raises(ValueError, match=r"'pallas_triton' is not partitioned by XLA, .* axes data, tensor: make"):
            trace("pallas_triton")
        with pytest.raises(ValueError, match=r"'pallas_mosaic' is not partitioned by XLA, .* axes tensor: make"):
            trace("pallas_mosaic", {"data"})
        assert "pallas_call" not in trace("auto") and "pallas_call" not in trace("auto", {"data"})
        assert "pallas_call" in trace("auto", {"data", "tensor"})
