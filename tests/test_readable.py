"""Files that the system does not give: one paragraph with the path, wherever a file of the user's is read."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import find_algorithm
from jaxrl_llm.config_file import read_config
from jaxrl_llm.data.sources import read_rows
from jaxrl_llm.errors import UserError
from jaxrl_llm.main import main
from jaxrl_llm.models.loading import load_config
from jaxrl_llm.models.safetensors_folder import SafetensorsFolder

LONG = "x" * 5000
"""A name that no file can have: asking for it is an error of the system's."""


def model_with(name: str) -> Callable[[pathlib.Path], Any]:
    """Opens a model folder that has one file under ``name``."""

    def opened(file: pathlib.Path) -> Any:
        folder = file.parent / f"model of {name}"
        folder.mkdir()
        file.rename(folder / name)
        return load_config(folder) if name == "config.json" else SafetensorsFolder(folder)

    return opened


@pytest.mark.parametrize(
    ("ending", "read"),
    [
        (".jsonl", read_rows),
        (".json", read_rows),
        (".parquet", read_rows),
        (".json", configs.load),
        (".py", lambda file: read_config(str(file))),
        (".py", lambda file: find_algorithm(f"{file}:its_name")),
        (".json", model_with("config.json")),
        (".json", model_with("model.safetensors")),
        (".json", model_with("model.safetensors.index.json")),
    ],
)
def test_a_file_that_can_not_be_read(tmp_path: pathlib.Path, ending: str, read: Callable[[Any], Any]):
    """A regular file whose reading fails, whatever rights this user has. Caught: each `readable` left out."""
    file = tmp_path / f"file{ending}"
    file.symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"can't be read|is not a valid|fails: OSError") as told:
        read(file)
    assert str(tmp_path) in str(told.value)


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_rows(f"{LONG}.jsonl"),
        lambda: read_config(f"{LONG}.py"),
        lambda: find_algorithm(f"{LONG}.py:its_name"),
        lambda: load_config(LONG),
        lambda: read_rows("~nobody-of-that-name/rows.jsonl"),
    ],
)
def test_a_name_that_is_no_path(read: Callable[[], Any]):
    """Caught: the question whether it is there asked outside `readable`; a home folder that is not known."""
    with pytest.raises(UserError, match=r"can't be read|does not exist"):
        read()


def test_prompts_that_can_not_be_read(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "prompts.txt"
    file.symlink_to("/proc/self/mem")
    assert main(["generate", "--config", "configs/tiny_grpo.py", "--prompts_file", str(file)]) == 2
    assert "can't be read" in capsys.readouterr().err
