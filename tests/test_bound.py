"""What the machine allows: the formulas against the programs themselves and against sums by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.bench import bound
from jaxrl_llm.bench.traffic import Traffic
from jaxrl_llm.bench.workload import Workload
from jaxrl_llm.models.decoder import Decoder
from tests.models.tiny import tiny_config

WIDE = tiny_config(hidden_size=256, intermediate_size=640, vocab_size=1000, padded_vocab_size=1000)
"""Wide, so that products are nearly all that a program does."""


def test_weights_are_those_of_the_model():
    """Caught: two matrices of the MLP in place of three; the output projection left out."""
    params = Decoder(WIDE).abstract_params()
    layers, output = bound.weights(WIDE)
    assert layers == sum(leaf.size for leaf in jax.tree.leaves(params["blocks"]) if leaf.ndim > 2)
    assert output == params["embed"]["weight"].size


def test_operations_are_those_that_the_compiler_counts():
    """Of a decode step without attention, and of attention alone. Caught: multiplications counted without their sums;
    keys and values as one product."""
    decoder, rows, context = Decoder(WIDE), 6, 40

    def step(params, tokens):
        hidden = decoder.generation_hidden(params, tokens, tokens, lambda layer, q, k, v: q)
        return decoder.logits(params, hidden)

    params = jax.eval_shape(decoder.generation_params, decoder.abstract_params())
    counted = jax.jit(step).lower(params, jax.ShapeDtypeStruct((rows,), jnp.int32)).cost_analysis()["flops"]
    alone = bound.decode_flops(WIDE, rows, 0)
    assert alone == pytest.approx(counted, rel=0.05)  # norms, rotations and activations are not in the formula

    def attend(q, k, v):
        return jnp.einsum("bhk,bkhd->bhd", jnp.einsum("bhd,bkhd->bhk", q, k), v)

    query = jax.ShapeDtypeStruct((rows, WIDE.num_heads, WIDE.head_size), jnp.float32)
    keys = jax.ShapeDtypeStruct((rows, context, WIDE.num_heads, WIDE.head_size), jnp.float32)
    of_layer = jax.jit(attend).lower(query, keys, keys).cost_analysis()["flops"]
    assert bound.decode_flops(WIDE, rows, context) - alone == pytest.approx(WIDE.num_layers * of_layer)


def test_a_group_shares_its_prompt():
    """An update of one sample is three forward passes over prompt and answer; another sample adds its own tokens alone.
    Caught: the prompt counted for each sample; answers that see one another."""
    per_key, (layers, output) = 4 * WIDE.num_layers * WIDE.num_heads * WIDE.head_size, bound.weights(WIDE)
    one = bound.update_flops(WIDE, Workload(prompts=1, samples=1, prompt_tokens=5, new_tokens=3))
    seen = sum(range(1, 9))
    assert one == 3 * (2 * layers * 8 + 2 * output * 3 + per_key * seen)
    two = bound.update_flops(WIDE, Workload(prompts=1, samples=2, prompt_tokens=5, new_tokens=3))
    assert two - one == 3 * (2 * (layers + output) * 3 + per_key * (6 + 7 + 8))
    assert bound.prefill_flops(WIDE, 5) == 2 * layers * 4 + per_key * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("by", ["products", "memory"])
def test_a_load_takes_the_sum_of_its_steps(by):
    """Lengths 1 and 3, two samples each: four rows once, then two rows twice, each a token further. Caught: ended rows
    counted; the memory forgotten."""
    fast = {"products": bound.Machine(1e9, 1e30), "memory": bound.Machine(1e30, 1e9)}[by]
    steps = [(4, 10), (2, 11), (2, 12)]
    measure = bound.decode_flops if by == "products" else bound.decode_bytes
    found = bound.generation_seconds(WIDE, Traffic("two", (1, 3), samples=2, prompt_tokens=10), fast)
    assert found["decode"] == pytest.approx(sum(measure(WIDE, *step) for step in steps) / 1e9)
    if by == "products":
        assert found["prefill"] == pytest.approx(2 * bound.prefill_flops(WIDE, 10) / 1e9)
    numbers = sum(bound.weights(WIDE)) + 2 * 11 * 2 * WIDE.num_layers * WIDE.num_kv_heads * WIDE.head_size
    assert bound.decode_bytes(WIDE, 2, 11) == 4 * numbers


def test_rates_are_measured_here():
    """Every figure is a rate of something that ran: far from the 1e3 and 1e15 that a wrong unit would give."""
    machine, told = bound.measure_machine(size=128, num_bytes=2**20)
    assert len(told) == 5 and all(1e-2 < rate < 1e6 for rate in told.values()), told
    assert 1e9 * max(rate for name, rate in told.items() if "FLOP" in name) == pytest.approx(machine.flops)
    assert 1e9 * max(rate for name, rate in told.items() if "GB/s" in name) == pytest.approx(machine.bandwidth)
