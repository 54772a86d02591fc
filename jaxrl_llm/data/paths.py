"""Finds the folder or file that holds a tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors

from jaxrl_llm.errors import UserError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_tokenizer_path(path: str | Path) -> Path:
    """The folder, or ``.gguf`` file, of ``path``: local, ``builtin:NAME``, or a hub id (only the tokenizer is fetched).

    Raises:
      UserError: nothing is there, or the hub can't be reached.
    """
    text = str(path)
    if text.startswith("builtin:"):
        folder = ASSETS / text.removeprefix("builtin:")
        if not folder.is_dir():
            known = ", ".join(f"builtin:{child.name}" for child in sorted(ASSETS.glob("*/"))) or "none"
            raise UserError(f"The built-in model {text!r} does not exist. Known: {known}.")
        return folder
    local = Path(path).expanduser()
    if text and local.exists():
        return local
    if not HUB_ID.fullmatch(text) or local.suffix == ".gguf":
        raise UserError(
            f"The tokenizer path {text!r} does not exist. Set tokenizer.path (or model.path) to a Hugging Face "
            "folder, a .gguf file, builtin:NAME or a hub id."
        )
    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=TOKENIZER_FILES))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise UserError(
            f"The tokenizer path {text!r} is neither a local folder nor a hub id that can be fetched ({error}). "
            "Check the name, the network and HF_TOKEN, or give a local folder."
        ) from error
