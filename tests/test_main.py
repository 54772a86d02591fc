"""The command line: which command runs, with what, and how it ends. The trainer has its own tests."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import types
from typing import ClassVar

import pytest

from jaxrl_llm import allocator, main
from jaxrl_llm.compilation_cache import enable_compilation_cache
from jaxrl_llm.errors import Preempted, RunStopped

FILE = """
from jaxrl_llm.config import default_config

def get_config():
    config = default_config("grpo")
    config.model.path = "builtin:tiny_addition"
    config.data.train = "builtin:addition/train"
    config.data.eval = "builtin:addition/eval"
    config.rewards = {"exact": {"function": "exact_match"}}
    return config
"""


class Recorder:
    """Stands in for the trainer and remembers what it was asked."""

    calls: ClassVar[list] = []
    error: BaseException | None = None
    has_checkpoint = True

    def __init__(self, config, workdir, *, read_only):
        self.calls.append(("init", config, workdir, read_only))

    def train(self, *, then_ends):
        if self.error:
            raise self.error
        self.calls.append(("train",))

    def restore(self):
        return self.has_checkpoint

    def evaluate(self):
        return {"eval/accuracy": 0.5}

    def generate(self, prompts, on_text=None):
        if on_text:
            on_text(0, 0, prompts[0][:1].upper())
            on_text(0, 0, prompts[0][1:].upper())
        return [[prompt.upper()] for prompt in prompts]

    def export(self, folder, *, role, overwrite):
        self.calls.append(("export", folder, role, overwrite))

    def close(self):
        self.calls.append(("close",))


@pytest.fixture
def file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "run.py").write_text(FILE)
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(Recorder, "error", None)
    monkeypatch.setattr(Recorder, "has_checkpoint", True)
    monkeypatch.setitem(sys.modules, "jaxrl_llm.trainer", types.SimpleNamespace(Trainer=Recorder))
    return str(tmp_path / "run.py")


def test_train_is_the_default(file: str):
    assert main.main(["--config", file, "--config.num_steps=3"]) == 0
    (_, config, workdir, read_only), last = Recorder.calls
    assert config.num_steps == 3 and workdir == pathlib.Path("outputs/run") and last == ("train",)
    assert not read_only


def test_eval_prints_json(file: str, capsys):
    assert main.main(["eval", f"--config={file}", "--workdir", "elsewhere"]) == 0
    assert Recorder.calls[0][2:] == (pathlib.Path("elsewhere"), True) and Recorder.calls[-1] == ("close",)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"eval/accuracy": 0.5} and not captured.err


def test_generate_takes_prompts_from_both_places_in_order(file: str, tmp_path: pathlib.Path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("é b\n\nc\n", encoding="utf-8")
    assert main.main(["generate", "--config", file, "--prompt", "a", "--prompts_file", str(prompts)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["a", "é b", "c"]
    assert lines[1]["completions"] == ["É B"]


def test_a_prompts_file_is_cut_at_line_ends_only(file: str, tmp_path: pathlib.Path, capsys):
    """Caught: `splitlines`, which also cuts at U+2028, and a byte-order mark that becomes part of the first prompt."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("\ufeffa\r\nb\u2028c\x0cd\r\n".encode())
    assert main.main(["generate", "--config", file, "--prompts_file", str(prompts)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert [line["prompt"] for line in lines] == ["a", "b\u2028c\x0cd"]
    prompts.write_bytes(b"caf\xe9")
    assert main.main(["generate", "--config", file, "--prompts_file", str(prompts)]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_an_export_that_may_not_be_written_loads_nothing(file: str, tmp_path: pathlib.Path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    assert main.main(["export", "--config", file, "--output", str(tmp_path / "there"), "--overwrite"]) == 2
    assert "holds something other than a model" in capsys.readouterr().err and not Recorder.calls


def test_a_model_without_a_checkpoint_is_said_to_be_one(file: str, monkeypatch, capsys):
    monkeypatch.setattr(Recorder, "has_checkpoint", False)
    assert main.main(["eval", "--config", file]) == 0
    assert "model before training" in capsys.readouterr().err


def test_export_writes_where_it_is_told(file: str):
    assert main.main(["export", "--config", file, "--output", "there", "--overwrite"]) == 0
    assert ("export", pathlib.Path("there"), "", True) in Recorder.calls


def test_stream_prints_the_text_as_it_grows(file: str, capsys):
    arguments = ["generate", "--stream", "--config", file, "--prompt", "ab", "--config.rollout.samples_per_prompt=1"]
    assert main.main(arguments) == 0
    assert capsys.readouterr().out == "AB\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.num_stps=3"], "Did you mean 'num_steps'"),
        (["--config.data.train="], "data.train is empty"),
        (["--config.rewards={}"], "rewards is empty"),
        (["eval", "--config.data.eval="], "data.eval is empty"),
        (["eval", "--config.algorithm.name=sft", "--config.rewards={}"], "rewards is empty"),
        (["generate"], "generate needs a prompt"),
        (["generate", "--prompts_file", "nowhere.txt"], "no such file"),
        (["generate", "--prompts_file", "/"], "this is no file"),
        (["generate", "--prompt", "a", "--config.algorithm.name=reward_model"], "scores texts and writes none"),
        (["generate", "--stream", "--prompt", "a", "--prompt", "b"], "this makes 2 x"),
        (["--chat"], "--chat is for generate alone"),
        (["generate", "--chat", "--stream", "--prompt", "a"], "leave --stream or the other command out"),
        (["generate", "--chat", "--coordinator=h:1", "--processes=2", "--process=0"], "standard input of one process"),
        (["export"], "export needs --output"),
        (["export", "--output", "there", "--role", "critic"], "role = 'critic': a run of grpo can export policy."),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(file: str, arguments: list[str], words: str, capsys):
    """Nothing is loaded: the trainer is never made."""
    assert main.main([*arguments, "--config", file]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and "Traceback" not in error
    assert not Recorder.calls


def test_a_run_that_stops_itself_has_its_own_exit_code(file: str, monkeypatch, capsys):
    monkeypatch.setattr(Recorder, "error", RunStopped("loss/total is nan"))
    assert main.main(["--config", file]) == 3
    assert capsys.readouterr().err == "stopped: loss/total is nan\n"


def test_sigterm_has_its_own_exit_code(file: str, monkeypatch, capsys):
    monkeypatch.setattr(Recorder, "error", Preempted("Saved after step 2 of 6."))
    assert main.main(["--config", file]) == 75
    assert "Saved after step 2 of 6." in capsys.readouterr().err


def test_a_second_interrupt_does_not_disturb_the_end(file: str, monkeypatch, capsys):
    """Caught: a traceback out of an exit handler of jax."""
    monkeypatch.setattr(Recorder, "error", KeyboardInterrupt())
    monkeypatch.setattr(allocator, "restart_with_huge_pages", lambda: None)
    monkeypatch.setattr(sys, "argv", ["jaxrl-llm", "--config", file])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main.main() == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.startswith("interrupted")


def test_without_a_configuration_usage_is_shown(capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main([])
    assert "--config is required" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--workdir", "--output", "--prompts_file"])
def test_an_empty_path_is_not_the_current_folder(file: str, option: str, capsys):
    """``--workdir=$UNSET``. Caught: the run written into whatever folder the shell was in."""
    with pytest.raises(SystemExit, match="2"):
        main.main(["export", "--config", file, f"{option}="])
    assert f"argument {option}: the path is empty" in capsys.readouterr().err and not Recorder.calls


def test_help_is_fast():
    """Caught: jax imported at the top of main or config_file."""
    code = (
        "import sys, jaxrl_llm.main\n"
        "try: jaxrl_llm.main.main(['--help'])\n"
        "except SystemExit: print('jax' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.strip() == "False" and "START HERE" in result.stdout


def test_the_options_are_listed(capsys):
    assert main.main(["--help_options"]) == 0
    listed = capsys.readouterr().out
    assert "rollout.temperature\n    float, default 1.0, ≥ 0." in listed and "algorithm.kl_coef" in listed


def test_the_program_restarts_itself_once_with_huge_pages(monkeypatch):
    """Caught: a restart that does not see that it has happened (endless)."""
    started = []
    monkeypatch.setattr(allocator, "_can_use_huge_pages", lambda: True)
    monkeypatch.setattr(os, "execv", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")
    allocator.restart_with_huge_pages()
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1"
    allocator.restart_with_huge_pages()
    assert started == [(sys.executable, sys.orig_argv)]


def test_the_compilation_cache_goes_where_it_is_told(tmp_path: pathlib.Path, monkeypatch):
    import jax

    before = jax.config.jax_compilation_cache_dir
    assert enable_compilation_cache() == pathlib.Path(before)
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert enable_compilation_cache().is_relative_to(tmp_path / "jaxrl_llm" / "xla")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
