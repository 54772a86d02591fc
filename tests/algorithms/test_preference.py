"""Preference and label losses: cases, an oracle in float64, finite differences, extremes, and TRL where it is there."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.preference import (
    DPO_LOSSES,
    bradley_terry_loss,
    dpo_loss,
    kto_losses,
    kto_reference_point,
    mismatched_completions,
    preferred,
)
from tests.cases import case

RANDOM = np.random.default_rng(0)
PAIRS = [RANDOM.normal(-12, 4, 16).astype(np.float32) for _ in range(4)]  # policy and reference, chosen and rejected
TOKENS = [RANDOM.integers(1, 9, 16).astype(np.float32) for _ in range(2)]
SMOOTHING = {"sigmoid": (0.0, 0.1), "robust": (0.0, 0.1), "hinge": (0.0,), "ipo": (0.0,)}
LOSSES = [(loss_type, smoothing) for loss_type in DPO_LOSSES for smoothing in SMOOTHING[loss_type]]


def row(*values):
    return jnp.array(values, jnp.float32)


def log_sigmoid(x):
    """In float64, by another formula than the code's."""
    x = np.asarray(x, np.float64)
    return np.where(x < -30, x, -np.log1p(np.exp(-np.maximum(x, -30))))


def oracle(loss_type, policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta, smoothing):
    """As the papers write it, in float64: the chosen one's odds under the policy over those under the reference."""
    policy = np.asarray(policy_chosen, np.float64) - np.asarray(policy_rejected, np.float64)
    reference = np.asarray(ref_chosen, np.float64) - np.asarray(ref_rejected, np.float64)
    h = policy - reference
    if loss_type == "hinge":
        return np.where(beta * h < 1, 1 - beta * h, 0)
    if loss_type == "ipo":
        return h**2 - h / beta + 1 / (4 * beta**2)
    likely, flipped = -log_sigmoid(beta * h), -log_sigmoid(-beta * h)
    if loss_type == "sigmoid":
        return likely - smoothing * (likely - flipped)
    return likely + smoothing / (1 - 2 * smoothing) * (likely - flipped)


def test_l37_one_pair():
    """Caught: the difference the wrong way round; beta on one side only; smoothing in the place of its complement;
    IPO's target at 1 / beta; rewards without beta."""
    spec = case("L37")
    given, expected = spec["input"], spec["expected"]
    names = "chosen_logp_sum", "rejected_logp_sum", "ref_chosen", "ref_rejected"
    sums = [row(given[name]) for name in names]
    lengths = (given["len_chosen"], given["len_rejected"]) * 2
    means = [value / length for value, length in zip(sums, lengths, strict=True)]
    beta = given["beta"]

    outputs = dpo_loss(*sums, beta=beta)
    smooth = dpo_loss(*sums, beta=beta, label_smoothing=0.1).losses
    found = {
        "margin": outputs.margins / beta,
        "dpo_sigmoid": outputs.losses,
        "hinge": dpo_loss(*sums, beta=beta, loss_type="hinge").losses,
        "ipo_sums": dpo_loss(*sums, beta=beta, loss_type="ipo").losses,
        "ipo_token_means": dpo_loss(*means, beta=beta, loss_type="ipo").losses,
        "label_smoothing_0p1": smooth,
        "reward_chosen": outputs.chosen_rewards,
        "reward_rejected": outputs.rejected_rewards,
        "dpo_grad_wrt_margin": jax.grad(lambda chosen: dpo_loss(chosen, *sums[1:], beta=beta).losses.sum())(sums[0]),
    }
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value[0], expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("loss_type", "smoothing"), LOSSES)
def test_dpo_equals_the_papers(loss_type, smoothing):
    """Values, and gradients by central differences of the oracle. Caught: the flipped term of the robust loss added
    instead of subtracted; its division left out; the reference's completions exchanged; a gradient into rewards."""
    beta = 0.3
    expected = oracle(loss_type, *PAIRS, beta, smoothing)
    options = {"beta": beta, "loss_type": loss_type, "label_smoothing": smoothing}

    def total(*pairs):
        outputs = dpo_loss(*pairs, **options)
        return outputs.losses.sum() + 7 * outputs.margins.sum(), outputs

    arguments = [jnp.asarray(value) for value in PAIRS]
    gradients, outputs = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(*arguments)
    np.testing.assert_allclose(outputs.losses, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(outputs.chosen_rewards, beta * (PAIRS[0] - PAIRS[2]), rtol=1e-6)
    np.testing.assert_allclose(outputs.rejected_rewards, beta * (PAIRS[1] - PAIRS[3]), rtol=1e-6)
    step = 1e-4  # in float64: an error of its square
    for index, gradient in enumerate(gradients):
        ahead, behind = ([np.float64(value) for value in PAIRS] for _ in range(2))
        ahead[index] += step
        behind[index] -= step
        slope = oracle(loss_type, *ahead, beta, smoothing) - oracle(loss_type, *behind, beta, smoothing)
        np.testing.assert_allclose(gradient, slope / (2 * step), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(("loss_type", "smoothing"), LOSSES)
def test_extremes_stay_finite(loss_type, smoothing, sign):
    """Log-ratios of ±10,000. Caught: log(sigmoid(x)), which is -inf with a gradient that is NaN."""

    def total(*pairs):
        return dpo_loss(*pairs, beta=1.0, loss_type=loss_type, label_smoothing=smoothing).losses.sum()

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(row(sign * 1e4), row(-1.0), row(-1.0), row(-1.0))
    expected = oracle(loss_type, sign * 1e4, -1.0, -1.0, -1.0, 1.0, smoothing)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dpo"}, "loss_type is 'dpo'; it is one of sigmoid"),
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, r"label_smoothing is 0.5; it must be in \[0, 0.5\)"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "the loss 'ipo' has none"),
    ],
)
def test_options_out_of_range(options, message):
    """Caught: a smoothing that the loss silently ignores."""
    with pytest.raises(ValueError, match=message):
        dpo_loss(*(jnp.asarray(value) for value in PAIRS), **options)


@pytest.mark.parametrize("number", [1, 2])
def test_l39_kto(number):
    """Caught: the reference point not clamped; the undesirable branch with the desirable one's sign; a gradient
    through the reference point; the weights exchanged."""
    spec = case("L39")
    given, expected = spec["input"], spec["expected"]
    mismatched = row(*given[f"mismatched_logratios_case{number}"])
    ratios = row(*given["logratio_desirable"], *given["logratio_undesirable"])
    desirable = jnp.array([True, True, False])
    reference = jnp.full_like(ratios, -3.0)

    def losses(policy, policy_kl):
        point = kto_reference_point(policy_kl, jnp.zeros_like(policy_kl))
        return kto_losses(
            policy, reference, desirable, point,
            beta=given["beta"], desirable_weight=given["lambda_D"], undesirable_weight=given["lambda_U"],
        ), point  # fmt: skip

    outputs, point = losses(ratios + reference, mismatched)
    np.testing.assert_allclose(point, expected[f"z0_case{number}"], atol=1e-6)
    np.testing.assert_allclose(outputs.losses, expected[f"losses_case{number}"], atol=1e-6)
    np.testing.assert_allclose(outputs.losses.mean(), expected[f"mean_case{number}"], atol=1e-6)
    np.testing.assert_allclose(outputs.rewards, given["beta"] * ratios, rtol=1e-6, atol=1e-7)
    gradient = jax.grad(lambda kl: losses(ratios + reference, kl)[0].losses.sum())(mismatched)
    assert np.abs(gradient).max() == expected["grad_through_z0"]
    of_point = jax.grad(lambda kl: kto_reference_point(kl, jnp.zeros_like(kl)))(mismatched)
    assert np.abs(of_point).max() == expected["grad_through_z0"]


def test_kto_gradient():
    """By central differences in float64, and at ±10,000. Caught: a gradient into the reward; a sign of a branch."""
    desirable = np.arange(16) % 3 > 0
    weights = np.where(desirable, 0.7, 1.3)
    kl = 0.4

    def slow(policy, reference):
        utility = np.where(desirable, 1, -1) * 0.2 * (policy - reference - kl)
        return weights * (1 - np.exp(log_sigmoid(utility)))

    def fast(policy, reference, kl=kl):
        outputs = kto_losses(
            policy, reference, jnp.asarray(desirable), jnp.float32(kl),
            beta=0.2, desirable_weight=0.7, undesirable_weight=1.3,
        )  # fmt: skip
        return outputs.losses.sum() + 5 * outputs.rewards.sum()

    policy, reference = PAIRS[0], PAIRS[2]
    gradient = jax.grad(fast)(jnp.asarray(policy), jnp.asarray(reference))
    step = 1e-4
    slope = slow(np.float64(policy) + step, reference) - slow(np.float64(policy) - step, reference)
    np.testing.assert_allclose(gradient, slope / (2 * step), rtol=1e-5, atol=1e-7)
    # The reference point is held fixed by the losses as well, whoever made it.
    assert jax.grad(fast, argnums=2)(jnp.asarray(policy), jnp.asarray(reference), 0.4) == 0
    far = jnp.where(jnp.arange(16) % 2 == 0, 1e4, -1e4)
    assert np.isfinite(jax.grad(fast)(far, jnp.asarray(reference))).all()


def test_mismatched_completions_are_rotated_by_one():
    """Caught: a rotation the other way; one by two."""
    assert mismatched_completions(["a", "b", "c", "d"]).tolist() == [3, 0, 1, 2]
    assert mismatched_completions(["a", "b"]).tolist() == [1, 0]


@pytest.mark.parametrize("prompts", ["aabb", "abab", "aabbccc", "abacada", "aaab", "baaaaca", "abcabcabd", "aabcaade"])
def test_no_mismatched_completion_has_its_own_prompt(prompts):
    """Caught: rotation by one with prompts that repeat; the majority's rows left as the rotation has them; every
    completion of another prompt replaced by one and the same."""
    partners = mismatched_completions(list(prompts))
    assert all(prompts[partner] != prompt for partner, prompt in zip(partners, prompts, strict=True))
    uses = np.bincount(partners, minlength=len(prompts))
    most = max(map(prompts.count, prompts))
    if 2 * most <= len(prompts):
        assert (uses == 1).all()
    else:
        of_others = [uses[n] for n, prompt in enumerate(prompts) if prompts.count(prompt) < most]
        assert max(of_others) - min(of_others) <= 1
    assert partners.tolist() == mismatched_completions([prompt.encode() for prompt in prompts]).tolist()


@pytest.mark.parametrize("prompts", [["a"], ["a", "a", "a"]])
def test_one_prompt_has_no_mismatch(prompts):
    """Caught: a row's own completion in place of none."""
    assert mismatched_completions(prompts) is None


def test_l41_bradley_terry():
    """Caught: log(sigmoid(x)); the margin added instead of subtracted; a tie counted as right."""
    spec = case("L41")
    chosen, rejected, margin = (row(*spec["input"][name]) for name in ("chosen", "rejected", "margin"))
    losses = bradley_terry_loss(chosen, rejected, margin)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, spec["expected"]["loss"], rtol=1e-6)
    np.testing.assert_allclose(losses.mean(), spec["expected"]["mean"], rtol=1e-6)
    assert preferred(chosen, rejected).mean() == spec["expected"]["accuracy_ties_not_counted"]
    gradient = jax.grad(lambda x: bradley_terry_loss(x, rejected, margin).sum())(chosen)
    expected = -1 / (1 + np.exp(np.float64(chosen) - np.float64(rejected) - np.float64(margin)))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_centering():
    """Caught: the difference in place of the sum; the coefficient left out."""
    chosen, rejected = row(2.0, -1.0), row(1.0, -4.0)
    plain = bradley_terry_loss(chosen, rejected)
    centered = bradley_terry_loss(chosen, rejected, center_rewards_coefficient=0.01)
    np.testing.assert_allclose(centered - plain, [0.09, 0.25], rtol=1e-5)
    far = row(1e4, -1e4)
    assert np.isfinite(jax.grad(lambda x: bradley_terry_loss(x, -x, center_rewards_coefficient=0.01).sum())(far)).all()


# -- TRL itself, where it is installed ---------------------------------------------------------------------------


class _OneProcess:
    """What TRL's trainers ask of an accelerator."""

    device = "cpu"

    def gather(self, value):
        return value

    gather_for_metrics = gather


def _trl_loss(trainer_class, inputs, logps, tokens, **attributes):
    """TRL's own loss of completions whose log-probs are given: the trainer's method on a model that returns them."""
    torch = pytest.importorskip("torch")
    width = int(max(tokens)) + 1
    mask = torch.tensor([[0] + [1] * int(n) + [0] * (width - 1 - int(n)) for n in tokens])

    per_token = torch.tensor(np.asarray(logps, np.float64) / tokens)[:, None] * mask[:, 1:]
    zeros = torch.zeros_like(per_token)
    outputs = types.SimpleNamespace(log_probs=per_token, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = types.SimpleNamespace(
        accelerator=_OneProcess(), model=types.SimpleNamespace(training=True), aux_loss_enabled=False,
        _total_train_tokens=0, _tp_size=1,
        _metrics={"train": collections.defaultdict(list)}, **attributes,
    )  # fmt: skip
    batch = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    batch |= {name: torch.tensor(value) for name, value in inputs.items()}
    return float(trainer_class._compute_loss(trainer, lambda **_: outputs, batch, False))


@pytest.mark.parametrize(("loss_type", "smoothing"), [entry for entry in LOSSES if entry != ("sigmoid", 0.1)])
def test_dpo_equals_trl(loss_type, smoothing):
    """TRL has no smoothing of `sigmoid` any more; that one has its case above."""
    trl = pytest.importorskip("trl")
    tokens = np.concatenate(TOKENS)
    expected = _trl_loss(
        trl.DPOTrainer,
        {"ref_chosen_logps": np.float64(PAIRS[2]), "ref_rejected_logps": np.float64(PAIRS[3])},
        np.concatenate(PAIRS[:2]),
        tokens,
        beta=0.3, loss_types=[loss_type], loss_weights=[1.0], label_smoothing=smoothing, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False,
    )  # fmt: skip
    lengths = TOKENS * 2 if loss_type == "ipo" else [np.float32(1)] * 4
    pairs = [jnp.asarray(value / length) for value, length in zip(PAIRS, lengths, strict=True)]
    found = dpo_loss(*pairs, beta=0.3, loss_type=loss_type, label_smoothing=smoothing).losses.mean()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_kto_equals_trl():
    trl = pytest.importorskip("trl")
    torch = pytest.importorskip("torch")
    policy, ref_kl, reference, policy_kl = PAIRS
    labels = np.arange(16) % 3 > 0
    expected = _trl_loss(
        trl.KTOTrainer,
        {"label": labels, "ref_logps": np.float64(reference), "ref_KL_logps": np.float64(ref_kl)},
        policy,
        TOKENS[0],
        beta=0.3, loss_type="kto", desirable_weight=0.8, undesirable_weight=1.2, calculate_KL=True,
        precompute_ref_logps=True, _compute_kl_logps=lambda model, batch: torch.tensor(np.float64(policy_kl)),
    )  # fmt: skip
    kl = kto_reference_point(jnp.asarray(policy_kl), jnp.asarray(ref_kl))
    assert kl > 0
    found = kto_losses(
        jnp.asarray(policy), jnp.asarray(reference), jnp.asarray(labels), kl,
        beta=0.3, desirable_weight=0.8, undesirable_weight=1.2,
    )  # fmt: skip
    np.testing.assert_allclose(found.losses.mean(), expected, rtol=1e-5)


def test_bradley_terry_equals_trl():
    trl = pytest.importorskip("trl")
    torch = pytest.importorskip("torch")
    chosen, rejected, margin = PAIRS[0], PAIRS[1], np.abs(PAIRS[2])
    logits = torch.tensor(np.concatenate([chosen, rejected])[:, None])
    trainer = types.SimpleNamespace(
        accelerator=_OneProcess(), _total_train_tokens=0, _tp_size=1,
        _metrics={"train": collections.defaultdict(list)},
        model=types.SimpleNamespace(training=True), args=types.SimpleNamespace(center_rewards_coefficient=0.01),
    )  # fmt: skip
    inputs = {"margin": torch.tensor(margin), "attention_mask": torch.ones(1)}
    expected = trl.RewardTrainer.compute_loss(trainer, lambda **_: types.SimpleNamespace(logits=logits), inputs)
    found = bradley_terry_loss(
        jnp.asarray(chosen), jnp.asarray(rejected), jnp.asarray(margin), center_rewards_coefficient=0.01
    ).mean()
    np.testing.assert_allclose(found, float(expected), rtol=1e-5)
