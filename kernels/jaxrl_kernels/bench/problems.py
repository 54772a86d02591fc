"""What is checked and timed: the shared cases of every kernel, and a few shapes of real models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.bench.problem import Call, Problem, Size, cast, random_array, wave
from jaxrl_kernels.bench.projections import divergence_cases_of, divergence_large, logprobs_case, logprobs_large
from jaxrl_kernels.paged_attention import api as paged
from jaxrl_kernels.paged_attention import cases as paged_cases
from jaxrl_kernels.prefill_attention import api as prefill
from jaxrl_kernels.prefill_attention import cases as prefill_cases
from jaxrl_kernels.row_attention import api as rows
from jaxrl_kernels.row_attention import cases as rows_cases
from jaxrl_kernels.token_divergence import api as divergence
from jaxrl_kernels.token_divergence import cases as divergence_cases
from jaxrl_kernels.token_logprobs import api as logprobs
from jaxrl_kernels.token_logprobs import cases as logprobs_cases

IMPLEMENTATIONS = {
    "paged_attention": paged.IMPLEMENTATIONS,
    "prefill_attention": prefill.IMPLEMENTATIONS,
    "row_attention": rows.IMPLEMENTATIONS,
    "token_logprobs": logprobs.IMPLEMENTATIONS,
    "token_divergence": divergence.IMPLEMENTATIONS,
}

SIZES = {
    "full": Size("bfloat16", (32, 8, 128), 64, 4096, 4096, 4096, 128256, 2 << 30, 8192),
    "small": Size("float32", (8, 2, 64), 16, 1024, 1024, 256, 8192, 256 << 20, 1024),
    "tiny": Size("float32", (4, 2, 16), 4, 64, 64, 16, 64, 1 << 20, 64),
}


def shared() -> list[Problem]:
    """The cases that the tests share."""
    return [
        *[_paged_case(case) for case in paged_cases.CASES],
        *[_prefill_case(case) for case in prefill_cases.CASES],
        *[_rows_case(case) for case in rows_cases.CASES],
        *[problem for case in logprobs_cases.CASES for problem in logprobs_case(case)],
        *[problem for case in divergence_cases.CASES for problem in divergence_cases_of(case)],
    ]


def large(size: Size) -> list[Problem]:
    """Shapes as models have them; timed, and checked as well."""
    batch, context, tokens = size.batch, size.context, size.tokens
    spread = tuple(int(length) for length in np.geomspace(context // 16, 2 * context, batch))
    return [
        _paged(size, f"batch {batch}, context {context}", (context,) * batch),
        _paged(size, f"batch {batch}, contexts {spread[0]} to {spread[-1]}", spread),
        _paged(size, f"batch 1, context {8 * context}", (8 * context,)),
        _paged(size, f"batch {4 * batch}, context {context // 4}", (context // 4,) * (4 * batch)),
        _paged(
            size, f"batch {batch}, context {context}, window {context // 8}", (context,) * batch, window=context // 8
        ),
        _prefill(size, f"1 prompt of {tokens}", ((0, tokens),)),
        _prefill(size, f"4 prompts of {tokens // 4}", ((0, tokens // 4),) * 4),
        _prefill(size, f"4 times {tokens // 8} on {tokens // 2} cached", ((tokens // 2, tokens // 8),) * 4),
        _rows(size, f"1 sequence of {tokens}", (((tokens,),),)),
        _rows(size, f"prompt of {tokens // 8} with 7 completions", (((tokens // 8,) * 8,),)),
        _rows(size, f"8 sequences of {tokens // 8}", (((tokens // 8,),) * 8,)),
        logprobs_large(size),
        logprobs_large(size, slices=8),
        divergence_large(size),
    ]


# -- Decode ------------------------------------------------------------------------------------------------------


def _paged_call(**options: Any) -> Call:
    def call(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        return (paged.paged_attention(**arrays, **options, implementation=implementation),)

    return call


def _paged_case(case: paged_cases.Case) -> Problem:
    call = _paged_call(scale=case.scale, window=case.window, soft_cap=case.soft_cap)
    return Problem("paged_attention", case.name, case.dtype, lambda: paged_cases.inputs(case), call)


def _paged(size: Size, name: str, lengths: tuple[int, ...], window: int | None = None) -> Problem:
    num_heads, num_kv_heads, head_size = size.heads
    page_size = 16

    def inputs() -> dict[str, Any]:
        counts = [-(-length // page_size) for length in lengths]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        table = np.zeros((len(lengths), max(counts)), np.int32)
        used = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[used : used + count]
            used += count
        shape = (len(order), page_size, num_kv_heads, head_size)
        return {
            "q": random_array(0, (len(lengths), num_heads, head_size), size.dtype),
            "k_pages": random_array(1, shape, size.dtype),
            "v_pages": random_array(2, shape, size.dtype),
            "page_table": jnp.asarray(table),
            "lengths": jnp.asarray(lengths, jnp.int32),
        }

    itemsize = jnp.dtype(size.dtype).itemsize
    read = sum(length if window is None else min(length, window) for length in lengths)
    num_bytes = 2 * itemsize * (read * num_kv_heads + len(lengths) * num_heads) * head_size
    call = _paged_call(window=window)
    return Problem("paged_attention", name, size.dtype, inputs, call, {"": call}, num_bytes)


# -- Prefill -----------------------------------------------------------------------------------------------------


def _prefill_call(**options: Any) -> Call:
    def call(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        arrays = dict(arrays)
        pages = arrays.pop("k_pages"), arrays.pop("v_pages")
        context = arrays.pop("context")
        pages = None if context is None else pages
        out = prefill.prefill_attention(
            **arrays, pages=pages, context=context, **options, implementation=implementation
        )
        return (out,)

    return call


def _prefill_case(case: prefill_cases.Case) -> Problem:
    call = _prefill_call(scale=case.scale, window=case.window, soft_cap=case.soft_cap)
    return Problem(
        "prefill_attention", case.name, case.dtype, lambda: cast(prefill_cases.inputs(case), case.dtype), call
    )


def _prefill(size: Size, name: str, sequences: tuple[tuple[int, int], ...]) -> Problem:
    num_heads, num_kv_heads, head_size = size.heads
    num_tokens = sum(new for _, new in sequences)
    case = prefill_cases.Case(name, sequences, num_tokens, num_heads, num_kv_heads, head_size, dtype=size.dtype)

    def inputs() -> dict[str, Any]:
        arrays = cast(prefill_cases.inputs(case), size.dtype)
        if not any(cached for cached, _ in sequences):
            arrays |= {"k_pages": None, "v_pages": None, "context": None}  # the program of prompts alone
        return arrays

    pairs = sum(new * cached + new * (new + 1) / 2 for cached, new in sequences)
    call = _prefill_call()
    flops = {"": 4 * pairs * num_heads * head_size}
    return Problem("prefill_attention", name, size.dtype, inputs, call, {"": call}, flops=flops)


# -- Training rows -----------------------------------------------------------------------------------------------


def _rows_calls(window: int | None = None, **options: Any) -> tuple[Call, Call]:
    """The forward pass, and the same with its gradient."""

    def forward(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        arrays = {"window": rows.NO_WINDOW if window is None else window, **arrays}
        return (rows.row_attention(**arrays, **options, implementation=implementation),)

    def gradient(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        fields = {name: value for name, value in arrays.items() if name not in ("q", "k", "v")}

        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            (out,) = forward(implementation, {"q": q, "k": k, "v": v, **fields})
            return (out.astype(jnp.float32) * wave(out.shape)).sum(), out

        (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(arrays["q"], arrays["k"], arrays["v"])
        return out, *gradients

    return forward, gradient


def _rows_case(case: rows_cases.Case) -> Problem:
    _, call = _rows_calls(case.window, scale=case.scale, soft_cap=case.soft_cap)
    return Problem("row_attention", case.name, case.dtype, lambda: cast(rows_cases.inputs(case), case.dtype), call)


def _rows(size: Size, name: str, groups: tuple[tuple[tuple[int, ...], ...], ...]) -> Problem:
    num_heads, num_kv_heads, head_size = size.heads
    case = rows_cases.Case(name, groups, size.tokens, num_heads, num_kv_heads, head_size, dtype=size.dtype)
    pairs = 0.0
    for prompt, *completions in (group for row in groups for group in row):
        pairs += prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in completions)
    forward, gradient = _rows_calls()
    flops = 4 * pairs * num_heads * head_size
    return Problem(
        "row_attention",
        name,
        size.dtype,
        lambda: cast(rows_cases.inputs(case), size.dtype),
        gradient,
        {"": forward, "gradient": gradient},
        flops={"": flops, "gradient": 3.5 * flops},  # two products forward, five backward (one of them again)
    )
