"""START HERE: the command line.

    python -m jaxrl_llm.main [train] --config configs/tiny_grpo.py
    python -m jaxrl_llm.main eval     --config configs/tiny_grpo.py
    python -m jaxrl_llm.main generate --config configs/tiny_grpo.py --prompt "37+58="
    python -m jaxrl_llm.main export   --config configs/tiny_grpo.py --output exported/
    python -m jaxrl_llm.main plan     --config configs/tiny_grpo.py --devices 8 --device-kind H200 [--search]

A configuration is a Python file (`config.py` says how to write one); ``--config.a.b=3`` changes an option. The run
lives in its work folder: the same command goes on where it was, and eval, generate and export use its newest
checkpoint. From here, read `trainer.py`, then what it calls.

Exit codes: 0 done · 2 bad input · 3 the run stopped itself (a check failed) · 75 ended by SIGTERM after saving ·
130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.errors import (
    EXIT_PREEMPTED,
    EXIT_RUN_STOPPED,
    EXIT_USER_ERROR,
    Preempted,
    RunStopped,
    UserError,
)

if TYPE_CHECKING:
    from jaxrl_llm.config import RunConfig
    from jaxrl_llm.trainer import Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    Args:
      arguments: the command line without the program's name; None takes the process's own.
    """
    own_process = arguments is None
    if arguments is None:
        from jaxrl_llm.allocator import restart_with_huge_pages

        restart_with_huge_pages()
        arguments = sys.argv[1:]
    try:
        run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return EXIT_RUN_STOPPED
    except Preempted as error:
        print(f"ended by SIGTERM: {error} The same command goes on from there.", file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        if own_process:  # a second Ctrl-C would meet some exit handler and print its traceback
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def run(arguments: Sequence[str]) -> None:
    """One command, from its arguments to its result.

    Raises:
      UserError: bad input; no device has been touched where that could be known before.
      RunStopped: a check of the running training failed.
      Preempted: SIGTERM ended the training after saving.
      SystemExit: argparse printed help or usage.
    """
    from jaxrl_llm.config_file import default_workdir, read_config, split_overrides

    overrides, others = split_overrides(arguments)
    options = parse(others)
    if options.help_options:
        print_options()
        return

    from jaxrl_llm.config import resolve

    config = resolve(read_config(options.config, overrides), training=options.command in ("train", "plan"))
    require_inputs(config, options)
    if options.command == "plan":
        from jaxrl_llm.plan.command import plan

        plan(config, options.devices, options.device_kind, search=options.search, json_path=options.json)
        return

    from jaxrl_llm.compilation_cache import enable_compilation_cache
    from jaxrl_llm.observability.logs import show_logs
    from jaxrl_llm.trainer import Trainer

    show_logs(config.log_level)
    enable_compilation_cache()
    workdir = options.workdir or default_workdir(options.config)
    trainer = Trainer(config, workdir, read_only=options.command != "train")
    COMMANDS[options.command](trainer, options)


def train(trainer: Trainer, options: argparse.Namespace) -> None:
    """Trains from the newest checkpoint, or the beginning, to the last step."""
    trainer.train()


def evaluate(trainer: Trainer, options: argparse.Namespace) -> None:
    """Prints the metrics of the evaluation rows as JSON."""
    restore_or_say(trainer)
    print(json.dumps(trainer.evaluate(), indent=2))
    trainer.close()


def generate(trainer: Trainer, options: argparse.Namespace) -> None:
    """Prints one JSON line per prompt, with its completions; with ``--stream`` the text of one, as it grows."""
    restore_or_say(trainer)
    prompts = read_prompts(options)
    if options.stream:
        trainer.generate(prompts, on_text=lambda prompt, sample, text: print(text, end="", flush=True))
        print()
        trainer.close()
        return
    for prompt, completions in zip(prompts, trainer.generate(prompts), strict=True):
        print(json.dumps({"prompt": prompt, "completions": completions}, ensure_ascii=False))
    trainer.close()


def export(trainer: Trainer, options: argparse.Namespace) -> None:
    """Writes the policy as a Hugging Face folder."""
    restore_or_say(trainer)
    trainer.export(options.output, overwrite=options.overwrite)
    trainer.close()
    print(options.output)


COMMANDS: dict[str, Callable[[Trainer, argparse.Namespace], None]] = {
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "export": export,
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Everything on the command line except the ``--config.a.b=…`` overrides."""
    parser = argparse.ArgumentParser(
        prog="jaxrl-llm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", nargs="?", default="train", choices=(*COMMANDS, "plan"), help="default: train")
    parser.add_argument("--config", metavar="FILE.py", help="Python file with get_config()")
    parser.add_argument("--workdir", type=_path, help="folder of the run; default: outputs/<name of the file>")
    parser.add_argument("--prompt", action="append", default=[], help="generate: a prompt; may be repeated")
    parser.add_argument("--prompts_file", type=_path, help="generate: a file with one prompt per line")
    parser.add_argument("--stream", action="store_true", help="generate: print the text of one completion as it grows")
    parser.add_argument("--output", type=_path, help="export: the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="export: replace what the folder holds")
    parser.add_argument("--devices", type=int, default=0, help="plan: how many")
    parser.add_argument("--device-kind", default="", metavar="KIND", help="plan: H200, H100 or cpu")
    parser.add_argument("--search", action="store_true", help="plan: rank all meshes in place of the configured one")
    parser.add_argument("--json", type=_path, help="plan: also write it to this file")
    parser.add_argument("--help_options", action="store_true", help="list every option of a configuration and exit")
    options = parser.parse_args(arguments)
    if not options.config and not options.help_options:
        parser.error("--config is required, for example --config configs/tiny_grpo.py")
    return options


def _path(text: str) -> pathlib.Path:
    """Refuses the empty text (an unset variable of a script), which `pathlib` takes for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; leave the option out, or give '.' for the current folder")
    return pathlib.Path(text)


def require_inputs(config: RunConfig, options: argparse.Namespace) -> None:
    """Refuses a command whose input is missing, before anything is loaded.

    Raises:
      UserError: it names the option to set.
    """
    if options.command == "train" and not config.data.train:
        raise UserError("data.train is empty: set it to the training rows (.jsonl, .parquet, builtin:NAME/SPLIT …).")
    if options.command == "eval" and not config.data.eval:
        raise UserError("data.eval is empty: set it to the evaluation rows (.jsonl, .parquet, builtin:NAME/SPLIT …).")
    if options.command == "generate" and not read_prompts(options):
        raise UserError("generate needs a prompt: give --prompt TEXT (may be repeated) or --prompts_file FILE.")
    if options.stream and (len(read_prompts(options)) != 1 or config.rollout.samples_per_prompt != 1):
        raise UserError(
            f"--stream shows one completion, but this makes {len(read_prompts(options))} x "
            f"{config.rollout.samples_per_prompt} (prompts x rollout.samples_per_prompt). Give one --prompt and "
            "--config.rollout.samples_per_prompt=1."
        )
    if options.command == "export" and not options.output:
        raise UserError("export needs --output FOLDER.")
    if options.command == "export":
        from jaxrl_llm.models.export import export_target

        export_target(options.output, overwrite=options.overwrite)


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of ``--prompt`` and ``--prompts_file``, in this order; empty lines are left out.

    Raises:
      UserError: there is no such file, or it is not UTF-8.
    """
    prompts = list(options.prompt)
    if options.prompts_file:
        if not options.prompts_file.is_file():
            raise UserError(f"--prompts_file={options.prompts_file}: there is no such file.")
        try:
            text = options.prompts_file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompts_file={options.prompts_file} is not UTF-8 text ({error}). Save it with the encoding UTF-8."
            ) from error
        # Not `splitlines`: it also cuts at characters that a prompt may hold, such as U+2028.
        prompts += [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    return prompts


def restore_or_say(trainer: Trainer) -> None:
    """Takes the newest checkpoint of the work folder; says so where there is none, since that changes the answer."""
    if not trainer.restore():
        print("note: no checkpoint in the work folder; this is the model before training", file=sys.stderr)


def print_options() -> None:
    """Prints every option with its type, default, range and what it does."""
    from jaxrl_llm.config import describe_options

    for path, text in describe_options():
        print(f"{path}\n    {text}")


if __name__ == "__main__":
    sys.exit(main())
