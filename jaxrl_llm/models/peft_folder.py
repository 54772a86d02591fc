"""LoRA adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

The format is that of https://huggingface.co/docs/peft/developer_guides/checkpoint: a tensor is called after its
matrix's module in the Hugging Face model, behind ``base_model.model.``; lora_A.weight is ``[rank, inputs]`` and
lora_B.weight ``[outputs, rank]``, and the matrix acts as ``W + lora_alpha / r * B A``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.errors import UserError, readable
from jaxrl_llm.models.arrangement import split_adapters
from jaxrl_llm.models.config import LORA_TARGETS, Lora, ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.export import gather, replace_folder
from jaxrl_llm.models.lora import abstract_adapters, logical_axes
from jaxrl_llm.models.registry import FAMILIES
from jaxrl_llm.models.safetensors_folder import SafetensorsFolder
from jaxrl_llm.models.tensors import TensorRule, differences, sizes_of
from jaxrl_llm.sharding import Layout
from jaxrl_llm.types import Params

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),  # the others change the base as well
}
"""Options of PEFT that change what an adapter computes, and the values with which they don't."""


def save_adapter(
    folder: str | Path, decoder: Decoder, params: Params, *, base_model: str = "", overwrite: bool = False
) -> None:
    """Writes the adapters alone, in float32. Every process must call this; process 0 writes.

    The folder appears whole or not at all.

    Args:
      decoder: with `lora`.
      params: with adapters, or the adapters alone; in the training arrangement, on any mesh.
      base_model: path or hub id of the model that they belong to, for whoever loads them.

    Raises:
      UserError: the folder is a file; it has something in it and ``overwrite`` is False; or what it has in it is no
        adapter.
    """
    if decoder.lora is None:
        raise ValueError("decoder.lora is None: there are no adapters to save")
    target = _target(folder, overwrite)
    _, adapters = split_adapters(params)
    content = {}
    for rule in _rules(decoder.config, decoder.lora):
        for layer in range(decoder.config.num_layers):
            value = gather(_stacked(decoder, adapters, rule, layer).astype(jnp.float32))
            content[rule.name(layer)] = rule.to_file(value)
    if jax.process_index() != 0:
        return
    temporary = target.with_name(target.name + ".incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"The adapter folder {str(target)!r} can't be made: {error.strerror}. Give one where you may write."
        ) from error
    (temporary / CONFIG).write_text(json.dumps(_to_peft(decoder, decoder.lora, base_model), indent=2) + "\n")
    safetensors.numpy.save_file(content, temporary / WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(temporary / CONFIG, temporary / WEIGHTS)  # safetensors makes it private whatever the umask
    replace_folder(temporary, target)


def load_adapter(
    folder: str | Path, decoder: Decoder, *, mesh: Mesh | None = None, layout: Layout | None = None
) -> tuple[Lora, Params]:
    """The adapters of a local folder that PEFT or :func:`save_adapter` wrote, for this model.

    Args:
      decoder: the model; its own `lora`, if any, plays no part.
      mesh, layout: where the adapters go; without a mesh, to the default device.

    Returns:
      What they are, and their tree in float32: ``merge_trees(base, adapters)`` are the parameters of
      ``decoder.with_lora(lora)``.

    Raises:
      UserError: no such folder, damaged files, an option that this project does not have, or tensors that are missing,
        left over or of another shape than the model's.
    """
    if (mesh is None) != (layout is None):
        raise ValueError("mesh and layout go together: give both or none")
    local = Path(os.path.expanduser(folder))
    peft = _read_config(local)
    tensors = SafetensorsFolder(local, [WEIGHTS])
    lora = _from_peft(peft, local, decoder.config, tensors.shapes())
    rules, sizes = _rules(decoder.config, lora), sizes_of(decoder.config) | {"r": lora.rank}
    expected = {
        rule.name(layer): rule.file_shape(sizes) for rule in rules for layer in range(decoder.config.num_layers)
    }
    if listed := differences(expected, tensors.shapes()):
        raise UserError(
            f"The adapter in {local} does not fit the model ({decoder.config.architecture}, "
            f"{decoder.config.num_layers} layers, rank {lora.rank}): {listed}. Check that it was trained on this model."
        )
    rule_of = {rule.path: rule for rule in rules}
    axes = logical_axes(decoder, lora)
    whole = jax.tree.map(lambda _: None, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    shardings = whole if mesh is None or layout is None else layout.shardings(mesh, axes)

    def load(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any) -> Array:
        _, run, *names = [entry.key for entry in path]
        rule = rule_of["/".join(names)]
        everything = (slice(None),) * len(rule.dimensions)
        layers = [rule.read(tensors.read, layer, everything, sizes) for layer in decoder.runs[run]]
        value = np.stack(layers).astype(np.float32)
        if sharding is None:
            return jnp.asarray(value)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])

    return lora, jax.tree.map_with_path(load, abstract_adapters(decoder, lora), shardings)


def _rules(config: ModelConfig, lora: Lora) -> tuple[TensorRule, ...]:
    """Those of A and B of each target, from its matrix's: the file has outputs in front, then inputs."""
    rules = []
    for rule in FAMILIES[config.architecture].rules(config):
        if rule.path.rpartition("/")[2] in lora.targets:
            outputs, inputs = rule.file_dimensions
            module = PREFIX + rule.tensor.removesuffix(".weight")
            a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
            rules.append(TensorRule(f"{rule.path}_lora_a", a, (*inputs, "r"), (("r",), inputs)))
            rules.append(TensorRule(f"{rule.path}_lora_b", b, ("r", *outputs), (outputs, ("r",))))
    return tuple(rules)


def _stacked(decoder: Decoder, adapters: Params, rule: TensorRule, layer: int) -> jax.Array:
    run = next(name for name, layers in decoder.runs.items() if layer in layers)
    node: Any = adapters["blocks"][run]
    for name in rule.path.split("/"):
        node = node[name]
    return node[layer - decoder.runs[run].start]


def _to_peft(decoder: Decoder, lora: Lora, base_model: str) -> dict[str, Any]:
    modules = {rule.tensor.split(".")[-2] for rule in FAMILIES[decoder.config.architecture].rules(decoder.config)
               if rule.path.rpartition("/")[2] in lora.targets}  # fmt: skip
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }


def _from_peft(peft: dict[str, Any], folder: Path, config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Lora:
    """Which matrices have adapters is read from the tensors: PEFT names them by patterns as well."""
    for name, allowed in _NEUTRAL.items():
        if name in peft and peft[name] not in allowed:
            raise UserError(
                f"{folder / CONFIG} has {name}={json.dumps(peft[name])}, which is not supported; supported is "
                f"{json.dumps(allowed[0])}. Merge that adapter into its model with PEFT (merge_and_unload) and load "
                "the whole model."
            )
    rank, alpha = peft.get("r", 8), peft.get("lora_alpha", 8)  # PEFT's defaults
    if type(rank) is not int or type(alpha) not in (int, float):
        raise UserError(f"{folder / CONFIG} has r={rank!r} and lora_alpha={alpha!r}; both must be numbers.")
    everything = Lora(rank, alpha * math.sqrt(rank) if peft.get("use_rslora") else alpha, LORA_TARGETS)
    rules = _rules(config, everything)
    found = {rule.path.rpartition("/")[2].removesuffix("_lora_a") for rule in rules if rule.name(0) in shapes}
    targets = tuple(name for name in LORA_TARGETS if name in found)
    if not targets:
        raise UserError(
            f"{folder / WEIGHTS} has no adapter of a matrix of {config.architecture} (such as {rules[0].name(0)}); it "
            f"holds {', '.join(sorted(shapes)[:4]) or 'nothing'}. Check that it was trained on this model."
        )
    return Lora(rank, everything.alpha, targets)


def _read_config(folder: Path) -> dict[str, Any]:
    with readable(str(folder / CONFIG)):
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise UserError(f"{folder / name} does not exist. Give the folder of an adapter in PEFT's format.")
        text = (folder / CONFIG).read_bytes()
    try:
        content = json.loads(text.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / CONFIG} is not valid JSON ({error}). Fetch it again.") from error
    if not isinstance(content, dict) or "peft_type" not in content:
        raise UserError(f"{folder / CONFIG} names no peft_type, so it is no adapter's. Fetch it again.")
    return content


def _target(folder: str | Path, overwrite: bool) -> Path:
    target = Path(os.path.expanduser(folder)).resolve()
    if target.exists() and not target.is_dir():
        raise UserError(f"The adapter folder {str(target)!r} is a file. Give the name of a folder.")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise UserError(f"The adapter folder {str(target)!r} is not empty. Give another one, or overwrite=True.")
        if not (target / CONFIG).exists() or any(entry.is_dir() for entry in target.iterdir()):
            raise UserError(
                f"The adapter folder {str(target)!r} holds something other than an adapter, which would be deleted. "
                "Give another folder."
            )
    return target
