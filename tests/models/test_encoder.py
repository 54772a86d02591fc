"""BERT and RoBERTa classifiers against transformers and torch, on small random models."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.encoder import encoder_scores
from jaxrl_llm.models.encoder_loading import load_encoder
from jaxrl_llm.models.labels import Labels

SHAPE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
}
MODELS = {
    "bert": {"num_labels": 1, "pad_token_id": 0},
    "bert_relu_3_labels": {"num_labels": 3, "pad_token_id": 0, "hidden_act": "relu"},
    "roberta": {"num_labels": 2, "pad_token_id": 1, "type_vocab_size": 1, "hidden_act": "gelu_new"},
    "xlm-roberta": {"num_labels": 1, "pad_token_id": 2, "type_vocab_size": 1},
}
PAIRS = ("bert", "bert_relu_3_labels")


def _torch_model(name: str, folder):
    """Every weight random: a bias, norm or position table left at 0 or 1 would hide that it is ignored."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(name.split("_")[0], **SHAPE, **MODELS[name], attn_implementation="eager")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def _texts(pad: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, mask and token types of rows of 1 token up to the longest text that the model takes."""
    lengths = np.array([1, 2, 7, longest])
    columns = np.arange(longest)[None]
    mask = columns < lengths[:, None]
    tokens = np.random.default_rng(0).integers(4, SHAPE["vocab_size"], mask.shape)
    return np.where(mask, tokens, pad), mask, (mask & (columns > lengths[:, None] // 2)).astype(np.int64)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tmp_path, name):
    """Texts of several lengths, pairs where the model knows them.

    The tolerance is float32's: logits of size 1 after 2 layers of sums of 32 and 48 terms, in another order (measured:
    below 1e-6). Caught: RoBERTa's positions from 0, or from pad_token_id; the pooler left out; the mask ignored; the
    activation's tanh form in place of erf; token types ignored; a norm before the sum; the first norm left out.
    """
    import torch

    model = _torch_model(name, tmp_path)
    encoder, params = load_encoder(tmp_path)
    longest = SHAPE["max_position_embeddings"] - (0 if name in PAIRS else MODELS[name]["pad_token_id"] + 1)
    assert encoder.config.max_position == longest
    tokens, mask, types = _texts(encoder.config.pad_token_id, longest)
    with torch.no_grad():
        inputs = {"token_type_ids": torch.from_numpy(types)} if name in PAIRS else {}
        expected = model(
            torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask.astype(np.int64)), **inputs
        ).logits.numpy()
    given = (jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))
    given = (*given, jnp.asarray(types, jnp.int32)) if name in PAIRS else given
    np.testing.assert_allclose(jax.jit(encoder.logits)(params, *given), expected, atol=1e-5)
    if MODELS[name]["num_labels"] == 1:
        np.testing.assert_allclose(encoder_scores(encoder, params, *given), expected[:, 0], atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    _torch_model("roberta", path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_one_score_of_several_labels():
    """Log-odds and probabilities of a choice among three, and of labels that are independent, by hand."""
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0], [4.0, 4.0, 8.0]]))
    choice = Labels(("a", "b", "c"))
    np.testing.assert_allclose(choice.scores(logits, 2, "probability"), [0.625, 0.5], rtol=1e-6)
    np.testing.assert_allclose(choice.scores(logits, 2, "logit"), np.log([5 / 3, 1.0]), atol=1e-6)
    np.testing.assert_allclose(choice.scores(logits, 0, "probability"), [0.125, 0.25], rtol=1e-6)
    several = Labels(("a", "b", "c"), independent=True)
    np.testing.assert_allclose(several.scores(logits, 1, "probability"), [2 / 3, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(several.scores(logits, 1, "logit"), logits[:, 1])
    one = Labels(("score",))
    np.testing.assert_array_equal(one.scores(logits[:, 2:], None, "logit"), logits[:, 2])


def test_labels_of_a_config():
    """Caught: labels in the order of their keys as text."""
    names = {str(index): f"label {index}" for index in range(11)}
    shuffled = dict(sorted(names.items()))
    assert Labels.from_hf({"id2label": shuffled}).names == tuple(names.values())
    assert len(Labels.from_hf({"num_labels": 1}).names) == 1
    assert len(Labels.from_hf({}).names) == 2
    assert Labels.from_hf({"problem_type": "multi_label_classification"}).independent


@pytest.mark.parametrize(
    ("label", "output", "message"),
    [
        (None, "logit", r"has 2 labels: 0 \(LABEL_0\), 1 \(LABEL_1\)\. Set label"),
        (2, "logit", r"label is 2, but its labels are 0"),
        (-1, "logit", r"label is -1"),
        (1, "odds", r"output is 'odds'; allowed: 'logit', 'probability'"),
    ],
)
def test_a_label_that_is_none_is_refused(label, output, message):
    with pytest.raises(UserError, match=message):
        Labels(("LABEL_0", "LABEL_1")).check(label, output)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'.*supported are gelu, gelu_new"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"architectures": ["DebertaV2ForSequenceClassification"]}, "Deberta.*supported encoders are Bert"),
        ({"num_attention_heads": 5}, "hidden_size = 32"),
        ({"num_hidden_layers": 3}, r"missing tensors: roberta\.encoder\.layer\.2\."),
        ({"num_hidden_layers": 1}, r"does not use: roberta\.encoder\.layer\.1\."),
        ({"vocab_size": 66}, r"wrong shapes: roberta\.embeddings\.word_embeddings\.weight \(67, 32\) instead of \(66"),
        ({"id2label": {"0": "a"}}, r"classifier\.out_proj\.bias \(2,\) instead of \(1,\)"),
    ],
)
def test_what_would_change_the_model_silently_is_refused(copy, changes, message):
    file = copy / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UserError, match=message):
        load_encoder(copy)


def test_pickles_are_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no \.safetensors file, only pytorch_model\.bin: a pickle.*any code"):
        load_encoder(copy)


def test_names_of_old_files(copy):
    """Norms called gamma and beta, a buffer of positions, a pooler that the head makes useless."""
    _, expected = load_encoder(copy)
    file = copy / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in safetensors.numpy.load_file(file).items()
    }
    old["roberta.embeddings.position_ids"] = np.arange(20)[None]
    old["roberta.pooler.dense.weight"] = np.ones((32, 32), np.float32)
    old["roberta.pooler.dense.bias"] = np.ones(32, np.float32)
    safetensors.numpy.save_file(old, file)
    _, params = load_encoder(copy)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
