"""The kernels compiled for GPUs that are not here: lowered always, to machine code where the CUDA plugin is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxrl_kernels import gpu_compile, triton_tiles
from jaxrl_kernels.paged_attention import api, pallas_triton
from jaxrl_kernels.prefill_attention.api import prefill_attention
from jaxrl_kernels.row_attention.api import row_attention
from jaxrl_kernels.token_divergence.api import token_divergence, top_k_divergence
from jaxrl_kernels.token_logprobs.api import token_logprobs

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
            compiler_params=triton_tiles.compiler_params(4, 2),
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


# --- row and prefill attention ----------------------------------------------------------------------------------------


def row_shapes(dtype, head_size, *, rows=2, tokens=300, num_heads=8, num_kv_heads=2):
    struct, fields = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    keys = struct((rows, tokens, num_kv_heads, head_size), dtype)
    window = struct((), jnp.int32)
    return struct((rows, tokens, num_heads, head_size), dtype), keys, keys, fields, fields, fields, window


def row_step(implementation="pallas_triton", **options):
    """Training attention with its gradient: three kernels."""

    def loss(q, k, v, *fields):
        out = row_attention(q, k, v, *fields, implementation=implementation, **options)
        return out.astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def prefill_shapes(dtype, head_size, *, tokens=300, num_heads=8, num_kv_heads=2, num_pages=100, columns=33):
    struct = jax.ShapeDtypeStruct
    keys, ids = struct((tokens, num_kv_heads, head_size), dtype), struct((tokens,), jnp.int32)
    pool = struct((num_pages, 16, num_kv_heads, head_size), dtype)
    return (
        struct((tokens, num_heads, head_size), dtype),
        *(keys, keys, ids, ids, (pool, pool)),
        struct((4, columns), jnp.int32),
    )


def prefill(**options):
    return functools.partial(prefill_attention, implementation="pallas_triton", **options)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_row_and_prefill_attention_lower_for_h200(dtype, head_size):
    text = gpu_compile.lower(row_step(soft_cap=5.0), *row_shapes(dtype, head_size))
    assert gpu_compile.kernel_targets(text) == ("triton",) * 3
    text = gpu_compile.lower(prefill(**ALL), *prefill_shapes(dtype, head_size))
    assert gpu_compile.kernel_targets(text) == ("triton",)


def largest_array(pattern, text) -> int:
    return max(int(np.prod([int(n) for n in re.findall(r"\d+", shape)])) for shape in re.findall(pattern, text))


LONG = 4096


def test_no_array_of_a_row_squared_is_lowered():
    """Forward and backward at 4096 tokens: nothing is larger than the queries. The reference, for comparison, is."""
    arguments = row_shapes("bfloat16", 64, rows=1, tokens=LONG)
    shape = r"tensor<((?:\d+x)+)(?:bf16|f32|i32|i1)>"
    sizes = {
        name: largest_array(shape, gpu_compile.lower(row_step(name), *arguments)) for name in ("auto", "reference")
    }
    assert sizes["auto"] == LONG * 8 * 64 < LONG * LONG <= sizes["reference"]


@needs_plugin
def test_no_array_of_a_row_squared_is_compiled():
    """As above, in the optimised program; and its memory is the size of what it reads and writes: out and its
    cotangent, a number per query and head, lists of blocks."""
    arguments = row_shapes("bfloat16", 64, rows=1, tokens=LONG)
    report = gpu_compile.compile(row_step(), *arguments)
    assert report.kernels == ("triton",) * 3
    assert largest_array(r"\b(?:bf16|f32|s32|pred)\[([\d,]+)\]", report.text) == LONG * 8 * 64
    assert report.temporary_bytes < 4 * LONG * 8 * 64 * 2


@needs_plugin
@pytest.mark.parametrize(
    ("dtype", "head_size", "tokens"),
    [("bfloat16", 128, 300), ("float16", 80, 300), ("float32", 128, 100), ("bfloat16", 96, 1)],
)
def test_row_and_prefill_attention_compile_for_h200(dtype, head_size, tokens):
    report = gpu_compile.compile(row_step(soft_cap=5.0), *row_shapes(dtype, head_size, tokens=tokens))
    assert report.kernels == ("triton",) * 3
    arguments = prefill_shapes(dtype, head_size, tokens=tokens, num_pages=4000)
    report = gpu_compile.compile(prefill(**ALL), *arguments)
    assert report.kernels == ("triton",)
    gathered = 33 * 16 * 2 * head_size * jnp.dtype(dtype).itemsize
    assert report.temporary_bytes < gathered  # neither a copy of a pool nor a gather of the context's pages


@needs_plugin
@pytest.mark.parametrize("chip", [gpu_compile.A100], ids=["A100"])
def test_row_and_prefill_attention_compile_for_a100(chip):
    report = gpu_compile.compile(row_step("auto"), *row_shapes("bfloat16", 128), chip=chip)
    assert report.kernels == ("triton",) * 3
    report = gpu_compile.compile(prefill_attention, *prefill_shapes("bfloat16", 128), chip=chip)
    assert report.kernels == ("triton",)


@needs_plugin
def test_row_attention_split_over_eight_devices():
    """Rows over four, heads over two: each device its own, with no collective but that of the loss. Under automatic
    axes alone `auto` has no kernel. Caught: neither rows nor heads split in `shard_map`."""
    mesh = Mesh(np.array(gpu_compile.devices(8)).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    axes = ("data", "fsdp"), "tensor"
    rows, heads = PartitionSpec(axes[0]), PartitionSpec(axes[0], None, "tensor")
    specs = heads, heads, heads, rows, rows, rows, PartitionSpec()
    arguments = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(row_shapes("bfloat16", 64, rows=8), specs, strict=True)
    ]
    report = gpu_compile.compile(jax.jit(row_step("auto", mesh_axes=axes)), *arguments, mesh=mesh)
    assert report.kernels == ("triton",) * 3
    results = re.findall(rf"= ([^=%]*) (?:{COLLECTIVE.pattern})[\w-]*\(", report.text)
    assert {shape for result in results for shape in re.findall(r"\w+\[[\d,]*\]", result)} == {"f32[]"}
    assert gpu_compile.compile(jax.jit(row_step("auto")), *arguments, mesh=mesh).kernels == ()


# --- projections to the vocabulary ------------------------------------------------------------------------------------

TOKENS, WIDTH, VOCABULARY, CHUNK, SLICE = 2048, 64, 4096, 256, 2048
PROJECTIONS = ["token_logprobs", "token_logprobs in slices", "token_divergence", "top_k_divergence"]


def projection_step(name):
    """A kernel of the output projection with its gradient, and the shapes of its arguments."""
    struct = jax.ShapeDtypeStruct
    hidden, weight = struct((1, TOKENS, WIDTH), jnp.bfloat16), struct((VOCABULARY, WIDTH), jnp.bfloat16)
    ids, mask = struct((1, TOKENS), jnp.int32), struct((1, TOKENS), jnp.bool_)
    likeliest = struct((1, TOKENS, 8), jnp.int32), struct((1, TOKENS, 8), jnp.float32)
    function, others = {
        "token_logprobs": (token_logprobs, (ids, mask)),
        "token_logprobs in slices": (functools.partial(token_logprobs, vocab_chunk=SLICE), (ids, mask)),
        "token_divergence": (token_divergence, (hidden, weight, mask)),
        "top_k_divergence": (top_k_divergence, (*likeliest, mask)),
    }[name]

    def loss(hidden, weight, *others):
        out = function(hidden, weight, *others, 1.0, chunk_tokens=CHUNK)
        return sum(one.sum() for one in jax.tree.leaves(out))

    return jax.value_and_grad(loss, argnums=(0, 1)), (hidden, weight, *others)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_lower_for_h200(name):
    """Forward and backward: nothing is larger than a chunk's logits, of a slice where there are slices. Caught: a chunk
    of all tokens; a slice of the whole vocabulary."""
    function, arguments = projection_step(name)
    text = gpu_compile.lower(function, *arguments)
    assert gpu_compile.kernel_targets(text) == ()
    at_once = CHUNK * (SLICE if "slices" in name else VOCABULARY)
    assert largest_array(r"tensor<((?:\d+x)+)(?:bf16|f32|i32|i1)>", text) == at_once < TOKENS * VOCABULARY


@needs_plugin
@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_compile_for_h200(name):
    """In less memory than the logits of all tokens, and with slices than those of two chunks."""
    function, arguments = projection_step(name)
    report = gpu_compile.compile(jax.jit(function), *arguments)
    assert report.kernels == ()
    assert report.temporary_bytes < (2 * CHUNK if "slices" in name else TOKENS) * VOCABULARY * 4
