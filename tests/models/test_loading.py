"""What is read, what is refused, and that each device gets its slice and no more."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.blocks import Block
from jaxrl_llm.models.export import export_model
from jaxrl_llm.models.loading import init_model, load_model, resolve_path
from jaxrl_llm.models.safetensors_folder import INDEX, SafetensorsFolder
from jaxrl_llm.models.tensors import rule
from jaxrl_llm.sharding import TRAINING
from tests.cases import case
from tests.models.tiny import tiny_config, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of Qwen2's kind in several files, vocabulary 61."""
    path = tmp_path_factory.mktemp("model") / "qwen2"
    decoder, params = tiny_model(architecture="Qwen2ForCausalLM", qkv_bias=True, windows=(None, None))
    export_model(path, decoder, params, None, max_file_bytes=10_000)
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def _mesh(shape=(2, 1, 2, 2)) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:8]).reshape(shape), ("data", "pipeline", "fsdp", "tensor"))


def test_a_sharded_load_equals_a_plain_one_and_reads_only_slices(folder, monkeypatch):
    """Every parameter, on 8 devices; no read of a matrix is whole. Seen to catch: the whole tensor read and cut
    afterwards; the slice of the wrong merged dimension."""
    sizes = []
    read = SafetensorsFolder.read

    def watched(self, name, index):
        value = read(self, name, index)
        if value.ndim == 2:
            sizes.append(value.size / np.prod(self.shapes()[name]))
        return value

    _, expected = load_model(folder, vocab_multiple=8)
    monkeypatch.setattr(SafetensorsFolder, "read", watched)
    decoder, params = load_model(folder, mesh=_mesh(), layout=TRAINING, vocab_multiple=8)
    assert max(sizes) <= 0.25 + 0.02  # over fsdp and tensor; the vocabulary's 61 rows do not halve evenly
    shardings = TRAINING.shardings(_mesh(), decoder.logical_axes())
    for leaf, wanted, sharding in zip(*map(jax.tree.leaves, (params, expected, shardings)), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))
        assert leaf.sharding == sharding


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 1, 1, 4), ["2 key/value heads", "over 4 devices"]), ((1, 4, 1, 1), ["2 layers", "over 4 devices"])],
)
def test_a_mesh_that_can_not_split_a_model_is_refused(folder, shape, words):
    """Of another shape than the policy it is only known here. Caught: no look at sizes (jax's own error)."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(shape), ("data", "pipeline", "fsdp", "tensor"))
    with pytest.raises(UserError) as caught:
        load_model(folder, mesh=mesh, layout=TRAINING, vocab_multiple=8)
    for word in words:
        assert word in str(caught.value)


def test_dtype_of_the_parameters_is_the_one_asked_for(folder):
    _, params = load_model(folder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_import_rule_case_k21(copy):
    """A tensor left over, a tensor missing and one of another shape are each named. Seen to catch: unused tensors
    ignored (a Qwen2 file read as Llama would lose its biases)."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match=r"does not use: model.layers.0.self_attn.k_proj.bias, "):
        load_model(copy)
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(UserError, match=r"missing tensors: model.layers.2.input_layernorm.weight, .* and 4 more"):
        load_model(copy)
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 60}))
    with pytest.raises(UserError, match=r"wrong shapes: lm_head.weight \(61, 32\) instead of \(60, 32\)"):
        load_model(copy)


def test_biases_are_added_case_k21():
    given, expected = case("K21")["input"], case("K21")["expected"]
    config = tiny_config(hidden_size=2, num_heads=1, num_kv_heads=1, head_size=2, qkv_bias=True)
    attention = Block(config, nnx.Rngs(0)).attention
    attention.q[...] = jnp.asarray(given["q_weight"], jnp.float32).T[:, None, :]
    attention.q_bias[...] = jnp.asarray(given["q_bias"], jnp.float32)[None]
    q, _, _ = attention.project(jnp.asarray(given["x"], jnp.float32)[None])
    np.testing.assert_allclose(q[0, 0], expected["q"])


def test_an_output_matrix_that_repeats_the_tied_embedding_is_allowed_and_another_refused(tmp_path):
    """Seen to catch: lm_head.weight of a tied model always ignored."""
    decoder, params = tiny_model(tie_embeddings=True, windows=(None, None))
    export_model(tmp_path / "tied", decoder, params, None)
    file = tmp_path / "tied" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    safetensors.numpy.save_file(tensors, file)
    load_model(tmp_path / "tied")
    tensors["lm_head.weight"][3, 4] += 1
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(UserError, match=r"does not use: lm_head.weight"):
        load_model(tmp_path / "tied")


def test_damaged_folders_are_named(copy):
    lost = sorted(copy.glob("*.safetensors"))[1]
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(UserError, match=f"names {lost.name}, which is not in the folder"):
        load_model(copy)
    lost.write_bytes(content[:100])
    with pytest.raises(UserError, match=f"{lost.name} is not a valid safetensors file"):
        load_model(copy)
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UserError, match=r"has no \.safetensors file"):
        load_model(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        load_model(copy)


def test_a_tensor_that_two_files_hold_is_refused(copy):
    """Two models in one folder, or an old file left in it. Caught: the last one read is taken, in silence."""
    (copy / INDEX).unlink()
    first = min(copy.glob("*.safetensors"))
    shutil.copy(first, copy / "other.safetensors")
    with pytest.raises(UserError, match=r"other\.safetensors holds .*, which another file of the folder holds too"):
        load_model(copy)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "/dev/zero"}}', '{"weight_map": {"a": ".."}}'],
)
def test_a_damaged_index_is_named(copy, content):
    """Also one that leads out of its folder."""
    (copy / INDEX).write_text(content)
    with pytest.raises(UserError, match=r"index\.json is no index of safetensors files"):
        load_model(copy)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("content", "words"), [(b"[1]", "holds a JSON list"), (b"\xff{", "not valid JSON")])
def test_a_config_that_is_no_object_is_named(copy, name, content, words):
    (copy / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} .*{words}"):
        load_model(copy)


def test_quantized_weights_are_refused(tmp_path):
    """Caught: integers taken for weights as they are, without the scales that belong to them."""
    decoder, params = tiny_model(windows=(None, None))
    export_model(tmp_path / "model", decoder, params, None)
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(UserError, match=r"holds model\.norm\.weight as I8; only F64, F32, F16, BF16"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("builtin:no_such_model", "There is no built-in model 'no_such_model'"),
        ("package:no_such_package", "pip install --no-deps no-such-package"),
        ("nobody/no-such-model", "neither a local folder nor could it be downloaded"),
    ],
)
def test_paths_that_lead_nowhere(path, message):
    with pytest.raises(UserError, match=message):
        resolve_path(path)


def test_a_model_from_scratch_is_the_same_on_any_mesh():
    """Seen to catch: a key folded with the device."""
    hf = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    _, expected = init_model(hf, jax.random.key(3), vocab_multiple=8)
    _, actual = init_model(hf, jax.random.key(3), vocab_multiple=8, mesh=_mesh(), layout=TRAINING)
    for leaf, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))


@pytest.mark.parametrize("index", [(slice(0, 4), slice(0, 3), slice(0, 2)), (slice(1, 3), slice(2, 3), slice(0, 1))])
def test_a_slice_of_a_parameter_is_the_slice_of_the_whole(index):
    """Also where an inner merged dimension is cut. Seen to catch: the inner cut left out."""
    sizes = {"D": 4, "H": 3, "h": 2}
    file = np.arange(24).reshape(6, 4)
    query = rule("attention/q", "q", "D H h", "Hh D")
    whole = query.read(lambda name, part: file[part], None, (slice(None),) * 3, sizes)
    np.testing.assert_array_equal(query.to_file(whole), file)
    np.testing.assert_array_equal(query.read(lambda name, part: file[part], None, index, sizes), whole[index])


def test_vocabulary_is_padded_with_zeros(folder):
    decoder, params = load_model(folder, vocab_multiple=50)
    assert decoder.config.padded_vocab_size == params["embed"]["weight"].shape[0] == 100
    assert not np.asarray(params["embed"]["weight"][61:]).any()
