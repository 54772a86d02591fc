"""The optimizer by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.config import MeshConfig, OptimizerConfig
from jaxrl_llm.optimizer import apply, learning_rate, make_optimizer
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.update import init_role
from tests.cases import case


def adam_by_hand(config_input):
    """Parameters after each step of the case, through `apply`."""
    config = OptimizerConfig(
        learning_rate=config_input["lr"],
        b1=config_input["b1"],
        b2=config_input["b2"],
        eps=config_input["eps"],
        weight_decay=0.0,
    )
    optimizer = make_optimizer(config, 10)
    params = {"w": jnp.float32(config_input["w0"])}
    state = optimizer.init(params)
    seen = []
    for gradient in config_input["grads"]:
        params, state, _, _ = apply(optimizer, {"w": jnp.float32(gradient)}, state, params, 0.0)
        seen.append(float(params["w"]))
    return seen


def test_c01_adam():
    """Caught: no bias correction; eps inside the root."""
    spec = case("C01")
    # float32: the moments round at 1e-7, and the update divides two of them.
    np.testing.assert_allclose(adam_by_hand(spec["input"]), spec["expected"]["w"], atol=1e-5)
    first = {**spec["input"], "grads": [0.5], "eps": 0.5}  # large enough to see: 0.5 / (0.5 + 0.5)
    np.testing.assert_allclose(adam_by_hand(first), [1.0 - 0.1 * 0.5], atol=1e-6)


def test_l43_the_clip_bounds_the_global_norm():
    """Caught: clipping each entry in place of the global norm; reporting the norm after the clip. That the gradient is
    a whole batch's is tested with the update."""
    spec = case("L43")
    mean = np.mean(spec["input"]["micro_gradients"], axis=0).astype(np.float32)
    sgd = make_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0), 1)
    params = {"w": jnp.zeros(2)}
    new, _, norm, finite = apply(sgd, {"w": jnp.asarray(mean)}, sgd.init(params), params, spec["input"]["max_norm"])
    assert float(norm) == pytest.approx(spec["expected"]["global_norm"])
    np.testing.assert_allclose(-new["w"], spec["expected"]["clipped"], atol=1e-6)
    assert finite


def test_weight_decay_is_decoupled():
    """Caught: decay added to the gradient, which Adam normalises away."""
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.25)
    optimizer = make_optimizer(config, 1)
    params = {"w": jnp.float32(2.0)}
    new, *_ = apply(optimizer, {"w": jnp.float32(0.0)}, optimizer.init(params), params, 0.0)
    assert float(new["w"]) == pytest.approx(2.0 - 0.1 * 0.25 * 2.0)  # Adam would make 0.1 of it


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_learning_rate(schedule):
    """Caught: a first update of rate 0; a warm-up that ends one update late; a decay that ends above its floor."""
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, schedule=schedule, final_fraction=0.1)
    rate = [float(learning_rate(config, 12)(step)) for step in range(13)]
    np.testing.assert_allclose(rate[:4], [0.25, 0.5, 0.75, 1.0], atol=1e-6)
    assert rate[4] == pytest.approx(1.0)
    assert rate[12] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=1e-6)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rate[4:]))


def test_the_program_of_one_cpu_copies_no_moments():
    """Caught: moments that XLA copies when the program begins, since parameters and moments are both computed from
    them."""
    params = {name: jnp.ones((96, 64)) for name in "ab"}
    optimizer = make_optimizer(OptimizerConfig(), 10)
    state = optimizer.init(params)

    def step(params, state, x):
        gradients = jax.grad(lambda params: sum(jnp.tanh(x @ leaf).sum() for leaf in params.values()))(params)
        return apply(optimizer, gradients, state, params, 1.0)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, jnp.ones((8, 96))).compile()
    assert not [line for line in compiled.as_text().splitlines() if "f32[96,64]{1,0} copy(" in line]


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "pipeline": 2}], ids=["fsdp", "pipeline"])
def test_a_state_on_the_host_is_stepped_in_pieces(axes):
    """Two updates and one whose gradient is not finite: bit for bit those of a state on the devices, each array in the
    memory where it was; and a program that gathers nothing.

    Caught: counts that go on with every piece; a layer taken for the next one; layers of all stages cut as if they were
    on one (gathers).
    """
    mesh = make_mesh(MeshConfig(**{"data": 1, "tensor": 1, **axes}), jax.devices()[:4])
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=4, weight_decay=0.1), 10)
    random = np.random.default_rng(0)
    shapes = {"blocks": {"run_0": {"matrix": (4, 8, 16), "scale": (4, 8)}}, "embed": {"weight": (24, 8)}}

    def draw(scale):
        whole = jax.tree.map(lambda shape: np.float32(scale * random.normal(size=shape)), shapes, is_leaf=is_shape)
        return jax.device_put(whole, shardings)

    def is_shape(leaf):
        return isinstance(leaf, tuple)

    specs = {"blocks": {"run_0": {"matrix": ("pipeline", "fsdp"), "scale": ("pipeline",)}}, "embed": {"weight": ()}}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(*spec)), specs, is_leaf=is_shape)
    start, *gradients = draw(1.0), draw(0.1), draw(0.1), jax.tree.map(lambda leaf: leaf * jnp.nan, draw(0.1))

    def run(on_host):
        role, role_shardings = init_role(start, optimizer, shardings, mesh, moments_on_host=on_host)
        params, state = role.params, role.opt_state
        told = NamedSharding(mesh, PartitionSpec())
        step = jax.jit(
            lambda gradients, state, params: apply(optimizer, gradients, state, params, 1.0, 3.0),
            out_shardings=(role_shardings.params, role_shardings.opt_state, told, told),
        )
        with jax.set_mesh(mesh):
            text = step.lower(gradients[0], state, params).compile().as_text()
            for gradient in gradients:
                params, state, *_ = step(gradient, state, params)
        kinds = [{leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)} for tree in (params, state)]
        assert kinds == [{"device"}, {"pinned_host" if on_host else "device"}]
        assert "all-gather" not in text and "collective-permute" not in text
        return jax.device_get((params, state))

    whole, pieces = run(False), run(True)
    assert int(whole[1][0].count) == 2
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)
