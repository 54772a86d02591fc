"""An exported folder: complete, in the shapes of its config, written whole or not at all."""

import json
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import export
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.loading import load_model
from tests.cases import case
from tests.models.tiny import tiny_model


def test_padding_rows_stay_out_and_real_rows_stay_in_case_k19(tmp_path):
    """Seen to catch: the padded array exported whole; the vocabulary cut to the tokenizer."""
    given, expected = case("K19")["input"], case("K19")["expected"]
    decoder, params = tiny_model(
        vocab_size=given["config_vocab_size"], padded_vocab_size=given["padded_for_mesh"], hidden_size=2,
        windows=(None, None), tie_embeddings=True,
    )  # fmt: skip
    assert params["embed"]["weight"].shape[0] == expected["trainer_rows"]
    assert decoder.config.vocab_size == expected["masked_in_softmax_from"]
    export_model(tmp_path / "model", decoder, params, None)
    weights = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape[0] == expected["exported_rows"] > given["tokenizer_len"]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == expected["config_vocab_size_after_export"]


@pytest.mark.parametrize("max_file_bytes", [10_000, 5 * 10**9])
def test_reads_back_bit_for_bit(tmp_path, max_file_bytes):
    """One file, and several with an index that names every tensor."""
    decoder, params = tiny_model(windows=(None, None), eos_token_ids=(2, 5), bos_token_id=1)
    export_model(tmp_path / "model", decoder, params, None, max_file_bytes=max_file_bytes)
    again, loaded = load_model(tmp_path / "model", vocab_multiple=64)
    assert again.config.eos_token_ids == (2, 5)
    for leaf, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        rows = slice(0, 61) if wanted.shape[0] == 64 else slice(None)  # padding rows come back as zeros
        np.testing.assert_array_equal(np.asarray(leaf)[rows], np.asarray(wanted)[rows])
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def test_bfloat16(tmp_path):
    decoder, params = tiny_model(windows=(None, None))
    export_model(tmp_path / "model", decoder, params, None, jnp.bfloat16)
    weights = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    assert {str(value.dtype) for value in weights.values()} == {"bfloat16"}


def test_a_folder_with_something_in_it_is_refused_unless_asked(tmp_path):
    decoder, params = tiny_model(windows=(None, None))
    target = tmp_path / "model"
    target.mkdir()
    export_model(target, decoder, params, None)  # empty: fine
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        export_model(target, decoder, params, None)
    assert (target / "notes.txt").exists()
    export_model(target, decoder, params, None, overwrite=True)
    assert not (target / "notes.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_only_a_model_is_ever_overwritten(tmp_path, monkeypatch):
    """A run's folder, another folder and a file stay, asked or not. Caught: `--overwrite` that deletes the checkpoints
    of the run, and a file put aside as FILE.replaced."""
    decoder, params = tiny_model(windows=(None, None))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name, words in (("run", "other than a model"), ("thesis", "other than a model"), ("file", "is a file")):
        with pytest.raises(UserError, match=words):
            export_model(tmp_path / name, decoder, params, None, overwrite=True)
    with pytest.raises(UserError, match="can't be made"):
        export_model(tmp_path / "file" / "model", decoder, params, None)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export_model(".", decoder, params, None)
    assert (tmp_path / "here" / "config.json").exists()


def test_a_failed_export_leaves_what_was_there(tmp_path, monkeypatch):
    """Seen to catch: files written into the target itself."""
    decoder, params = tiny_model(windows=(None, None))
    target = tmp_path / "model"
    export_model(target, decoder, params, None)
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(export, "_write_configs", fail)
    with pytest.raises(OSError, match="no space left"):
        export_model(target, decoder, params, None, overwrite=True)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def _tokenizer(**options):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2, "<end>": 3}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **options)


@pytest.mark.parametrize("own, expected", [((), 3), ((2,), [2, 3]), ((3, 5), [3, 5])])
def test_the_tokenizers_eos_joins_the_models(tmp_path, own, expected):
    """Whoever loads the folder stops where training stopped. Seen to catch: the model's ids alone."""
    decoder, params = tiny_model(windows=(None, None), eos_token_ids=own)
    export_model(tmp_path / "model", decoder, params, _tokenizer(eos_token="<end>"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "model" / name).read_text())["eos_token_id"] == expected


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_get_the_mode_of_the_umask(tmp_path, umask):
    """Seen to catch: weights that only their owner may read."""
    decoder, params = tiny_model(windows=(None, None))
    before = os.umask(umask)
    try:
        export_model(tmp_path / "model", decoder, params, _tokenizer(), max_file_bytes=10_000)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert len(modes) > 5 and set(modes.values()) == {0o666 & ~umask}, modes


def test_the_tokenizer_and_its_template_come_along(tmp_path):
    from transformers import AutoTokenizer

    decoder, params = tiny_model(windows=(None, None))
    tokenizer = _tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    export_model(tmp_path / "model", decoder, params, tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.chat_template == tokenizer.chat_template
    assert again("b")["input_ids"] == tokenizer("b")["input_ids"] == [1]
