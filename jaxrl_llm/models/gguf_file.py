"""Models in llama.cpp's GGUF format, seen as a Hugging Face config and its tensors.

Supported is the ``llama`` architecture, in any quantization that the ``gguf`` package can undo; weights become
float32. Such files store the rows of q and k for interleaved rotary positions; they are put back into the
half-split order of Hugging Face here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.tensors import Index

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""Names of a layer's tensors, ``blk.N.`` and ``model.layers.N.`` left off."""


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Around the use of what a file says of itself, which nobody has checked.

    Raises:
      UserError: whatever fails because a field lacks, is of another type or does not fit the others.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{path} can't be read as a GGUF file ({type(error).__name__}: {error}). It is incomplete, of another kind "
            "or damaged: fetch it again."
        ) from error


def open_gguf(path: Path) -> Any:
    """The file's ``gguf.GGUFReader``, memory-mapped. The last one is kept: reading a header takes a second or two.

    Raises:
      UserError: it is damaged, or no GGUF file.
    """
    with explained(path):  # the reader checks little: a cut file fails anywhere in it
        return _open(str(path), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _open(path: str, modified_ns: int) -> Any:
    import gguf  # here, since only users of such a file should pay for it

    class Reader(gguf.GGUFReader):
        """Bounded by the file: its library's reads on behind the end, where an array that is said to have a billion
        items takes all memory."""

        _reads = 0

        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            value = super()._get(offset, dtype, count, override_order)
            self._reads += 1
            if len(value) < count or self._reads > MOST_READS:
                raise ValueError("its header says that it has more than there is")
            return value

    return Reader(path)


MOST_READS = 10_000_000
"""Items of a header: about six for a token, so a vocabulary of 1.6 million. Each takes some 250 bytes of memory."""


def read_field(reader: Any, name: str, default: Any = None) -> Any:
    """A metadata field of the file, or ``default`` where it has none."""
    field = reader.fields.get(name)
    return default if field is None else field.contents()


def gguf_hf_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` that this file would have.

    Raises:
      UserError: another architecture, or a rope scaling that a file of this format cannot be read back from.
    """
    with explained(path):
        return _hf_config(path)


def _hf_config(path: Path) -> dict[str, Any]:
    reader = open_gguf(path)
    architecture = read_field(reader, "general.architecture")
    if architecture != "llama":
        raise UserError(
            f"{path} has the GGUF architecture {architecture!r}; only 'llama' can be read from a .gguf file. "
            "Give the model's Hugging Face folder."
        )

    def field(name: str, default: Any = None) -> Any:
        return read_field(reader, f"llama.{name}", default)

    rope: dict[str, Any] = {"rope_theta": _shortest(field("rope.freq_base", 10000.0)), "rope_type": "default"}
    scaling = field("rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": _shortest(field("rope.scaling.factor"))}
    elif scaling != "none":
        raise UserError(
            f"{path} has rope scaling {scaling!r}; only none and linear can be read from a .gguf file. "
            "Give the model's Hugging Face folder."
        )
    heads = field("attention.head_count")
    head_size = field("attention.key_length", field("embedding_length") // heads)
    if field("rope.dimension_count", head_size) != head_size:
        raise UserError(
            f"{path} rotates {field('rope.dimension_count')} of a head's {head_size} dimensions; only models "
            "that rotate all of them are supported. Choose another model."
        )
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _shortest(field("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": read_field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": read_field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": read_field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: float) -> float:
    """The decimal that the file's float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class GgufTensors:
    """The tensors of a GGUF file under their Hugging Face names, dequantized one at a time when read."""

    def __init__(self, path: Path):
        reader = open_gguf(path)
        self.source = str(path)
        self._heads = {
            "q_proj": read_field(reader, "llama.attention.head_count"),
            "k_proj": read_field(
                reader, "llama.attention.head_count_kv", read_field(reader, "llama.attention.head_count")
            ),
        }
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        import gguf

        tensor = self._tensors[name]
        with explained(Path(self.source)):
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for projection, heads in self._heads.items():
            if f".{projection}." in name:  # rows of a head: pairs of an interleaved rotation -> two halves
                rows, columns = value.shape
                value = value.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        return value[index]


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own name where there is none, so that an error can tell it."""
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        return f"model.layers.{layer}.{LAYER_TENSORS[rest]}" if rest in LAYER_TENSORS else name
    return TENSORS.get(name, name)
