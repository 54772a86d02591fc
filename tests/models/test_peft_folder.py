"""Adapters on disk: folded into an exported model, and alone in PEFT's format."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.loading import load_model
from jaxrl_llm.models.lora import Lora, merge_trees
from jaxrl_llm.models.peft_folder import CONFIG, WEIGHTS, load_adapter, save_adapter
from jaxrl_llm.sharding import TRAINING, make_mesh
from tests.models.test_lora import ALL, adapted_model, tokens_of

QWEN2 = {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "windows": (None, None)}


def bits_equal(tree, wanted):
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, tree, wanted)


def test_an_exported_model_computes_the_same_without_adapters(tmp_path):
    """A plain folder of a model with biases, whose logits are those of the model with adapters but for rounding: W + AB
    is rounded once a weight, 1e-5 of the largest logit. Caught: the base's weights written; A and B of another
    layer."""
    decoder, base, adapters = adapted_model(**QWEN2)
    params = merge_trees(base, adapters)
    export_model(tmp_path / "model", decoder, params, None)
    plain, loaded = load_model(tmp_path / "model", vocab_multiple=64)
    assert plain.lora is None
    bits_equal(loaded["blocks"], lora.fold(params, ALL)["blocks"])

    def logits(decoder, params):
        hidden = decoder.hidden(params, *tokens_of(2, 9), unroll=False)
        return decoder.logits(params, hidden)[..., :61]

    exported, wanted = (jax.jit(logits, static_argnums=0)(*model) for model in ((plain, loaded), (decoder, params)))
    assert float(jnp.abs(exported - wanted).max()) < 1e-5 * float(jnp.abs(wanted).max())


def test_files_mean_what_peft_says(tmp_path):
    """Names and orientation by PEFT's rule, W + lora_alpha / r * B A of the file's matrices, against the exported
    model. Caught: A and B exchanged; A in our orientation; heads and head size of o merged in the wrong order.

    The same products, added in another order: 1e-6."""
    decoder, base, adapters = adapted_model(**QWEN2)
    save_adapter(tmp_path / "adapter", decoder, adapters, base_model="some/base")
    export_model(tmp_path / "base", decoder.with_lora(None), base, None)
    export_model(tmp_path / "folded", decoder, merge_trees(base, adapters), None)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == "some/base"
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(config["target_modules"]) == modules
    tensors = safetensors.numpy.load_file(tmp_path / "adapter" / WEIGHTS)
    weights, folded = (
        safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("base", "folded")
    )
    checked = 0
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        expected = weight
        if module.split(".")[-1] in modules:
            a, b = (tensors.pop(f"base_model.model.{module}.lora_{kind}.weight") for kind in "AB")
            expected = weight + config["lora_alpha"] / config["r"] * b @ a
            checked += 1
        np.testing.assert_allclose(folded[name], expected, atol=1e-6)
    assert checked == 14 and not tensors


@pytest.mark.parametrize("targets", [("q", "v"), ("o", "up", "down")])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_adapter_reads_back_bit_for_bit(tmp_path, targets, sharded):
    decoder, _, adapters = adapted_model(Lora(3, 7.5, targets))
    plain = decoder.with_lora(None)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4]) if sharded else None
    if sharded:
        adapters = jax.device_put(adapters, TRAINING.shardings(mesh, lora.logical_axes(plain, decoder.lora)))
    save_adapter(tmp_path / "adapter", decoder, adapters)
    again, loaded = load_adapter(tmp_path / "adapter", plain, mesh=mesh, layout=TRAINING if sharded else None)
    assert again == decoder.lora
    bits_equal(loaded, adapters)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, loaded, adapters))


def saved(tmp_path, change=None, **options):
    """A saved adapter of q and v whose config and tensors were changed since, and the plain decoder."""
    decoder, _, adapters = adapted_model(Lora(4, 8.0, ("q", "v")))
    folder = tmp_path / "adapter"
    save_adapter(folder, decoder, adapters)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | options))
    if change:
        tensors = safetensors.numpy.load_file(folder / WEIGHTS)
        safetensors.numpy.save_file(change(tensors), folder / WEIGHTS)
    return folder, decoder.with_lora(None)


def test_what_peft_writes_otherwise_is_understood(tmp_path):
    """Targets as a pattern, the scale alpha / sqrt(r), bfloat16 tensors, and settings of dropout and of the start,
    which change nothing here. Caught: alpha / r whatever use_rslora."""
    import ml_dtypes

    folder, decoder = saved(
        tmp_path,
        lambda tensors: {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()},
        target_modules=r".*\.(q|v)_proj",
        use_rslora=True,
        lora_dropout=0.05,
        init_lora_weights="gaussian",
        rank_pattern={},
        a_later_option=None,
    )
    adapters, params = load_adapter(folder, decoder)
    assert adapters.targets == ("q", "v") and adapters.rank == 4
    assert adapters.scale == pytest.approx(8.0 / 4**0.5)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


LAYER = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    "change, options, words",
    [
        (None, {"use_dora": True}, "use_dora=true, which is not supported"),
        (None, {"peft_type": "IA3"}, 'peft_type="IA3"'),
        (None, {"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        (None, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights="),
        (None, {"r": 3}, r"wrong shapes: .*q_proj.lora_A.weight \(4, 32\) instead of \(3, 32\)"),
        (None, {"r": "4"}, "both must be numbers"),
        (lambda tensors: {name: tensors[name] for name in tensors if name != LAYER}, {}, f"missing tensors: {LAYER}"),
        (lambda tensors: {**tensors, "base_model.model.lm_head.lora_A.weight": tensors[LAYER]}, {}, "lm_head.lora_A"),
        (lambda tensors: {"encoder.query.lora_A.weight": tensors[LAYER]}, {}, "no adapter of a matrix of Llama"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, change, options, words):
    folder, decoder = saved(tmp_path, change, **options)
    with pytest.raises(UserError, match=words):
        load_adapter(folder, decoder)


def test_damaged_or_missing_files_are_named(tmp_path):
    folder, decoder = saved(tmp_path)
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:50])
    with pytest.raises(UserError, match="not a valid safetensors file"):
        load_adapter(folder, decoder)
    (folder / WEIGHTS).write_bytes(whole)
    (folder / CONFIG).write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_adapter(folder, decoder)
    with pytest.raises(UserError, match="does not exist"):
        load_adapter(tmp_path / "elsewhere", decoder)


def test_only_an_adapter_is_ever_overwritten(tmp_path):
    """Caught: a model's folder replaced by its adapter."""
    decoder, base, adapters = adapted_model(Lora(2, 4.0, ("q",)), windows=(None, None))
    export_model(tmp_path / "model", decoder, merge_trees(base, adapters), None)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="is not empty"):
        save_adapter(tmp_path / "model", decoder, adapters)
    with pytest.raises(UserError, match="other than an adapter"):
        save_adapter(tmp_path / "model", decoder, adapters, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    save_adapter(tmp_path / "adapter", decoder, adapters)
    changed = jax.tree.map(lambda leaf: leaf + 1, adapters)
    save_adapter(tmp_path / "adapter", decoder, changed, overwrite=True)
    bits_equal(load_adapter(tmp_path / "adapter", decoder)[1], changed)
