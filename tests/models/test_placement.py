"""What moves between devices in a sharded training step, read from the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.placement import place, splitting_axes
from jaxrl_llm.sharding import TRAINING
from tests.models.tiny import tiny_config

ROWS, TOKENS = 16, 40


def _mesh(*shape: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:8]).reshape(shape), ("data", "pipeline", "fsdp", "tensor"))


@pytest.mark.parametrize("shape", [(1, 1, 8, 1), (1, 1, 4, 2)])
def test_rows_stay_where_they_are(shape):
    """The gradient of a sharded model: weights are gathered over fsdp and their gradients added up; activations of
    all rows together exist on no device, and heads are never gathered over tensor. Seen to catch: no constraints
    (partial sums over all rows on every device); a rotation that merges tokens and heads for its product."""
    decoder = Decoder(
        tiny_config(
            vocab_size=512,
            padded_vocab_size=512,
            hidden_size=64,
            intermediate_size=192,
            num_heads=8,
            num_kv_heads=4,
            head_size=16,
            num_layers=3,
            windows=(None,) * 3,
        )
    )
    mesh = _mesh(*shape)
    shardings = TRAINING.shardings(mesh, decoder.logical_axes())
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        decoder.abstract_params(), shardings,
    )  # fmt: skip
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    row = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32, sharding=split)
    mask = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.bool_, sharding=split)

    def loss(params, tokens, positions, segment_ids, mask):
        hidden = decoder.hidden(params, tokens, positions, segment_ids)
        return decoder.token_logprobs(params, hidden, tokens, mask, 1.0, chunk_tokens=128).logprobs.sum()

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss), out_shardings=shardings).lower(params, row, row, row, mask).compile()
    moved = re.findall(r"= (\(?[^=]*?) (all-gather|all-reduce|reduce-scatter|all-to-all)\(", program.as_text())
    assert any(kind == "all-gather" for _, kind in moved)
    assert not any(kind == "all-to-all" for _, kind in moved)
    local = ROWS * TOKENS // shape[2]
    for shapes, kind in moved:
        for dimensions in re.findall(r"\[([\d,]+)\]", shapes):
            sizes = [int(size) for size in dimensions.split(",")]
            assert sizes[0] != ROWS * TOKENS and sizes[:2] != [ROWS, TOKENS], f"{kind} of all rows: {sizes}"
            assert not (kind == "all-gather" and sizes[0] == local), f"heads gathered: {sizes}"


def test_no_mesh_no_constraint():
    """Without a mesh, with other axes, or under shard_map nothing is constrained."""
    x = jnp.ones((8, 4))
    assert splitting_axes(rows=8) is None and place(x, "rows", None) is x
    with jax.set_mesh(Mesh(np.asarray(jax.devices()[:8]), ("other",))):
        assert splitting_axes(rows=8) is None
    mesh = _mesh(2, 1, 2, 2)
    with jax.set_mesh(mesh):
        assert splitting_axes(rows=8, vocab=3) == (("data", "fsdp", "pipeline"), None)
        mapped = jax.shard_map(
            lambda x: place(x, "rows", None), mesh=mesh, axis_names={"data", "pipeline", "fsdp"},
            in_specs=PartitionSpec(("data", "fsdp")), out_specs=PartitionSpec(("data", "fsdp")),
        )  # fmt: skip
        np.testing.assert_array_equal(jax.jit(mapped)(x), x)
    assert set(mesh.axis_types) == {AxisType.Auto}
