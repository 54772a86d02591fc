"""Loads a model: its config, then parameter by parameter exactly the slices that this process's devices need.

Import rule: every tensor of the file is used or named in an error, every parameter is filled or named in one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxrl_llm.errors import UserError, readable
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.families.family import HfConfig, token_ids
from jaxrl_llm.models.gguf_file import GgufTensors, gguf_hf_config
from jaxrl_llm.models.locate import CONFIG_FILES, resolve_path
from jaxrl_llm.models.registry import FAMILIES, config_from_hf
from jaxrl_llm.models.safetensors_folder import SafetensorsFolder, check_shapes
from jaxrl_llm.models.tensors import Index, TensorRule, sizes_of
from jaxrl_llm.sharding import Layout
from jaxrl_llm.types import Params

__all__ = ["init_model", "load_config", "load_model", "load_parameters", "read_hf_config", "resolve_path"]


@runtime_checkable
class Tensors(Protocol):
    """Named tensors on disk."""

    source: str

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...


def load_config(path: str | Path) -> ModelConfig:
    """The config of the model at ``path`` (see :func:`resolve_path`); reads no weights.

    Raises:
      UserError: no such model, not one that is supported, or a damaged config.
    """
    local = resolve_path(path, CONFIG_FILES)
    return config_from_hf(read_hf_config(local), str(local))


def read_hf_config(local: Path) -> HfConfig:
    """The ``config.json`` of a folder or ``.gguf`` file on this machine.

    End-of-sequence ids are those of ``config.json`` and of ``generation_config.json`` together.

    Raises:
      UserError: there is none, or it is damaged.
    """
    if local.suffix == ".gguf":
        return gguf_hf_config(local)
    hf = _read_json(local / "config.json")
    generation = local / "generation_config.json"
    if generation.exists():
        eos = (*token_ids(hf.get("eos_token_id")), *token_ids(_read_json(generation).get("eos_token_id")))
        hf = {**hf, **({"eos_token_id": list(dict.fromkeys(eos))} if eos else {})}
    return hf


def load_model(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: DTypeLike = jnp.float32,
    vocab_multiple: int = 1,
) -> tuple[Decoder, Params]:
    """The model at ``path`` and its parameters in the training arrangement.

    Args:
      mesh, layout: where the parameters go; without a mesh, to the default device. Each device's slice is read
        from the file; the host holds one parameter at a time.
      vocab_multiple: the vocabulary's arrays are padded to a multiple of this, so that a mesh can split them; 0 for
        any mesh (`ModelConfig.with_vocab_multiple`).

    Raises:
      UserError: as :func:`load_config`; or tensors that are missing, left over or of another shape.
    """
    local = resolve_path(path)
    config = load_config(local).with_vocab_multiple(vocab_multiple)
    decoder = Decoder(config)
    rules = FAMILIES[config.architecture].rules(config)
    expected, axes = decoder.abstract_params(), decoder.logical_axes()
    return decoder, load_parameters(local, decoder, rules, expected, axes, mesh=mesh, layout=layout, dtype=dtype)


def load_parameters(
    local: Path,
    decoder: Decoder,
    rules: tuple[TensorRule, ...],
    expected: Params,
    axes: Params,
    *,
    sizes: Mapping[str, int] | None = None,
    unread: Collection[str] = (),
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Params:
    """The parameters of a tree from the tensors of a folder or ``.gguf`` file.

    Args:
      rules: one for each parameter.
      expected, axes: the tree's shapes (``jax.ShapeDtypeStruct``) and logical axes.
      sizes: of dimensions that ``sizes_of`` does not know.
      unread: tensors of the file that are left out on purpose.
      mesh, layout, dtype: as in :func:`load_model`.

    Raises:
      UserError: tensors that are missing, left over or of another shape, or sizes that the mesh can't split evenly.
    """
    config = decoder.config
    if mesh is not None and layout is not None:
        _check_split(local, config, mesh, layout)
    tensors: Tensors = GgufTensors(local) if local.suffix == ".gguf" else SafetensorsFolder(local)
    all_sizes = {**sizes_of(config), **(sizes or {})}
    _check(tensors, rules, config, all_sizes, unread)
    rule_of = {rule.path: rule for rule in rules}

    def load(key_path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> Array:
        names = [entry.key for entry in key_path]
        layers = None
        if names[0] == "blocks":
            layers, names = decoder.runs[names[1]], names[2:]
        return _load(rule_of["/".join(names)], tensors, all_sizes, layers, leaf.shape, jnp.dtype(dtype), sharding)

    return jax.tree.map_with_path(load, expected, _shardings(axes, mesh, layout))


def init_model(
    hf_config: Mapping[str, Any],
    key: Array,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    vocab_multiple: int = 1,
) -> tuple[Decoder, Params]:
    """A model from scratch, from a dict with the keys of a Hugging Face ``config.json``.

    Float32, and the same numbers on any mesh.
    """
    config = config_from_hf(hf_config, "model.architecture").with_vocab_multiple(vocab_multiple)
    decoder = Decoder(config)
    shardings = None if mesh is None else _shardings(decoder.logical_axes(), mesh, layout)
    return decoder, jax.jit(decoder.init, out_shardings=shardings)(key)


def _check_split(local: Path, config: ModelConfig, mesh: Mesh, layout: Layout) -> None:
    """A model may have another shape than the policy, and a role a mesh of its own."""
    sizes = {
        "layers": (config.num_layers, "layers"),
        "heads": (config.num_heads, "attention heads"),
        "kv_heads": (config.num_kv_heads, "key/value heads"),
        "mlp": (config.intermediate_size, "columns in the MLP"),
        "embed": (config.hidden_size, "columns in the hidden state"),
        "vocab": (config.padded_vocab_size, "rows of the vocabulary"),
    }
    for axis, (size, name) in sizes.items():
        if size % (parts := layout.shards(mesh, axis)):
            raise UserError(
                f"{local} has {size} {name}, and the mesh of this role splits them over {parts} devices, which does "
                f"not divide them. Its mesh is {', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())}: "
                "choose another (mesh.…, or placement.….… of a role on devices of its own), or another model."
            )


def _shardings(axes: Params, mesh: Mesh | None, layout: Layout | None) -> Any:
    """A tree of NamedSharding, or of None without a mesh."""
    if (mesh is None) != (layout is None):
        raise ValueError("mesh and layout go together: give both or none")
    if mesh is None or layout is None:
        return jax.tree.map(lambda _: None, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return layout.shardings(mesh, axes)


def _load(
    rule: TensorRule,
    tensors: Tensors,
    sizes: Mapping[str, int],
    layers: range | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding | None,
) -> Array:
    """One parameter (of all layers of a run), read slice by slice."""
    seen: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # replicas share one read

    def read(index: Index) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        if bounds not in seen:
            value = np.zeros([stop - start for start, stop in bounds], dtype)
            if layers is None:
                _fill(value, None, bounds)
            else:
                for row, layer in zip(value, layers[bounds[0][0] : bounds[0][1]], strict=True):
                    _fill(row, layer, bounds[1:])
            seen[bounds] = value
        return seen[bounds]

    def _fill(target: np.ndarray, layer: int | None, bounds: tuple[tuple[int, int], ...]) -> None:
        limits = [sizes[name] for name in rule.dimensions]  # the vocabulary's may lie below the array's: padding
        inside = [(min(start, limit), min(stop, limit)) for (start, stop), limit in zip(bounds, limits, strict=True)]
        part = rule.read(tensors.read, layer, tuple(slice(*bound) for bound in inside), sizes)
        target[tuple(slice(0, size) for size in part.shape)] = part

    if sharding is None:
        return jnp.asarray(read((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, read)  # pyright: ignore[reportArgumentType]


def _check(
    tensors: Tensors,
    rules: tuple[TensorRule, ...],
    config: ModelConfig,
    sizes: Mapping[str, int],
    unread: Collection[str],
) -> None:
    """Raises UserError unless the file holds exactly the tensors of the rules, in their shapes, and ``unread``."""
    shapes = {name: shape for name, shape in tensors.shapes().items() if name not in unread}
    expected = {
        rule.name(layer): rule.file_shape(sizes)
        for rule in rules
        for layer in (range(config.num_layers) if rule.per_layer else (None,))
    }
    given = {name: shape for name, shape in shapes.items() if name in expected or not _redundant(name, tensors, config)}
    check_shapes(tensors.source, f"{config.architecture}, {config.num_layers} layers", expected, given)


def _redundant(name: str, tensors: Tensors, config: ModelConfig) -> bool:
    """Is this tensor one that only repeats what the model has? Rotary frequencies follow from the config (old files
    keep them); an output matrix of a model that ties it must equal the embedding."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if name != "lm_head.weight" or not config.tie_embeddings:
        return False
    embedding = "model.embed_tokens.weight"
    if tensors.shapes().get(embedding) != tensors.shapes()[name]:
        return False
    blocks = (slice(start, min(start + 4096, config.vocab_size)) for start in range(0, config.vocab_size, 4096))
    everything = slice(0, config.hidden_size)
    return all(
        np.array_equal(tensors.read(name, (rows, everything)), tensors.read(embedding, (rows, everything)))
        for rows in blocks
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with readable(str(path)):
            if not path.exists():
                raise UserError(f"{path} does not exist. Give a model folder in Hugging Face's format.")
            text = path.read_bytes()
        content = json.loads(text.decode("utf-8"))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__}; an object is needed. Fetch it again.")
    return content
