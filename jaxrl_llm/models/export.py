"""Writes a model as a Hugging Face folder that ``transformers`` and :func:`load_model` read back.

The folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jaxrl_llm import processes
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.families.family import HfConfig
from jaxrl_llm.models.lora import fold_matrix
from jaxrl_llm.models.registry import FAMILIES
from jaxrl_llm.models.safetensors_folder import INDEX
from jaxrl_llm.models.tensors import TensorRule, sizes_of
from jaxrl_llm.types import Params

MAX_FILE_BYTES = 5 * 10**9


def export_model(
    folder: str | Path,
    decoder: Decoder,
    params: Params,
    tokenizer: Any,
    dtype: DTypeLike = jnp.float32,
    *,
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes weights, ``config.json``, ``generation_config.json``, and the tokenizer with its chat template.

    Rows that only pad the vocabulary are left out; those beyond the tokenizer are the model's and stay. Every
    process must call this (parameters split over processes are gathered, one at a time); process 0 writes.
    LoRA adapters are folded into their matrices, one at a time and in float32: the folder is a plain model.

    Args:
      params: in the training arrangement, on any mesh.
      tokenizer: a transformers tokenizer; None writes none. Its end-of-sequence id joins the model's, since training
        has generated with both.
      dtype: of the file.
      max_file_bytes: weights beyond it go into several files with an index.

    Raises:
      UserError: see `export_target`.
    """
    config = dataclasses.replace(decoder.config, eos_token_ids=decoder.config.end_ids(tokenizer))
    hf = FAMILIES[config.architecture].to_hf(config)
    ids = {name: hf[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hf[name] is not None}
    configs = {"config.json": {**hf, "torch_dtype": jnp.dtype(dtype).name}, "generation_config.json": ids}
    rules = FAMILIES[config.architecture].rules(config)
    write_model(
        folder, decoder, params, rules, configs, tokenizer, dtype, overwrite=overwrite, max_file_bytes=max_file_bytes
    )


def write_model(
    folder: str | Path,
    decoder: Decoder,
    params: Params,
    rules: Sequence[TensorRule],
    configs: Mapping[str, HfConfig],
    tokenizer: Any,
    dtype: DTypeLike,
    *,
    overwrite: bool,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a folder whose weights are those that ``rules`` name and whose JSON files are ``configs``, by file name.

    Everything else is as in :func:`export_model`.
    """
    temporary = target = Path()
    writes = processes.is_first()
    with processes.agreement():  # the others gather the parameters with it
        if writes:
            target = export_target(folder, overwrite=overwrite)
            temporary = _make_temporary(target)
    _write_weights(temporary, decoder, params, rules, jnp.dtype(dtype), max_file_bytes, writes)
    with processes.agreement():
        if writes:
            _write_configs(temporary, configs)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
            for file in temporary.glob("*.safetensors"):  # their library makes them private whatever the umask
                shutil.copymode(temporary / "config.json", file)
            replace_folder(temporary, target)


def _make_temporary(target: Path) -> Path:
    """An empty folder beside ``target``."""
    temporary = target.with_name(target.name + ".incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"The export folder {str(target)!r} can't be made: {error.strerror}. Give one where you may write."
        ) from error
    return temporary


def export_target(folder: str | Path, *, overwrite: bool) -> Path:
    """The absolute path of the folder that an export to ``folder`` would write. Changes nothing.

    Raises:
      UserError: it is a file; it has something in it and ``overwrite`` is False; or what it has in it is no model, so
        that replacing it would delete something else.
    """
    target = Path(os.path.expanduser(folder)).resolve()
    if target.exists() and not target.is_dir():
        raise UserError(f"The export folder {str(target)!r} is a file. Give the name of a folder.")
    if not target.exists() or not any(target.iterdir()):
        return target
    if not overwrite:
        raise UserError(
            f"The export folder {str(target)!r} is not empty. Give another one, or ask for it to be replaced "
            "(--overwrite on the command line, overwrite=True in Python)."
        )
    if not _holds_a_model(target):
        raise UserError(
            f"The export folder {str(target)!r} holds something other than a model (its config.json names no "
            "architecture, or there are folders in it), and --overwrite would delete it all. Give another folder."
        )
    return target


def _holds_a_model(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return (
        isinstance(config, dict) and "architectures" in config and not any(file.is_dir() for file in folder.iterdir())
    )


def _write_configs(folder: Path, configs: Mapping[str, HfConfig]) -> None:
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(
    folder: Path,
    decoder: Decoder,
    params: Params,
    rules: Sequence[TensorRule],
    dtype: np.dtype,
    max_file_bytes: int,
    writes: bool,
) -> None:
    files = _plan(decoder, rules, dtype, max_file_bytes)
    names = [
        "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number in range(1, len(files) + 1)
    ]
    for name, entries in zip(names, files, strict=True):
        content = {}
        for rule, layer in entries:
            value = gather(_parameter(decoder, params, rule, layer).astype(dtype))
            if writes:
                rows = decoder.config.vocab_size if rule.dimensions[0] == "V" else None
                content[rule.name(layer)] = rule.to_file(value[:rows])
        with processes.agreement():  # the next file's tensors are gathered only where this one is written
            if writes:
                safetensors.numpy.save_file(content, folder / name, metadata={"format": "pt"})
    if writes and len(files) > 1:
        weight_map = {
            rule.name(layer): name for name, entries in zip(names, files, strict=True) for rule, layer in entries
        }
        total = sum(_file_bytes(decoder, rule, dtype) for entries in files for rule, _ in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _plan(
    decoder: Decoder, rules: Sequence[TensorRule], dtype: np.dtype, max_file_bytes: int
) -> list[list[tuple[TensorRule, int | None]]]:
    """Which tensors go into which file, in order."""
    files: list[list[tuple[TensorRule, int | None]]] = [[]]
    filled = 0
    for rule, layer in _entries(decoder, rules):
        size = _file_bytes(decoder, rule, dtype)
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append((rule, layer))
        filled += size
    return files


def _entries(decoder: Decoder, rules: Sequence[TensorRule]) -> Iterator[tuple[TensorRule, int | None]]:
    for rule in rules:
        for layer in range(decoder.config.num_layers) if rule.per_layer else (None,):
            yield rule, layer


def _file_bytes(decoder: Decoder, rule: TensorRule, dtype: np.dtype) -> int:
    return int(np.prod(rule.file_shape(sizes_of(decoder.config)))) * dtype.itemsize


def _parameter(decoder: Decoder, params: Params, rule: TensorRule, layer: int | None) -> jax.Array:
    node: Any = params
    if layer is not None:
        run = next(name for name, layers in decoder.runs.items() if layer in layers)
        node = params["blocks"][run]
    *parents, leaf = rule.path.split("/")
    for name in parents:
        node = node[name]
    if layer is None:
        return node[leaf]
    index = layer - decoder.runs[run].start
    if decoder.lora is None or f"{leaf}_lora_a" not in node:
        return node[leaf][index]
    parts = (node[name][index] for name in (leaf, f"{leaf}_lora_a", f"{leaf}_lora_b"))
    return fold_matrix(*parts, scale=decoder.lora.scale)


def gather(value: jax.Array) -> np.ndarray:
    """The whole array on this host, also where other processes hold parts of it."""
    if value.is_fully_addressable:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def replace_folder(temporary: Path, target: Path) -> None:
    """Puts a finished folder in its place; what stood there is removed only afterwards."""
    old = target.with_name(target.name + ".replaced")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
