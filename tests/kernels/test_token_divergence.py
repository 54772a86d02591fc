"""The chunked divergences against the dense reference, finite differences, their sharding and what they never hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels.token_divergence import xla
from jaxrl_kernels.token_divergence.api import token_divergence, top_k_divergence
from jaxrl_kernels.token_divergence.cases import CASES, Case

BETAS = (0.0, 0.3, 1.0)
TEMPERATURE = 0.7
UNOPTIMISED = {"xla_backend_optimization_level": 0}  # compiling is most of the time


def _inputs(case: Case, seed: int = 0):
    """Student and teacher arrays, the teacher's candidates with their log-probs, and the mask."""
    rng = np.random.default_rng(seed)
    shape = (case.num_rows, case.num_tokens)
    arrays = {}
    for name, width, rows in zip(("student", "teacher"), case.widths, case.weight_rows, strict=True):
        arrays[f"{name}_hidden"] = jnp.asarray(rng.standard_normal((*shape, width)), case.dtype)
        arrays[f"{name}_weight"] = jnp.asarray(rng.standard_normal((rows, width)) * 1.2 / np.sqrt(width), case.dtype)
    logits = np.roll(np.float64(arrays["teacher_hidden"]), 1, axis=1)
    logits = logits @ np.float64(arrays["teacher_weight"][: case.vocab_size]).T / TEMPERATURE
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-log_q, axis=-1)[..., : case.k]
    arrays["teacher_ids"] = jnp.asarray(ids, jnp.int32)
    arrays["teacher_logprobs"] = jnp.asarray(np.take_along_axis(log_q, ids, -1), jnp.float32)
    arrays["mask"] = jnp.asarray(rng.random(shape) < case.counted)
    return arrays


def _divergence(form: str, case: Case, arrays, beta: float, implementation: str = "xla", **options):
    options = {"beta": beta, "vocab_size": case.vocab_size, "chunk_tokens": case.chunk_tokens} | options
    student = arrays["student_hidden"], arrays["student_weight"]
    names = ("hidden", "weight") if form == "full" else ("ids", "logprobs")
    function = token_divergence if form == "full" else top_k_divergence
    teacher = (arrays[f"teacher_{name}"] for name in names)
    temperature = options.pop("temperature", TEMPERATURE)
    return function(*student, *teacher, arrays["mask"], temperature, implementation=implementation, **options)


def _values_and_gradients(form: str, case: Case, arrays, implementation: str, betas=BETAS):
    """For each beta the divergences and the gradients of their weighted sum, in the student's arrays."""
    shape = arrays["mask"].shape
    wave = jnp.cos(jnp.arange(arrays["mask"].size, dtype=jnp.float32)).reshape(shape)

    def run(student, others):
        def loss(student, beta):
            values = _divergence(form, case, student | others, beta, implementation)
            return (values * wave).sum(), values

        return [jax.value_and_grad(loss, has_aux=True)(student, beta) for beta in betas]

    students = {name: value for name, value in arrays.items() if name.startswith("student")}
    others = {name: value for name, value in arrays.items() if name not in students}
    compiled = jax.jit(run, compiler_options=UNOPTIMISED)
    return [(values, *gradients.values()) for (_, values), gradients in compiled(students, others)]


@pytest.mark.parametrize("form", ["full", "top_k"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_dense_reference(case, form):
    """Value and gradient, of one divergence a case in turn. Caught: the weights of the mixture or of its two parts
    exchanged; the division by the temperature left out of the gradient; a gradient at the token in place of the state
    before it; the columns that only the student has given a logit of 0."""
    arrays, betas = _inputs(case), (BETAS[CASES.index(case) % 3],)
    found, expected = (_values_and_gradients(form, case, arrays, name, betas) for name in ("xla", "reference"))
    # float32: sums of some 50 terms of a few units, rounded; bfloat16: gradients rounded on their way to a product.
    tolerance = 2e-2 if case.dtype == "bfloat16" else 5e-6
    for value, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert value.dtype == wanted.dtype
        value, wanted = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
        assert np.abs(value - wanted).max() <= tolerance * max(np.abs(wanted).max(), 1.0)


def _oracle(case: Case, arrays, beta: float, candidates: bool):
    """Loops in float64 over the counted tokens: the textbook's sums."""
    values = {name: np.float64(array) for name, array in arrays.items()}
    found = np.zeros(arrays["mask"].shape)
    for r, t in np.argwhere(np.asarray(arrays["mask"])):
        if t == 0:
            continue
        p, q = (
            np.exp(values[f"{name}_weight"][: case.vocab_size] @ values[f"{name}_hidden"][r, t - 1] / TEMPERATURE)
            for name in ("student", "teacher")
        )
        p, q = p / p.sum(), q / q.sum()
        if candidates:
            ids = np.asarray(arrays["teacher_ids"])[r, t]
            p, q = (np.append(x[ids], max(np.delete(x, ids).sum(), 1e-7)) for x in (p, q))
        m = {0.0: p, 1.0: q}.get(beta, beta * q + (1 - beta) * p)
        to_teacher, to_student = (q * np.log(q / m)).sum(), (p * np.log(p / m)).sum()
        found[r, t] = to_teacher + to_student if beta in (0, 1) else beta * to_teacher + (1 - beta) * to_student
    return found


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_equals_the_textbook_and_finite_differences(form):
    """Values in float64, gradients along a random direction. Caught: a sign of a gradient; forward and reverse KL
    exchanged; the softmax's own term left out; a tail without its mass, its gradient, or with the candidates in it."""
    case = CASES[1]
    arrays = _inputs(case)
    wave = np.cos(np.arange(arrays["mask"].size)).reshape(arrays["mask"].shape)
    rng = np.random.default_rng(1)
    for beta, (values, *gradients) in zip(BETAS, _values_and_gradients(form, case, arrays, "xla"), strict=True):
        expected = _oracle(case, arrays, beta, form == "top_k")
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
        assert (expected >= 0).all() and expected.max() > 0.05
        for name, gradient in zip(("student_hidden", "student_weight"), gradients, strict=True):
            direction, step = rng.standard_normal(gradient.shape), 1e-4
            start = np.float64(arrays[name])
            ahead, behind = (
                (wave * _oracle(case, {**arrays, name: start + sign * step * direction}, beta, form == "top_k")).sum()
                for sign in (1, -1)
            )
            slope = (np.float64(gradient) * direction).sum()
            np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-5)


def test_a_student_that_is_the_teacher():
    """No divergence and no gradient, but for rounding."""
    case = CASES[0]
    arrays = _inputs(case)
    arrays |= {"student_hidden": arrays["teacher_hidden"], "student_weight": arrays["teacher_weight"]}
    for values, *gradients in _values_and_gradients("full", case, arrays, "xla"):
        assert np.abs(values).max() < 1e-6
        assert all(np.abs(gradient).max() < 1e-6 for gradient in gradients)


def test_all_candidates_equal_the_whole_vocabulary():
    """With every token a candidate the classes are the tokens."""
    case = next(case for case in CASES if case.name == "all_are_candidates")
    arrays = _inputs(case)
    full, classes = (_values_and_gradients(form, case, arrays, "xla", (0.3,)) for form in ("full", "top_k"))
    for value, wanted in zip(jax.tree.leaves(classes), jax.tree.leaves(full), strict=True):
        np.testing.assert_allclose(value, wanted, atol=3e-6)


def test_absent_candidates():
    """Fewer than k: what stands in the absent places changes nothing."""
    case = CASES[1]
    arrays = _inputs(case)
    fewer = arrays | {name: arrays[name][..., :3] for name in ("teacher_ids", "teacher_logprobs")}
    ids = arrays["teacher_ids"].at[..., 3].set(-1).at[..., 4].set(case.vocab_size)
    absent = arrays | {
        "teacher_ids": ids,
        "teacher_logprobs": arrays["teacher_logprobs"].at[..., 3].set(-jnp.inf).at[..., 4].set(jnp.nan),
    }
    found, expected = (_values_and_gradients("top_k", case, which, "xla", (0.3,)) for which in (absent, fewer))
    for value, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-6)


def test_a_teacher_without_a_tail():
    """Candidates whose masses add up to 1, or a little more by rounding: finite, and bounded by the least tail."""
    case = CASES[1]
    arrays = _inputs(case)
    logprobs = arrays["teacher_logprobs"]
    arrays["teacher_logprobs"] = logprobs - jax.nn.logsumexp(logprobs, axis=-1, keepdims=True) + 1e-6
    for values, *gradients in _values_and_gradients("top_k", case, arrays, "xla"):
        assert np.isfinite(values).all() and all(np.isfinite(gradient).all() for gradient in gradients)
        assert np.max(values) < -np.log(1e-7)


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_values_at_masked_places_are_never_used(form):
    """NaN there must reach neither value nor gradient. Caught: the selection of gradients, or of values, removed."""
    case = CASES[1]
    arrays = _inputs(case)
    used = jnp.roll(arrays["mask"], -1, axis=1).at[:, -1].set(False)[:, :, None]  # the state before each counted one
    poisoned = {name: jnp.where(used, arrays[name], jnp.nan) for name in ("student_hidden", "teacher_hidden")}
    counted = (arrays["mask"] & (jnp.arange(case.num_tokens) > 0)[None, :])[:, :, None]
    poisoned["teacher_logprobs"] = jnp.where(counted, arrays["teacher_logprobs"], jnp.nan)
    for name in ("xla", "reference"):
        clean, dirty = (_values_and_gradients(form, case, which, name, (0.3,)) for which in (arrays, arrays | poisoned))
        for value, expected in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(np.asarray(value), np.asarray(expected))


@pytest.mark.parametrize(("form", "name"), [("full", "xla"), ("full", "reference"), ("top_k", "reference")])
def test_only_the_student_learns(form, name):
    """The teacher may be the student itself a moment ago, in one trace."""
    case = CASES[0]
    arrays = _inputs(case)
    floats = {name: value for name, value in arrays.items() if value.dtype == jnp.float32}

    def loss(values):
        return _divergence(form, case, arrays | values, 0.3, name).sum()

    gradients = jax.jit(jax.grad(loss), compiler_options=UNOPTIMISED)(floats)
    for key, gradient in gradients.items():
        assert np.any(gradient != 0) == key.startswith("student"), key


def test_temperature_of_each_token():
    """Value and gradient; and a hot distribution is nearly uniform, whosever it is."""
    case = CASES[1]
    arrays = _inputs(case)
    temperature = jnp.linspace(0.5, 1.5, arrays["mask"].size, dtype=jnp.float32).reshape(arrays["mask"].shape)

    def run(name, temperature):
        def loss(hidden, temperature):
            values = _divergence("full", case, arrays | {"student_hidden": hidden}, 1.0, name, temperature=temperature)
            return values.sum(), values

        compiled = jax.jit(jax.grad(loss, has_aux=True), compiler_options=UNOPTIMISED)
        return compiled(arrays["student_hidden"], temperature)

    found, expected = (run(name, temperature) for name in ("xla", "reference"))
    np.testing.assert_allclose(found[1], expected[1], atol=3e-6)
    np.testing.assert_allclose(found[0], expected[0], atol=3e-6)
    hotter = run("xla", jnp.full_like(temperature, 10.0))[1]
    assert float(hotter.max()) < 0.1 * float(expected[1].max())


def test_gradient_of_the_weight_adds_up_in_float32():
    """Many chunks of a bfloat16 weight. Caught: the sum over chunks in the weight's dtype."""
    case = Case("many_chunks", 1, 513, (8, 8), (16, 16), 16, 1, 1.0, dtype="bfloat16")
    arrays = _inputs(case)
    once = Case(**{**vars(case), "chunk_tokens": 513})
    gradient, expected = (
        np.asarray(_values_and_gradients("full", which, arrays, "xla", betas=(1.0,))[0][2], np.float64)
        for which in (case, once)
    )
    # A rounding of the result to bfloat16 on either side.
    assert np.abs(gradient - expected).max() <= 2 * 2**-8 * np.abs(expected).max()


def test_chunks_without_a_counted_token_are_skipped(monkeypatch):
    """Four places per row and chunk, five counted tokens in one row: two chunks of two projections."""
    runs = []
    project = xla.token_chunks.logits

    def counting(*arguments):
        jax.debug.callback(lambda: runs.append(1))
        return project(*arguments)

    monkeypatch.setattr(xla.token_chunks, "logits", counting)
    case = Case("skipping", 2, 16, (8, 8), (12, 12), 12, 8, 0.0)
    arrays = _inputs(case)
    arrays["mask"] = jnp.asarray(np.arange(32).reshape(2, 16) >= 27)
    jax.block_until_ready(_divergence("full", case, arrays, 1.0))
    jax.effects_barrier()
    assert len(runs) == 4


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_sharded_equals_unsharded(form):
    """Rows over data and fsdp, both vocabularies over tensor, with the layout fixed by `mesh_axes`."""
    case = Case("sharded", 8, 16, (16, 24), (64, 64), 61, 32, 0.5)
    arrays = _inputs(case)
    expected = _values_and_gradients(form, case, arrays, "xla", betas=(0.3,))
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"))

    def place(name, value):
        spec = PartitionSpec("tensor", "fsdp") if name.endswith("weight") else PartitionSpec(("data", "fsdp"))
        return jax.device_put(value, NamedSharding(mesh, spec))

    placed = {name: place(name, value) for name, value in arrays.items()}
    wave = jnp.cos(jnp.arange(arrays["mask"].size, dtype=jnp.float32)).reshape(arrays["mask"].shape)

    def loss(student, others):
        axes = (("data", "fsdp"), "tensor")
        values = _divergence(form, case, student | others, 0.3, mesh_axes=axes)
        return (values * wave).sum(), values

    students = {name: value for name, value in placed.items() if name.startswith("student")}
    others = {name: value for name, value in placed.items() if name not in students}
    with jax.set_mesh(mesh):
        gradients, values = jax.jit(jax.grad(loss, has_aux=True))(students, others)
    for value, wanted in zip((values, *gradients.values()), expected[0], strict=True):
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted), atol=5e-6)


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_logits_of_all_tokens_never_exist(form):
    """The compiled step holds less than the logits of all tokens of one model."""
    case = Case("memory", 4, 64, (8, 8), (512, 512), 512, 16, 1.0)
    arrays = _inputs(case)

    def loss(hidden, weight):
        return _divergence(form, case, arrays | {"student_hidden": hidden, "student_weight": weight}, 0.3).sum()

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(arrays["student_hidden"], arrays["student_weight"]).compile()
    )
    logits_bytes = case.num_rows * case.num_tokens * case.weight_rows[0] * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits_bytes


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_a_constant_weight_has_no_gradient_and_costs_none(form):
    """The gradient of the states is the same. Caught: the option not looked at; the accumulator, in float32 beside a
    bfloat16 weight, still carried over the chunks."""
    case = Case("constant", 2, 8, (8, 8), (24, 24), 24, 4, 1.0, dtype="bfloat16")
    arrays = _inputs(case)

    def gradients(weight_gradient, implementation="xla"):
        def loss(hidden, weight):
            given = arrays | {"student_hidden": hidden, "student_weight": weight}
            options = {"implementation": implementation, "weight_gradient": weight_gradient}
            return _divergence(form, case, given, 0.3, **options).sum()

        function = jax.grad(loss, argnums=(0, 1))
        student = arrays["student_hidden"], arrays["student_weight"]
        return function(*student), "f32[24,8]" in str(jax.make_jaxpr(function)(*student))

    (hidden, weight), accumulates = gradients(True)
    (hidden_alone, constant), accumulates_alone = gradients(False)
    assert np.any(np.float32(weight)) and accumulates
    assert not np.any(np.float32(constant)) and not accumulates_alone
    np.testing.assert_array_equal(np.float32(hidden), np.float32(hidden_alone))
    (_, constant), _ = gradients(False, "reference")
    assert not np.any(np.float32(constant))


@pytest.mark.parametrize(
    ("form", "changes", "options", "message"),
    [
        ("full", {"mask": lambda x: x.astype(jnp.int32)}, {}, "mask must be bool"),
        ("full", {}, {"beta": 1.5}, r"beta must be in \[0, 1\].*got 1.5"),
        ("full", {}, {"vocab_size": 45}, r"vocab_size must be in \[1, 44\]"),
        ("full", {}, {"vocab_size": None}, "student_weight has 48 rows and teacher_weight 44"),
        ("full", {"teacher_weight": lambda x: x.T}, {}, r"teacher_weight \[U, E\]"),
        ("full", {"teacher_hidden": lambda x: x[:, 1:]}, {}, "of the same tokens"),
        ("top_k", {"teacher_ids": lambda x: x[:, 1:]}, {}, r"teacher_ids must be \[R, T, k\]"),
        ("top_k", {"teacher_logprobs": lambda x: x[..., 1:]}, {}, "teacher_logprobs must be"),
        ("top_k", {}, {"implementation": "pallas"}, "implementation is 'pallas'"),
        ("top_k", {}, {"temperature": jnp.ones(3)}, "temperature must be a scalar"),
    ],
)
def test_wrong_inputs_are_named(form, changes, options, message):
    case = CASES[2]
    arrays = _inputs(case)
    arrays |= {name: change(arrays[name]) for name, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        _divergence(form, case, arrays, **{"beta": 1.0, **options})
