"""Problems of the kernels that project hidden states to the vocabulary: log-probabilities, and divergences of two
models."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.bench.problem import Call, Problem, Size, random_array, wave
from jaxrl_kernels.token_divergence import api as divergence
from jaxrl_kernels.token_divergence import cases as divergence_cases
from jaxrl_kernels.token_logprobs import api as logprobs
from jaxrl_kernels.token_logprobs import cases as logprobs_cases

TEMPERATURE = 0.7
BETAS = (1.0, 0.0, 0.3)  # reverse and forward KL, and one between

# -- Log-probabilities -------------------------------------------------------------------------------------------


def _logprobs_calls(case: logprobs_cases.Case, vocab_chunk: int) -> tuple[Call, Call]:
    def forward(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        return logprobs.token_logprobs(
            **arrays,
            temperature=TEMPERATURE,
            vocab_size=case.vocab_size,
            chunk_tokens=case.chunk_tokens,
            vocab_chunk=vocab_chunk,
            implementation=implementation,
        )

    def gradient(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        fields = {name: value for name, value in arrays.items() if name not in ("hidden", "weight")}

        def loss(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            outputs = forward(implementation, {"hidden": hidden, "weight": weight, **fields})
            weights = wave(outputs[0].shape)
            return (outputs[0] * weights).sum() + 0.3 * (outputs[1] * weights[::-1]).sum(), outputs

        (_, outputs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays["hidden"], arrays["weight"])
        return *outputs, *gradients

    return forward, gradient


def _logprobs_inputs(case: logprobs_cases.Case) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shape = case.num_rows, case.num_tokens
    return {
        "hidden": random_array(1, (*shape, case.width), case.dtype),
        # Logits of a few units at any width.
        "weight": random_array(2, (case.weight_rows, case.width), case.dtype, 1.2 / math.sqrt(case.width)),
        "tokens": jnp.asarray(random.integers(0, case.vocab_size, shape), jnp.int32),
        "mask": jnp.asarray(random.random(shape) < case.counted),
    }


def _in_slices(name: str, vocab_chunk: int) -> str:
    return f"{name}, in slices of {vocab_chunk}" if vocab_chunk else name


def logprobs_case(case: logprobs_cases.Case) -> list[Problem]:
    """Of the whole vocabulary at once, and of slices of it."""
    return [
        Problem(
            "token_logprobs",
            _in_slices(case.name, vocab_chunk),
            case.dtype,
            lambda: _logprobs_inputs(case),
            _logprobs_calls(case, vocab_chunk)[1],
        )
        for vocab_chunk in logprobs_cases.VOCAB_CHUNKS
    ]


def logprobs_large(size: Size, slices: int = 0) -> Problem:
    """All tokens count; of the whole vocabulary at once, or of so many slices of it."""
    name = f"{size.tokens} tokens, width {size.width}, vocabulary {size.vocabulary}"
    case = logprobs_cases.Case(
        name, 1, size.tokens, size.width, size.vocabulary, size.vocabulary, 1024, 1.0, size.dtype
    )
    return logprobs_timed(case, -(-size.vocabulary // slices) if slices else 0)


def logprobs_timed(case: logprobs_cases.Case, vocab_chunk: int) -> Problem:
    forward, gradient = _logprobs_calls(case, vocab_chunk)
    product = 2.0 * case.num_rows * case.num_tokens * case.width * case.weight_rows
    return Problem(
        "token_logprobs",
        _in_slices(case.name, vocab_chunk),
        case.dtype,
        lambda: _logprobs_inputs(case),
        gradient,
        {"": forward, "gradient": gradient},
        flops={"": product, "gradient": 4 * product},  # logits, again for the gradient, and its two products
    )


# -- Divergences -------------------------------------------------------------------------------------------------


def _divergence_calls(case: divergence_cases.Case, beta: float, top_k: bool) -> tuple[Call, Call]:
    """Of the whole vocabulary, or of the teacher's likeliest tokens."""
    function = divergence.top_k_divergence if top_k else divergence.token_divergence

    def forward(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        values = function(
            **arrays,
            temperature=TEMPERATURE,
            beta=beta,
            vocab_size=case.vocab_size,
            chunk_tokens=case.chunk_tokens,
            implementation=implementation,
        )
        return (values,)

    def gradient(implementation: str, arrays: Any) -> tuple[jax.Array, ...]:
        student = arrays["student_hidden"], arrays["student_weight"]

        def loss(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            (values,) = forward(implementation, {**arrays, "student_hidden": hidden, "student_weight": weight})
            return (values * wave(values.shape)).sum(), values

        (_, values), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(*student)
        return values, *gradients

    return forward, gradient


def _divergence_inputs(case: divergence_cases.Case, top_k: bool) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shape = case.num_rows, case.num_tokens
    arrays: dict[str, Any] = {"mask": jnp.asarray(random.random(shape) < case.counted)}
    for seed, name, width, num_rows in zip((1, 3), ("student", "teacher"), case.widths, case.weight_rows, strict=True):
        arrays[f"{name}_hidden"] = random_array(seed, (*shape, width), case.dtype)
        arrays[f"{name}_weight"] = random_array(seed + 1, (num_rows, width), case.dtype, 1.2 / math.sqrt(width))
    if not top_k:
        return arrays
    before = np.roll(np.asarray(arrays.pop("teacher_hidden"), np.float64), 1, axis=1)
    weight = np.asarray(arrays.pop("teacher_weight"), np.float64)[: case.vocab_size]
    scores = before @ weight.T / TEMPERATURE
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    ids = np.argsort(-scores, axis=-1)[..., : case.k]
    return arrays | {
        "teacher_ids": jnp.asarray(ids, jnp.int32),
        "teacher_logprobs": jnp.asarray(np.take_along_axis(scores, ids, -1), jnp.float32),
    }


def divergence_cases_of(case: divergence_cases.Case) -> list[Problem]:
    """Both forms of one divergence, a case in turn."""
    beta = BETAS[divergence_cases.CASES.index(case) % len(BETAS)]
    return [
        Problem(
            "token_divergence",
            f"{case.name}, top {case.k}" if top_k else case.name,
            case.dtype,
            lambda top_k=top_k: _divergence_inputs(case, top_k),
            _divergence_calls(case, beta, top_k)[1],
        )
        for top_k in (False, True)
    ]


def divergence_large(size: Size) -> Problem:
    """Reverse KL to a teacher of the same shape."""
    name = f"{size.tokens} tokens, two models of width {size.width}, vocabulary {size.vocabulary}"
    both = size.width, size.width
    num_rows = size.vocabulary, size.vocabulary
    case = divergence_cases.Case(
        name, 1, size.tokens, both, num_rows, size.vocabulary, 1024, 1.0, dtype=size.dtype
    )  # fmt: skip
    forward, gradient = _divergence_calls(case, 1.0, top_k=False)
    product = 2.0 * size.tokens * size.width * size.vocabulary
    return Problem(
        "token_divergence",
        name,
        size.dtype,
        lambda: _divergence_inputs(case, top_k=False),
        gradient,
        {"": forward, "gradient": gradient},
        flops={"": 2 * product, "gradient": 6 * product},  # both logits, again for the gradient, and its two products
    )
