"""The Pallas kernels of packed-row attention, interpreted on the CPU: value and gradient against the reference, and
rows and heads split over a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_kernels.device import Device
from jaxrl_kernels.row_attention import api, blocks, pallas_triton, reference
from jaxrl_kernels.row_attention.cases import CASES, Case, inputs, tokens_of

FIELDS = ("positions", "segment_ids", "prefix_ids")

# Of the largest entry. float32: sums of up to 460 terms in another order; 2e-6 was the most seen. bfloat16 and float16:
# weights and their gradients are rounded to 8 and 11 bits before each product, and the results once more.
TOLERANCES = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}

UNOPTIMISED = {"xla_backend_optimization_level": 0}  # compiling is most of the time
PADDED_TOKENS = 461  # no multiple of any block


def padded(case: Case) -> Case:
    """The case as rows of one shape, where it has nothing else of its own, so that many are one program."""
    plain = (case.num_heads, case.head_size, case.dtype, case.soft_cap, case.scale) == (6, 16, "float32", None, None)
    if not plain or case.num_tokens < 20:
        return case
    return dataclasses.replace(case, num_tokens=PADDED_TOKENS, rows=case.rows + ((),) * (2 - len(case.rows)))


def value_and_gradient(attend, q, k, v, fields, window):
    wave = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def loss(q, k, v):
        out = attend(q, k, v, *fields, window)
        return (out.astype(jnp.float32) * wave).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *gradients


@functools.cache
def both(scale, soft_cap, query_block, key_block, gradient_block):
    """The kernels and the reference as one program."""
    options = {"scale": scale, "soft_cap": soft_cap}
    sizes = {"query_block": query_block, "key_block": key_block, "gradient_block": gradient_block}
    kernel = functools.partial(pallas_triton.row_attention, **options, **sizes, interpret=True)
    expected = functools.partial(reference.row_attention, **options)

    def run(*arguments):
        return [value_and_gradient(attend, *arguments) for attend in (kernel, expected)]

    return jax.jit(run, compiler_options=UNOPTIMISED)


def differences(case: Case, query_block=32, key_block=64, gradient_block=32) -> dict[str, float]:
    arrays = inputs(case)
    scale = case.head_size**-0.5 if case.scale is None else case.scale
    window = jnp.int32(api.NO_WINDOW if case.window is None else case.window)
    run = both(scale, case.soft_cap, query_block, key_block, gradient_block)
    found, expected = run(
        *(jnp.asarray(arrays[name], case.dtype) for name in "qkv"),
        [jnp.asarray(arrays[name]) for name in FIELDS],
        window,
    )
    result = {}
    for name, value, right in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert value.dtype == right.dtype and value.shape == right.shape
        value, right = np.asarray(value, np.float64), np.asarray(right, np.float64)
        result[name] = np.abs(value - right).max() / max(np.abs(right).max(), 1.0)
    return result


@pytest.mark.parametrize("case", [*map(padded, CASES)], ids=lambda case: case.name)
def test_equals_the_reference(case):
    """Caught: prefixes left out; a window of W + 1; padding that doesn't see itself; the soft cap left out of the
    gradient, the scale of dK, the overlap of dV with the output; one head of a group taken for all; part of a group's
    heads left out of dK; the lists of queries not transposed; sums in powers of two taken for powers of e; earlier
    blocks not scaled down; the row's last token not loaded; the second part of a head of 80 left out."""
    found = differences(case)
    assert all(value < TOLERANCES[case.dtype] for value in found.values()), found


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ((64, 16, 64), Case("queries_longer", (((40, 9, 20),),), 77, num_heads=2, num_kv_heads=1, soft_cap=2.0)),
        ((16, 32, 16), Case("head_96", (((50,),),), 50, num_heads=2, num_kv_heads=2, head_size=96, dtype="float16")),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_other_blocks_and_head_sizes(sizes, case):
    found = differences(case, *sizes)
    assert all(value < TOLERANCES[case.dtype] for value in found.values()), found


@functools.cache
def visible_and_listed(query_block, key_block):
    def run(positions, segment_ids, prefix_ids, window):
        fields = positions, segment_ids, prefix_ids, window
        return reference.visible(*fields), blocks.visible_blocks(*fields, query_block, key_block)

    return jax.jit(run)


@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 32)], ids=str)
def test_no_block_that_is_seen_is_left_out(sizes):
    """And few others are listed: none in these rows, whose ids grow, but at a window's edge.

    Caught: prefixes left out; blocks of unequal size that overlap in part; the first position of a block of keys taken
    for its last; the window ignored; blocks after the queries listed."""
    cases = [case for case in map(padded, CASES) if case.num_tokens == PADDED_TOKENS]
    assert len(cases) >= 10
    for case in cases:
        window = jnp.int32(api.NO_WINDOW if case.window is None else case.window)
        visible, listed = visible_and_listed(*sizes)(*map(jnp.asarray, tokens_of(case).values()), window)
        listed, seen = np.asarray(listed), np.zeros(listed.shape, bool)
        rows, queries, keys = np.nonzero(np.asarray(visible))
        seen[rows, queries // sizes[0], keys // sizes[1]] = True
        assert (listed >= seen).all(), case.name
        assert listed.sum() <= (1.0 if case.window is None else 1.15) * seen.sum(), case.name


def test_lists_of_blocks_hold_what_is_set_first():
    order, count = blocks.listed(jnp.asarray([[[False, True, True], [True, False, True]]]))
    assert count.tolist() == [[2, 2]] and order[0, 0, :2].tolist() == [1, 2] and order[0, 1, :2].tolist() == [0, 2]


def test_float32_is_multiplied_as_such():
    """Each product asks for float32; else Triton rounds its operands to 10 bits (tf32), on GPUs only.
    Caught: no precision given."""
    case = Case("small", (((9,),),), 9, num_heads=2, num_kv_heads=1, head_size=80)
    arrays = inputs(case)
    fields = [jnp.asarray(arrays[name]) for name in FIELDS]
    attend = functools.partial(pallas_triton.row_attention, scale=1.0, soft_cap=None)
    run = functools.partial(value_and_gradient, attend, fields=fields, window=jnp.int32(api.NO_WINDOW))
    text = str(jax.make_jaxpr(run)(*(arrays[name] for name in "qkv")))
    # A head of 80 has two parts: 4 products in the forward kernel, 6 and 8 in the gradient's.
    assert text.count("dot_general") == text.count("Precision.HIGHEST, Precision.HIGHEST") == 18


@pytest.mark.parametrize("shape", [(0, 8, 2), (2, 0, 2), (2, 8, 0)], ids=["no_row", "no_token", "no_head"])
def test_nothing_gives_nothing(shape):
    """Caught: empty arrays left to the kernel."""
    rows, tokens, heads = shape
    q = jnp.zeros((rows, tokens, heads, 16), jnp.bfloat16)
    fields = [jnp.zeros((rows, tokens), jnp.int32)] * 3
    attend = functools.partial(pallas_triton.row_attention, scale=1.0, soft_cap=None, interpret=True)
    for value in value_and_gradient(attend, q, q, q, fields, jnp.int32(1)):
        assert value.shape == q.shape and value.dtype == q.dtype


@pytest.mark.parametrize(
    ("dtypes", "head_size", "sizes", "message"),
    [
        (("float64",) * 3, 64, {}, "takes float32, bfloat16, float16, not float64; choose 'xla'"),
        (("bfloat16",) * 3, 24, {}, "head size that is a multiple of 16, not 24; choose 'xla'"),
        (("bfloat16", "float32", "float32"), 64, {}, "takes one dtype, not bfloat16, float32, float32"),
        (("float32",) * 3, 64, {"key_block": 24}, "power of two and at least 16 tokens, not 24"),
        (("float32",) * 3, 64, {"query_block": 8}, "power of two and at least 16 tokens, not 8"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(dtypes, head_size, sizes, message):
    arrays = [np.zeros((1, 4, 2, head_size), dtype) for dtype in dtypes]
    fields = [np.zeros((1, 4), np.int32)] * 3
    with pytest.raises(ValueError, match=message):
        pallas_triton.row_attention(*arrays, *fields, jnp.int32(1), scale=1.0, soft_cap=None, interpret=True, **sizes)


# --- on a mesh -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended_gpu(monkeypatch):
    """The device that is traced for is said to be an H200, and the kernel is interpreted."""
    monkeypatch.setattr(api, "target_device", lambda: Device("gpu", "NVIDIA H200", (9, 0), 132))
    kernel = functools.partial(pallas_triton.row_attention, query_block=16, key_block=16, interpret=True)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_triton", kernel)


MESH_CASE = Case("mesh", (((20, 9, 8),), ((5,), (30,)), (), ((1, 1),)), 40, num_heads=4, num_kv_heads=2, window=25)
ALL_AXES = (("data", "fsdp"), "tensor")


def attention_and_gradient(mesh_axes, implementation):
    def attend(*arguments):
        return api.row_attention(*arguments, mesh_axes=mesh_axes, implementation=implementation)

    return jax.jit(functools.partial(value_and_gradient, attend), compiler_options=UNOPTIMISED)


def on_mesh(mesh_axes, implementation, rows=4):
    arrays = {name: jnp.asarray(value[:rows]) for name, value in inputs(MESH_CASE).items()}
    fields = [arrays[name] for name in FIELDS]
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec(("data", "fsdp") if rows == 4 else None, None, "tensor"))
        q, k, v = (jax.device_put(arrays[name], split) for name in "qkv")
        return attention_and_gradient(mesh_axes, implementation)(q, k, v, fields, jnp.int32(MESH_CASE.window))


@pytest.mark.parametrize("mesh_axes", [ALL_AXES, ("data", None)], ids=["all", "rows_over_one"])
def test_split_over_a_mesh_equals_the_reference(pretended_gpu, mesh_axes):
    """Rows, query heads and key/value heads on 8 devices; and copies along two axes, whose gradients are not added.
    Caught: keys not split as the queries are; only the axes of the rows manual."""
    arrays = {name: jnp.asarray(value) for name, value in inputs(MESH_CASE).items()}
    fields = [arrays.pop(name) for name in FIELDS]
    expected = attention_and_gradient(None, "reference")(*arrays.values(), fields, jnp.int32(MESH_CASE.window))
    found = on_mesh(mesh_axes, "pallas_triton")
    for name, value, right in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(value, right, atol=5e-6, err_msg=name)


def test_what_a_mesh_cannot_split_is_refused(pretended_gpu):
    """Caught: the axes of the mesh not looked at; rows and heads that don't divide let through."""
    with pytest.raises(
        ValueError, match=r"'pallas_triton' is not partitioned by XLA, .* axes data, fsdp, tensor: make"
    ):
        on_mesh(None, "pallas_triton")
    with pytest.raises(ValueError, match=r"can't split 3 rows over the mesh axes data, fsdp; choose 'xla'"):
        on_mesh(ALL_AXES, "pallas_triton", rows=3)
    with pytest.raises(ValueError, match=r"can't split 2 key/value heads over the mesh axes tensor, data; choose"):
        on_mesh((None, ("tensor", "data")), "pallas_triton")
    with pytest.raises(ValueError, match="can't be split over pipe: not among the axes"):
        on_mesh((None, "pipe"), "pallas_triton")


@pytest.mark.parametrize(
    ("mesh_axes", "rows", "kernels"),
    [(ALL_AXES, 4, 1), (None, 4, 0), (ALL_AXES, 3, 0), ((None, "tensor"), 3, 1)],
    ids=["split", "automatic", "uneven", "heads_only"],
)
def test_auto_on_a_mesh(pretended_gpu, monkeypatch, mesh_axes, rows, kernels):
    """Which implementation runs, by what is called."""
    calls = []

    def instead(q, *rest, **options):
        calls.append(q.shape)
        return q

    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_triton", instead)
    on_mesh(mesh_axes, "auto", rows)
    assert len(calls) == kernels
    assert not calls or calls[0][:3:2] == ((1 if mesh_axes == ALL_AXES else 3), 2)
