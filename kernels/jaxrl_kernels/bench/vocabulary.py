"""Memory and time of `token_logprobs` with the vocabulary at once and in slices, on the device at hand or for an H200.

    python -m jaxrl_kernels.bench.vocabulary --width 576 --vocabulary 49152 --chunk_tokens 256 --slices 0,8192,4096
    JAX_PLATFORMS=cpu python -m jaxrl_kernels.bench.vocabulary --h200 --dtype bfloat16 --width 4096 --vocabulary 128256

Temporaries are the compiler's figure, the gradients themselves not among them. With ``--h200`` nothing runs, and the
CUDA plugin is needed (see `jaxrl_kernels.gpu_compile`).
"""

import argparse
import functools
from collections.abc import Sequence

import jax

from jaxrl_kernels import gpu_compile
from jaxrl_kernels.bench import timing
from jaxrl_kernels.bench.__main__ import show
from jaxrl_kernels.bench.projections import logprobs_timed
from jaxrl_kernels.token_logprobs.cases import Case

COLUMNS = ("entries at once", "temporaries, MB: values, with gradient", "seconds: values, with gradient")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_kernels.bench.vocabulary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk_tokens", type=int, default=1024, help="tokens whose logits exist at one time")
    parser.add_argument("--slices", default="0,16384", help="entries of the vocabulary at one time; 0: all")
    parser.add_argument("--h200", action="store_true", help="compile for one in place of running")
    options = parser.parse_args(arguments)
    case = Case(
        "", 1, options.tokens, options.width, options.vocabulary, options.vocabulary, options.chunk_tokens, 1.0,
        options.dtype,
    )  # fmt: skip
    rows = [row(case, int(entries), options.h200) for entries in options.slices.split(",")]
    show(COLUMNS, rows)


def row(case: Case, vocab_chunk: int, h200: bool) -> tuple[str, ...]:
    """One line of the table."""
    problem = logprobs_timed(case, vocab_chunk)
    arrays = jax.eval_shape(problem.inputs) if h200 else problem.inputs()
    temporaries, seconds = [], []
    for call in problem.timed.values():
        function = jax.jit(functools.partial(call, "xla"))
        if h200:
            temporaries.append(gpu_compile.compile(function, arrays).temporary_bytes)
            continue
        compiled = function.lower(arrays).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None, "the CPU and GPU compilers have one"
        temporaries.append(analysis.temp_size_in_bytes)
        seconds.append(timing.seconds(compiled, arrays))
    figures = ", ".join(f"{one / 1e6:,.0f}" for one in temporaries), ", ".join(f"{one:.3g}" for one in seconds)
    return str(vocab_chunk or "all"), figures[0], figures[1] or "-"


if __name__ == "__main__":
    main()
