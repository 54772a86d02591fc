"""The tensors of a Hugging Face folder: one ``.safetensors`` file or several with an index, read slice by slice."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import safetensors

from jaxrl_llm.errors import UserError, readable
from jaxrl_llm.models.tensors import Index, Shapes, differences

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder:
    """Named tensors of a folder. Files are memory-mapped: reading a slice touches only its pages.

    Args:
      names: of its files; None for those of a model.
      ignored: ends of names of tensors that are as if they were not there, whatever they hold.
    """

    def __init__(self, folder: Path, names: Sequence[str] | None = None, *, ignored: Collection[str] = ()):
        self.source = str(folder)
        self._file_of: dict[str, safetensors.safe_open] = {}
        for file in _files(folder) if names is None else [folder / name for name in names]:
            if not file.exists():
                raise UserError(
                    f"{folder / INDEX} names {file.name}, which is not in the folder. The model's download or copy is "
                    "incomplete: fetch the missing file."
                )
            with readable(str(file)):
                try:
                    handle = safetensors.safe_open(file, "numpy")
                except safetensors.SafetensorError as error:
                    raise UserError(f"{file} is not a valid safetensors file ({error}). Fetch it again.") from error
            for name in handle.keys():  # noqa: SIM118  it is no dict
                if name.endswith(tuple(ignored)):
                    continue
                kind = handle.get_slice(name).get_dtype()
                if kind not in FLOATS:
                    raise UserError(
                        f"{file} holds {name} as {kind}; only {', '.join(FLOATS)} are read. Quantized weights are not "
                        "supported: give the model's original folder."
                    )
                if name in self._file_of:
                    raise UserError(
                        f"{file} holds {name}, which another file of the folder holds too: which one is meant can't be "
                        "told. Leave the files of one model in the folder, or its index."
                    )
                self._file_of[name] = handle

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._file_of[name].get_slice(name)[index]


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        try:
            with readable(str(index)):
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if any(
                Path(name).name != name or name == ".." for name in names
            ):  # of a stranger: it names files of its folder alone
                raise ValueError("a file name with a folder in it")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{index} is no index of safetensors files ({type(error).__name__}: {error}). Fetch it again."
            ) from error
        return sorted(folder / name for name in names)
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern))
        if pickled:
            raise UserError(
                f"{folder} has no .safetensors file, only {', '.join(pickled[:3])}: a pickle, which can run any code "
                "when it is read, and is refused. Where you trust its author, convert the model with transformers "
                "(save_pretrained writes safetensors), or take a revision that has safetensors."
            )
        raise UserError(
            f"{folder} has no .safetensors file. Other weight formats are not read: convert the model with "
            "transformers (save_pretrained writes safetensors)."
        )
    return files


def check_shapes(source: str, kind: str, expected: Shapes, given: Shapes) -> None:
    """Raises UserError, naming each difference, unless ``given`` are exactly the ``expected`` tensors.

    Args:
      source: where they are.
      kind: what config.json says they are.
    """
    listed = differences(expected, given)
    if listed:
        raise UserError(
            f"The weights in {source} do not fit its config ({kind}): {listed}. Check that config.json belongs to "
            "these weights and that the files are complete."
        )
