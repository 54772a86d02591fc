"""One gradient: loss and gradient do not depend on micro-batch split, packing, padding or mesh.

Compared after one SGD step (rate 1, no clipping), since Adam hides or magnifies a difference.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import optimizer, packing, update
from jaxrl_llm.algorithms import ALGORITHMS, aggregation
from jaxrl_llm.algorithms.grpo import GRPOOptions
from jaxrl_llm.algorithms.interface import Sequences
from jaxrl_llm.config import MeshConfig, OptimizerConfig
from jaxrl_llm.models.config import ModelConfig, RopeConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import TRAINING, batch_shards, make_mesh

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=48,
    padded_vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    max_position=64,
    norm_eps=1e-5,
    windows=(None, 4),  # the second layer's is shorter than most sequences
    rope=RopeConfig(),
    tie_embeddings=True,
)
OPTIONS = GRPOOptions(kl_coef=0.1, entropy_coef=0.01, loss_aggregation="seq-mean-token-mean")
SEQUENCES, GROUP = 12, 4


def make_sequences() -> Sequences:
    generator = np.random.default_rng(0)
    tokens, masks, parts = [], [], {name: [] for name in ("advantages", "old", "ref", "sampler")}
    for n in range(SEQUENCES):
        if n % GROUP == 0:
            prompt_ids = generator.integers(0, CONFIG.vocab_size, generator.integers(1, 6))
        prompt, response = len(prompt_ids), generator.integers(1, 10)
        response_ids = generator.integers(0, CONFIG.vocab_size, response)
        tokens.append(np.concatenate([prompt_ids, response_ids]).astype(np.int32))
        mask = np.arange(prompt + response) >= prompt
        masks.append(mask)
        parts["advantages"].append(np.where(mask, generator.normal(), 0).astype(np.float32))
        for name in ("old", "ref", "sampler"):
            parts[name].append(np.where(mask, -3.9 + 0.2 * generator.normal(size=len(mask)), 0).astype(np.float32))
    masks[3][:] = False  # a sequence that is left out, such as one without a score
    return Sequences(
        tokens,
        masks,
        np.arange(SEQUENCES, dtype=np.int32) // GROUP,
        advantages=parts["advantages"],
        old_logprobs=parts["old"],
        ref_logprobs=parts["ref"],
        sampler_logprobs=parts["sampler"],
    )


@functools.cache
def initial_params():
    return jax.device_get(Decoder(CONFIG).init(jax.random.key(1)))


def one_sgd_step(
    mesh_shape=(1, 1, 1, 1),
    row_tokens=16,
    micro_batch_tokens=64,
    extra_micro_batches=0,
    options=OPTIONS,
    remat="none",
    share_prompts=False,
    clip_norm=0.0,
):
    """Parameters after one step, its loss and the gradient's norm, on a (data, fsdp, tensor, pipeline) mesh.

    What the micro-batches without data hold is NaN.
    """
    data, fsdp, tensor, pipeline = mesh_shape
    config = MeshConfig(data=data, fsdp=fsdp, tensor=tensor, pipeline=pipeline)
    mesh = make_mesh(config, jax.devices()[: data * fsdp * tensor * pipeline])
    decoder = Decoder(CONFIG)
    params = jax.device_put(initial_params(), TRAINING.shardings(mesh, decoder.logical_axes()))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    sgd = optimizer.make_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0), 1)
    role, role_shardings = update.init_role(params, sgd, shardings, mesh)
    forward = update.Forward(decoder, temperature=0.7, dtype=np.float32, remat=remat, chunk_tokens=8)
    step = update.make_update(forward, ALGORITHMS["grpo"], options, sgd, clip_norm, role_shardings, mesh)
    shape = packing.RowShape.of(row_tokens, micro_batch_tokens, batch_shards(mesh))
    batch, _ = packing.pack(
        make_sequences(),
        shape,
        aggregation=options.loss_aggregation,
        max_response_tokens=10,
        max_micro_batches=packing.micro_batches_for(SEQUENCES, row_tokens, shape) + extra_micro_batches,
        share_prompts=share_prompts,
    )
    batch.rows.old_logprobs[batch.num_micro_batches :] = np.nan
    role, metrics = step(
        role,
        update.put_rows(batch, mesh),
        np.int32(batch.num_micro_batches),
        np.float32(batch.denominator),
        old_is_actor=False,
    )
    return jax.device_get(role.params), {name: float(value) for name, value in metrics.items()}


@functools.cache
def reference_step(clip_norm=0.0):
    # One sequence a row, all rows in one micro-batch: nothing is split or packed.
    return one_sgd_step(row_tokens=16, micro_batch_tokens=16 * SEQUENCES, clip_norm=clip_norm)


def assert_same_step(params, metrics, clip_norm=0.0):
    expected_params, expected = reference_step(clip_norm)
    difference = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), params, expected_params)
    relative = np.sqrt(sum(jax.tree.leaves(difference))) / expected["policy/grad_norm"]
    assert relative < 1e-5  # float32 sums in another order; measured 1e-7 to 1e-6
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "split",
    [
        {"row_tokens": 16, "micro_batch_tokens": 16},  # a row at a time
        {"row_tokens": 40, "micro_batch_tokens": 40},  # several sequences in a row, a row at a time
        {"row_tokens": 23, "micro_batch_tokens": 69, "extra_micro_batches": 3},  # odd width, empty micro-batches
        {"row_tokens": 40, "micro_batch_tokens": 80, "share_prompts": True},  # a prompt with its completions
        {"row_tokens": 17, "micro_batch_tokens": 34, "share_prompts": True},  # groups that do not fit one row
    ],
    ids=["micro-batches", "packed", "padded", "shared prompts", "shared in part"],
)
def test_split_and_packing_do_not_change_the_update(split):
    """Case T25 (rows of 16 columns and of 7 more). Caught: weights normalised per micro-batch; positions that run on
    over a row; a mask that lets one packed sequence see another; a loop that also runs over the empty micro-batches; a
    completion that does not see its prompt, or sees another completion; a first token predicted by the wrong column."""
    assert_same_step(*one_sgd_step(**split))


def formula(params, options):
    """Loss and metrics of `make_sequences` as one would write them down: a row a sequence, all logits, no weights."""
    sequences, width = make_sequences(), 16
    field = {
        name: jnp.stack([np.pad(one, (0, width - len(one))) for one in getattr(sequences, name)])
        for name in ("tokens", "loss_mask", "advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs")
    }
    positions = jnp.broadcast_to(jnp.arange(width), (SEQUENCES, width))
    decoder = Decoder(CONFIG)
    hidden = decoder.hidden(params, field["tokens"], positions, jnp.ones_like(positions))
    log_p = jax.nn.log_softmax(decoder.logits(params, hidden)[:, :-1] / 0.7)
    actor = jnp.pad(jnp.take_along_axis(log_p, field["tokens"][:, 1:, None], 2)[..., 0], ((0, 0), (1, 0)))
    entropy = jnp.pad(-(jnp.exp(log_p) * log_p).sum(-1), ((0, 0), (1, 0)))
    mask, advantages = field["loss_mask"], field["advantages"]
    ratio = jnp.exp(actor - field["old_logprobs"])
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    policy = -jnp.where(advantages < 0, jnp.maximum(surrogate, 3 * advantages), surrogate)
    to_reference = field["ref_logprobs"] - actor
    kl = jnp.exp(to_reference) - 1 - to_reference
    lengths = np.array([one.sum() for one in sequences.loss_mask])
    rows = np.flatnonzero(lengths)

    def aggregated(values):
        sums = jnp.where(mask, values, 0.0).sum(1)
        return {
            "token-mean": sums.sum() / lengths.sum(),
            "seq-mean-token-mean": (sums[rows] / lengths[rows]).mean(),
            "seq-mean-token-sum": sums[rows].mean(),
            "seq-mean-token-sum-norm": (sums[rows] / 10).mean(),
        }[options.loss_aggregation]

    def mean(values):
        return jnp.where(mask, values, 0.0).sum() / mask.sum()

    difference = jnp.abs(field["old_logprobs"] - field["sampler_logprobs"])
    total = aggregated(policy + options.kl_coef * kl - options.entropy_coef * entropy)
    return total, {
        "loss/total": total,
        "loss/policy": aggregated(policy),
        "kl/mean": mean(kl),
        "entropy/mean": mean(entropy),
        "policy/clip_fraction_high": mean((ratio > 1.2) & (advantages > 0)),
        "policy/clip_fraction_low": mean((ratio < 0.8) & (advantages < 0)),
        "policy/approx_kl": mean(field["old_logprobs"] - actor),
        "policy/ratio_mean": mean(ratio),
        "rollout/logprob_diff_mean": mean(difference),
        "rollout/logprob_diff_max": jnp.where(mask, difference, 0.0).max(),
    }


@pytest.mark.parametrize("mode", aggregation.MODES)
def test_the_update_is_the_gradient_of_the_formula(mode):
    """Packed and split, against the formula in plain jax. Caught: the entropy added to the loss; a KL without
    the weights of the aggregation; the KL of the old policy; a gradient divided by the tokens in every mode; a clip
    fraction that counts either sign of the advantage; `approx_kl` the wrong way round."""
    options = dataclasses.replace(OPTIONS, loss_aggregation=mode)
    params, metrics = one_sgd_step(row_tokens=40, micro_batch_tokens=80, share_prompts=True, options=options)
    (_, expected), gradient = jax.jit(jax.value_and_grad(functools.partial(formula, options=options), has_aux=True))(
        initial_params()
    )
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert min(expected["policy/clip_fraction_high"], expected["policy/clip_fraction_low"]) > 0.02
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    # float32 sums in another order: about 1e-6 of the norm
    difference = jax.tree.map(lambda new, old, g: np.sum(np.square(old - g - new)), params, initial_params(), gradient)
    assert np.sqrt(sum(jax.tree.leaves(difference))) < 1e-5 * norm


def test_the_clip_is_on_the_gradient_of_all_micro_batches():
    """L43 in the update. Caught: clipping the gradient of each micro-batch."""
    unclipped, expected = reference_step()
    params, metrics = one_sgd_step(row_tokens=16, micro_batch_tokens=16, clip_norm=0.1)
    scale = 0.1 / expected["policy/grad_norm"]
    assert scale < 0.5 and metrics["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-4)
    jax.tree.map(
        lambda new, whole, old: np.testing.assert_allclose(new, old + scale * (whole - old), atol=1e-6),
        params,
        unclipped,
        initial_params(),
    )


@pytest.mark.parametrize("mesh_shape", [(2, 2, 2, 1), (8, 1, 1, 1), (1, 4, 2, 1)], ids=str)
def test_mesh_does_not_change_the_update(mesh_shape):
    """Caught: a denominator that counts one device's rows."""
    assert_same_step(*one_sgd_step(mesh_shape, row_tokens=40, micro_batch_tokens=40, share_prompts=True))


def test_remat_does_not_change_the_update():
    """Caught: a checkpointed block that reads another layer's window."""
    assert_same_step(*one_sgd_step(remat="full"))


def test_the_clip_is_on_the_accumulated_gradient():
    """L43 in the update. Caught: clipping each micro-batch's gradient."""
    clip_norm = reference_step()[1]["policy/grad_norm"] / 2
    assert_same_step(*one_sgd_step(row_tokens=16, micro_batch_tokens=16, clip_norm=clip_norm), clip_norm)


def test_the_step_moves_the_parameters():
    """Without this the equalities above would hold for an update that does nothing. Caught: one that returns
    the old parameters."""
    params, metrics = reference_step()
    assert metrics["policy/update_skipped"] == 0
    assert metrics["policy/grad_norm"] > 1e-2
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), params, initial_params())
    assert min(jax.tree.leaves(moved)) > 0


def test_a_gradient_that_is_not_finite_changes_nothing():
    """Caught: an update that is made whatever the norm is, which writes NaN into every parameter."""
    params, metrics = one_sgd_step(options=dataclasses.replace(OPTIONS, kl_coef=float("inf")))
    assert metrics["policy/update_skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, params, initial_params())
