"""Value heads: the same score as transformers' classifiers of every family, both ways, and on a mesh."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.classifier import export_classifier, load_classifier
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.value_head import add_value_head, text_scores, token_values, value_axes
from jaxrl_llm.sharding import TRAINING
from jaxrl_llm.types import Params
from tests.models.tiny import one_segment, tiny_model

PAD = 3
SHAPE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
}


def _torch_classifier(name: str, folder, num_labels: int = 1):
    """Every weight random: a norm or bias left at 1 or 0 would hide that it is ignored."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    options = {**SHAPE, **FAMILIES[name], "num_labels": num_labels, "attn_implementation": "eager"}
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(name, **options)).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def _torch_scores(model, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask.astype(np.int64))).logits.numpy()


def _texts() -> tuple[np.ndarray, np.ndarray]:
    """Rows of 1, 2, 9 and 16 tokens, padded on the right; the last text itself ends in two padding tokens."""
    lengths = np.array([1, 2, 9, 16])
    mask = np.arange(16) < lengths[:, None]
    tokens = np.random.default_rng(0).integers(4, SHAPE["vocab_size"], mask.shape)
    tokens = np.where(mask, tokens, PAD)
    tokens[3, 14:] = PAD
    return tokens, mask


def _scores(decoder: Decoder, params: Params, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    def forward(params: Params, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = decoder.hidden(params, tokens, positions, mask.astype(jnp.int32))
        return text_scores(params, hidden, tokens, mask, decoder.config.pad_token_id)

    ids, positions, _ = one_segment(tokens)
    return np.asarray(jax.jit(forward)(params, ids, positions, jnp.asarray(mask)))


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_equal_transformers_both_ways(tmp_path, name):
    """Load what transformers wrote, export it, and transformers reads it back: the same scores and weights.

    The tolerance is float32's: scores are sums of 32 products of size 1, of hidden states that two implementations
    round at about 1e-6 each (measured: below 5e-7). Caught: the last column of the row instead of the text's last
    token; one column before it; texts scored at their own trailing padding tokens.
    """
    from transformers import AutoModelForSequenceClassification

    model = _torch_classifier(name, tmp_path / "from_torch")
    tokens, mask = _texts()
    expected = _torch_scores(model, tokens, mask)[:, 0]
    decoder, params = load_classifier(tmp_path / "from_torch", vocab_multiple=8)
    assert "lm_head" not in params
    np.testing.assert_allclose(_scores(decoder, params, tokens, mask), expected, atol=1e-5)

    export_classifier(tmp_path / "exported", decoder, params, None)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", attn_implementation="eager").eval()
    assert type(back) is type(model) and back.config.num_labels == 1
    np.testing.assert_array_equal(_torch_scores(back, tokens, mask)[:, 0], expected)
    weights = back.state_dict()
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(weights[key].numpy(), value.numpy(), err_msg=key)


def test_a_value_is_of_the_state_after_its_token():
    """Column t changes with token t and not with later ones; the head is a plain dot product. Caught: values shifted
    by a column."""
    decoder, params = tiny_model(windows=(None, None))
    params = add_value_head(decoder, params)
    params["value_head"]["weight"] = jax.random.normal(jax.random.key(1), (32,))
    tokens = np.random.default_rng(0).integers(4, 61, (1, 8))
    changed = tokens.copy()
    changed[0, 5] += 1

    @jax.jit
    def values(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden = decoder.hidden(params, *row)
        return token_values(params, hidden), hidden

    (before, hidden), (after, _) = values(one_segment(tokens)), values(one_segment(changed % 61))
    moved = np.abs(np.asarray(after - before))[0]
    assert not moved[:5].any() and (moved[5:] > 1e-4).all()
    np.testing.assert_allclose(before[0], hidden[0] @ params["value_head"]["weight"], atol=1e-5)  # order of a sum of 32


def test_a_new_head_is_zero_and_learns():
    """All values are 0, the head's gradient is not, and that of the decoder is."""
    decoder, params = tiny_model(windows=(None, None))
    params = add_value_head(decoder, params)
    row = one_segment(np.random.default_rng(0).integers(4, 61, (1, 8)))

    @jax.jit
    @jax.value_and_grad
    def loss(params: Params) -> jax.Array:
        return jnp.sum((token_values(params, decoder.hidden(params, *row)) - 1.0) ** 2)

    value, gradient = loss(params)
    assert value == 8.0
    head = gradient.pop("value_head")["weight"]
    assert np.abs(np.asarray(head)).max() > 0.1
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_a_language_model_gets_a_new_head_where_asked(tmp_path):
    """Its decoder stays as it was, its output matrix is left out; an own head is kept. Caught: a head of zeros in
    place of a classifier's own."""
    decoder, params = tiny_model(windows=(None, None))
    export_model(tmp_path / "policy", decoder, params, None)
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*no score.*LlamaForSequenceClassification, Mistral"):
        load_classifier(tmp_path / "policy")
    critic, loaded = load_classifier(tmp_path / "policy", new_head=True, vocab_multiple=64)
    assert not np.asarray(loaded["value_head"]["weight"]).any()
    np.testing.assert_array_equal(
        loaded["blocks"]["run_0"]["attention"]["q"], params["blocks"]["run_0"]["attention"]["q"]
    )
    assert set(loaded) == {"embed", "blocks", "final_norm", "value_head"}
    loaded["value_head"]["weight"] = jnp.arange(32.0)
    export_classifier(tmp_path / "critic", critic, loaded, None)
    _, again = load_classifier(tmp_path / "critic", new_head=True)
    np.testing.assert_array_equal(again["value_head"]["weight"], np.arange(32.0))


def test_on_a_mesh_scores_are_the_same(tmp_path):
    """Parameters split over fsdp and tensor, rows over fsdp; the head is whole on every device. Sums over the split
    width add up in another order: scores of size 10 differ by 6e-6."""
    decoder, params = tiny_model(windows=(None, None))
    params = add_value_head(decoder, params)
    params["value_head"]["weight"] = jax.random.normal(jax.random.key(1), (32,))
    export_classifier(tmp_path / "critic", decoder, params, None)
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 1, 4, 2), ("data", "pipeline", "fsdp", "tensor"))
    tokens, mask = _texts()
    tokens %= 61
    expected = _scores(*load_classifier(tmp_path / "critic"), tokens, mask)
    sharded, loaded = load_classifier(tmp_path / "critic", mesh=mesh, layout=TRAINING, vocab_multiple=2)
    shardings = TRAINING.shardings(mesh, value_axes(sharded))
    for leaf, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(_scores(sharded, loaded, tokens, mask), expected, atol=3e-5)


def test_what_is_no_single_score_is_refused(tmp_path):
    """Several labels, a head of another shape, and tensors left over. Caught: two labels taken for a
    value head."""
    _torch_classifier("llama", tmp_path / "two", num_labels=2)
    with pytest.raises(UserError, match=r"has 2 labels .*a value head has one output"):
        load_classifier(tmp_path / "two")
    file = tmp_path / "two" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_labels": 1, "id2label": {"0": "good"}}))
    with pytest.raises(UserError, match=r"wrong shapes: score\.weight \(2, 32\) instead of \(1, 32\)"):
        load_classifier(tmp_path / "two")
    weights = tmp_path / "two" / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors["score.weight"] = tensors["score.weight"][:1]
    safetensors.numpy.save_file({**tensors, "score.bias": np.zeros(1, np.float32)}, weights)
    with pytest.raises(UserError, match=r"does not use: score\.bias"):
        load_classifier(tmp_path / "two")
