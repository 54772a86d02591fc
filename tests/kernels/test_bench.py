"""The benchmark tells right kernels from wrong ones, and its figures are those of the work done."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxrl_kernels.bench import __main__ as bench
from jaxrl_kernels.bench import problems, results, timing


def some(kernel, *names):
    return [problem for problem in problems.shared() if problem.kernel == kernel and problem.name in names]


@pytest.fixture
def few(monkeypatch):
    """Some shared cases instead of all, which the kernels' own tests run, and one timed shape of each kernel."""
    chosen = [
        *some("paged_attention", "page_edges", "bfloat16"),
        *some("prefill_attention", "cached_to_mid_page"),
        *some("row_attention", "shorter_than_a_block"),
        *some("token_logprobs", "padded_vocabulary, in slices of 7", "nothing_counts"),
        *some("token_divergence", "student_padded_more", "student_padded_more, top 5"),
    ]
    assert len(chosen) == 8
    first = {problem.kernel: problem for problem in reversed(problems.large(problems.SIZES["tiny"]))}
    monkeypatch.setattr(problems, "shared", lambda: chosen)
    monkeypatch.setattr(problems, "large", lambda size: list(first.values()))


def test_right_kernels(few, tmp_path, capsys):
    """Everything on a CPU, the smallest sizes: the table, and the same as JSON."""
    assert bench.main(["--size", "tiny", "--json", str(tmp_path / "bench.json")]) == 0
    figures = json.loads((tmp_path / "bench.json").read_text())
    printed = capsys.readouterr().out
    assert "All that can run here is right" in printed and "WRONG" not in printed
    by_verdict = {(entry["kernel"], entry["implementation"]): entry["verdict"] for entry in figures["checked"]}
    assert by_verdict[("paged_attention", "pallas_triton")] == "refused"
    assert "can't run here: paged attention 'pallas_triton' needs an NVIDIA GPU" in printed
    right = {kernel for (kernel, _), verdict in by_verdict.items() if verdict == "right"}
    assert right == set(problems.IMPLEMENTATIONS)
    assert {(entry["kernel"], entry["part"]) for entry in figures["timed"]} >= {
        ("paged_attention", ""),
        ("prefill_attention", ""),
        ("row_attention", ""),
        ("row_attention", "gradient"),
        ("token_logprobs", "gradient"),
        ("token_divergence", "gradient"),
    }
    for entry in figures["timed"]:
        limit = figures["copy_bytes_per_s"] if entry["unit"] == "B/s" else figures["product_flops_per_s"]
        assert entry["share"] == pytest.approx(entry["rate"] / limit)


def forgets_the_last_token(right):
    return lambda q, k, v, table, lengths, **options: right(q, k, v, table, jnp.maximum(lengths - 1, 1), **options)


def not_a_number(right):
    return lambda *arguments, **options: jnp.nan * right(*arguments, **options)


def does_not_compile(right):
    def broken(*arguments, **options):
        raise RuntimeError("no such instruction\nand more")

    return broken


@pytest.mark.parametrize("fault", [forgets_the_last_token, not_a_number, does_not_compile])
def test_wrong_decode_is_reported(few, monkeypatch, capsys, fault):
    implementations = problems.IMPLEMENTATIONS["paged_attention"]
    monkeypatch.setitem(implementations, "xla", fault(implementations["xla"]))
    assert bench.main(["--size", "tiny", "--only", "paged_attention"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: paged_attention xla, page_edges" in printed and "is right" not in printed
    assert ("RuntimeError: no such instruction" in printed) == (fault is does_not_compile)


def test_a_wrong_gradient_is_reported(monkeypatch):
    """A value that is right and a gradient that is not. Caught: only the value compared."""
    implementations = problems.IMPLEMENTATIONS["row_attention"]
    right = implementations["xla"]

    def most_of_the_gradient(q, k, *rest, **options):
        return right(q, 0.9 * k + 0.1 * jax.lax.stop_gradient(k), *rest, **options)

    (problem,) = some("row_attention", "shorter_than_a_block")
    entry = next(entry for entry in results.check([problem]) if entry.implementation == "xla")
    assert entry.verdict == "right"
    monkeypatch.setitem(implementations, "xla", most_of_the_gradient)
    entry = next(entry for entry in results.check([problem]) if entry.implementation == "xla")
    assert entry.verdict == "wrong" and 0.01 < entry.error < 0.2


def test_work_is_counted_by_hand():
    """Bytes and operations of small shapes. Caught: a gradient without its forward pass; cached tokens left out."""
    size = problems.SIZES["tiny"]  # 4 query heads, 2 key/value heads of 16 in float32
    by_name = {problem.name: problem for problem in problems.large(size)}
    assert by_name["batch 4, context 64"].num_bytes == 2 * 4 * 4 * 64 * 2 * 16 + 2 * 4 * 4 * 4 * 16
    assert by_name["batch 4, context 64, window 8"].num_bytes == 2 * 4 * 4 * 8 * 2 * 16 + 2 * 4 * 4 * 4 * 16
    assert by_name["4 times 8 on 32 cached"].flops[""] == 4 * (4 * (8 * 32 + 36)) * 4 * 16
    shared = by_name["prompt of 8 with 7 completions"].flops
    assert shared[""] == 4 * (8 * 9 / 2 + 7 * (8 * 8 + 36)) * 4 * 16
    assert shared["gradient"] == 3.5 * shared[""]
    last = by_name["64 tokens, width 16, vocabulary 64"].flops
    assert last == by_name["64 tokens, width 16, vocabulary 64, in slices of 8"].flops
    assert last == {"": 2 * 64 * 16 * 64, "gradient": 4 * 2 * 64 * 16 * 64}
    both = by_name["64 tokens, two models of width 16, vocabulary 64"].flops
    assert both == {"": 2 * last[""], "gradient": 6 * last[""]}


def test_seconds_are_of_one_call(monkeypatch):
    """By a clock that runs a second a call. Caught: calls queued together counted as one."""
    calls = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(len(calls)))
    assert timing.seconds(lambda: calls.append(1), budget_s=50.0) == 1.0
    assert len(calls) > 2 * timing.REPEATS


def test_model_figures(capsys):
    """Generation and one GRPO step of the smallest model; what is over time is left out and said."""
    figures = bench.model_figures("tiny", 1000.0)
    assert figures["generation at batch 2, tokens/s"] > 0
    assert 0 <= figures["  largest log-prob difference, decoder against trainer"] < 1e-4
    parts = figures["  of it generation with its layout, s"] + figures["  of it the update, s"]
    (step,) = (value for name, value in figures.items() if name.endswith("step, s"))
    assert step == pytest.approx(parts)
    assert "left_out" not in figures
    assert "left_out" in bench.model_figures("tiny", 0.0)


def test_without_the_model_package(monkeypatch, capsys):
    monkeypatch.setitem(bench.sys.modules, "jaxrl_llm.bench", None)
    assert "left_out" in bench.model_figures("tiny", 1000.0)
    assert "jaxrl_llm can't be imported" in capsys.readouterr().out
