"""Runs a peer's script by the Python of its own environment, on the same model."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.allocator import TUNABLE


def run(python: str, script: str, model: str, flags: Mapping[str, Any], *, allocator: bool) -> dict[str, Any]:
    """The JSON object that the script prints behind ``RESULT``; the model goes there as a Hugging Face folder.

    Args:
      allocator: whether the peer gets the allocator setting that this program restarts itself with, too.

    Raises:
      SystemExit: the script failed; with the end of what it wrote.
    """
    from jaxrl_llm.data.tokenizer import load_tokenizer
    from jaxrl_llm.models.export import export_model
    from jaxrl_llm.models.loading import load_model

    environment = {**os.environ}
    tunables = environment.pop("GLIBC_TUNABLES", "")
    kept = [one for one in tunables.split(":") if one and (allocator or not one.startswith(TUNABLE))]
    if kept:
        environment["GLIBC_TUNABLES"] = ":".join(kept)
    with tempfile.TemporaryDirectory() as folder:
        decoder, params = load_model(model)
        export_model(pathlib.Path(folder) / "model", decoder, params, load_tokenizer(model))
        del params
        command = [python, str(pathlib.Path(__file__).with_name(script)), "--model", f"{folder}/model"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{script} failed (exit code {done.returncode}):\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))
