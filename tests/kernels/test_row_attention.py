"""Packed-row attention in blocks and in tiles against the dense specification, and what they never hold."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_kernels.row_attention import xla, xla_tiles
from jaxrl_kernels.row_attention.api import NO_WINDOW, row_attention
from jaxrl_kernels.row_attention.cases import CASES, Case, inputs

INTEGERS = ("positions", "segment_ids", "prefix_ids")


def value_and_gradient(case: Case, implementation: str, seed: int = 0):
    arrays = inputs(case, seed)
    q, k, v = (jnp.asarray(arrays[name], case.dtype) for name in "qkv")
    fields = [jnp.asarray(arrays[name]) for name in INTEGERS]
    wave = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    @jax.jit
    def run(q, k, v, fields):
        def loss(q, k, v):
            out = row_attention(
                q, k, v, *fields, NO_WINDOW if case.window is None else case.window,
                scale=case.scale, soft_cap=case.soft_cap, implementation=implementation,
            )  # fmt: skip
            return (out.astype(jnp.float32) * wave).sum(), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    (_, out), gradients = run(q, k, v, fields)
    return out, *gradients


@pytest.mark.parametrize("implementation", ["xla", "xla_tiles"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_dense_reference(case, implementation, monkeypatch):
    """Value and gradient; the longer rows choose between both sizes of tiles. float32 sums of up to 450 terms in
    another order: 1e-5 of the largest entry; bfloat16 rounds inputs of each product to 8 bits."""
    monkeypatch.setattr(xla_tiles, "BOTH_FROM", xla_tiles.LARGE + 1)
    tolerance = 3e-2 if case.dtype == "bfloat16" else 1e-5
    found, expected = value_and_gradient(case, implementation), value_and_gradient(case, "reference")
    for name, value, right in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert value.dtype == right.dtype and value.shape == right.shape
        value, right = np.asarray(value, np.float64), np.asarray(right, np.float64)
        assert np.abs(value - right).max() <= tolerance * max(np.abs(right).max(), 1.0), name


@pytest.mark.parametrize("size", [1, 7, 32, 128])
def test_the_block_size_changes_nothing(size):
    """Of blocks and of tiles. Softmax of up to 160 terms in another order: 2e-6."""
    case = next(case for case in CASES if case.name == "ragged_groups")
    arrays = {name: jnp.asarray(value) for name, value in inputs(case).items()}
    options = {"scale": 0.25, "soft_cap": None}
    window = jnp.int32(NO_WINDOW)
    runs = (
        functools.partial(xla.row_attention, block_tokens=64),
        functools.partial(xla.row_attention, block_tokens=size),
        functools.partial(xla_tiles.row_attention, tile_tokens=size),
    )
    first, *others = (jax.jit(functools.partial(run, **options))(*arrays.values(), window) for run in runs)
    for other in others:
        np.testing.assert_allclose(other, first, atol=2e-6)


def steps_of(case: Case, block: int = 64) -> int:
    fields = [jnp.asarray(inputs(case)[name]) for name in INTEGERS]
    window = jnp.int32(NO_WINDOW if case.window is None else case.window)
    return int(jax.jit(functools.partial(xla._plan, block=block))(*fields, window).steps)


def test_cost_follows_what_is_visible():
    """The loop's steps are the longest list of key blocks."""
    assert steps_of(Case("group", rows=(((64, *[64] * 8),),), num_tokens=576)) == 2
    assert steps_of(Case("apart", rows=(((64,), (64,), (64,)),), num_tokens=192)) == 1
    assert steps_of(Case("long", rows=(((640,),),), num_tokens=640)) == 10
    assert steps_of(Case("window", rows=(((640,),),), num_tokens=640, window=64)) == 2
    assert steps_of(Case("two_prompts", rows=(((64, 64, 64), (64, 64, 64)),), num_tokens=384)) == 2


TILES = {
    "groups": (Case("groups", rows=(((64, *[64] * 8),) * 4,), num_tokens=2304), 4 * (1 + 8 * 2), 9 + 4 * 2),
    "long": (Case("long", rows=(((2048,),),), num_tokens=2048), 32 * 33 // 2, 8 * 9 // 2),
    "window": (Case("window", rows=(((2048,),),), num_tokens=2048, window=64), 32 + 31, 8 + 7),
    "two_rows": (Case("two_rows", rows=(((512, 64),), ((64,),)), num_tokens=2048), 36 + 9 + 23, 3 + 3 + 5),
}
"""A row, its tiles of 64 tokens, and those of 256. Of the groups each has two large blocks that read the one where its
prompt is; a block of padding reads itself."""


@pytest.mark.parametrize("name", TILES)
def test_tiles_are_those_that_are_seen(name):
    """And the loop takes the size that costs less. Caught: tiles of all blocks before a block; the larger size taken
    always, or never."""
    case, small, large = TILES[name]
    fields = [jnp.asarray(inputs(case)[name]) for name in INTEGERS]
    fields.append(jnp.int32(NO_WINDOW if case.window is None else case.window))
    for size, count in ((xla_tiles.SMALL, small), (xla_tiles.LARGE, large)):
        assert int(jax.jit(functools.partial(xla_tiles._plan, size=size))(*fields).steps) == count
    taken = jax.jit(lambda *fields: xla_tiles._with_tiles(fields, None, lambda plan: plan.steps))(*fields)
    assert int(taken) == (large if large * xla_tiles.LARGE_COSTS < small else small)
    assert (name == "long") == (int(taken) == large)


def test_devices_agree_on_tiles_before_the_branch():
    """Rows on 8 devices: which size costs less, and how many tiles there are, is known before the branch, whose two
    sides wait for no device. Caught: the number of tiles counted within the branch, by a collective."""
    case = Case("long", rows=(((300,),),) * 8, num_tokens=xla_tiles.BOTH_FROM, num_heads=1, num_kv_heads=1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    arrays = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=split) for name, value in inputs(case).items()
    }

    def loss(q, k, v, *fields):
        return row_attention(q, k, v, *fields, implementation="xla_tiles").sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays.values()).compile().as_text()
    inner, _, entry = compiled.partition("\nENTRY ")
    assert " conditional(" in entry and " all-reduce(" in entry
    assert not re.search(r" (all-|collective-|reduce-scatter)[\w-]*\(", inner)


@pytest.mark.parametrize("implementation", ["xla", "xla_tiles"])
def test_no_array_of_a_row_squared(implementation):
    """Neither forward nor backward holds ``[T, T]`` at T = 2048: the largest temporaries are of the inputs' order."""
    case = Case("long", rows=(((2048,),),), num_tokens=2048, num_heads=2, num_kv_heads=1)
    arrays = {name: jnp.asarray(value) for name, value in inputs(case).items()}

    def loss(q, k, v):
        return row_attention(q, k, v, *(arrays[name] for name in INTEGERS), implementation=implementation).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*(arrays[name] for name in "qkv")).compile().as_text()
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    scores_of_a_step = 2 * 2048 * xla.BLOCK_TOKENS
    assert max(sizes) <= scores_of_a_step


def test_bad_arguments_are_named():
    arrays = {name: jnp.asarray(value) for name, value in inputs(CASES[2]).items()}
    good = list(arrays.values())
    with pytest.raises(ValueError, match="'fast' is unknown; choose auto or reference, xla"):
        row_attention(*good, implementation="fast")
    with pytest.raises(ValueError, match="must fit queries"):
        row_attention(good[0], good[1][:, :3], good[2][:, :3], *good[3:])
    with pytest.raises(ValueError, match="segment_ids must be integers"):
        row_attention(*good[:4], good[4].astype(jnp.float32), good[5])
    with pytest.raises(ValueError, match="soft_cap is 0"):
        row_attention(*good, soft_cap=0.0)
