"""START HERE: the command line.

    python -m jaxrl_llm.main [train] --config configs/tiny_grpo.py
    python -m jaxrl_llm.main eval     --config configs/tiny_grpo.py
    python -m jaxrl_llm.main generate --config configs/tiny_grpo.py --prompt "37+58=" [--chat]
    python -m jaxrl_llm.main export   --config configs/tiny_grpo.py --output exported/
    python -m jaxrl_llm.main plan     --config configs/tiny_grpo.py --devices 8 --device-kind H200 [--search]

A configuration is a Python file (`config.py` says how to write one); ``--config.a.b=3`` changes an option. The run
lives in its work folder: the same command goes on where it was, and eval, generate and export use its newest
checkpoint. From here, read `trainer.py`, then what it calls.

A run of several processes is this command once a process, started by `python -m jaxrl_llm.launch`, srun, mpirun or a
JobSet (`launch/joining.py`).

Exit codes: 0 done · 2 bad input, or a run that is finished already · 3 the run stopped itself (a check failed) ·
75 ended by SIGTERM, after saving where there was something to save · 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import (
    EXIT_PREEMPTED,
    EXIT_RUN_STOPPED,
    EXIT_USER_ERROR,
    Preempted,
    RunStopped,
    UserError,
    readable,
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
    code = _run_and_explain(arguments, own_process)
    if own_process and code:
        from jaxrl_llm.launch.joining import leave

        leave(code)
    return code


def _run_and_explain(arguments: Sequence[str] | None, own_process: bool) -> int:
    if arguments is None:
        from jaxrl_llm.allocator import restart_with_huge_pages
        from jaxrl_llm.launch.ending import end_at_sigterm

        restart_with_huge_pages()
        end_at_sigterm()
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
    except BrokenPipeError:  # whoever read the output has seen enough, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        from jaxrl_llm import processes

        if not own_process or processes.count() == 1:
            raise
        traceback.print_exc()
        return 1
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
    from jaxrl_llm.launch.joining import find, join

    config = resolve(read_config(options.config, overrides), training=options.command in ("train", "plan"))
    require_inputs(config, options)
    if options.chat:  # one sequence at a time: no pages for more
        config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, num_slots=1, samples_per_prompt=1)
        )
    if options.command == "plan":
        from jaxrl_llm.plan.command import plan

        plan(config, options.devices, options.device_kind, search=options.search, json_path=options.json)
        return
    joining = find(os.environ, options.coordinator, options.processes, options.process)
    if joining is not None and options.chat and not read_prompts(options):
        raise UserError("--chat reads the standard input of one process: with several, give the turns by --prompt.")

    from jaxrl_llm import processes
    from jaxrl_llm.compilation_cache import enable_compilation_cache
    from jaxrl_llm.determinism import require_deterministic
    from jaxrl_llm.launch.ending import end_with_others
    from jaxrl_llm.observability.logs import show_logs
    from jaxrl_llm.observability.watchdog import Watchdog
    from jaxrl_llm.trainer import Trainer

    show_logs(config.log_level)
    enable_compilation_cache()
    if config.deterministic:
        require_deterministic()  # several processes start their devices when they join
    workdir = options.workdir or default_workdir(options.config)
    with Watchdog(config.watchdog_s):
        join(joining, heartbeat_s=config.processes.heartbeat_s, join_timeout_s=config.processes.join_timeout_s)
        end_with_others()
        if not processes.is_first():
            show_logs("warning")
        if options.command == "export":
            require_export_target(options)
        trainer = Trainer(config, workdir, read_only=options.command != "train")
        COMMANDS[options.command](trainer, options)


def train(trainer: Trainer, options: argparse.Namespace) -> None:
    """Trains from the newest checkpoint, or the beginning, to the last step."""
    trainer.train(then_ends=True)


def evaluate(trainer: Trainer, options: argparse.Namespace) -> None:
    """Prints the metrics of the evaluation rows as JSON."""
    restore_or_say(trainer)
    say(json.dumps(trainer.evaluate(), indent=2))
    trainer.close()


def generate(trainer: Trainer, options: argparse.Namespace) -> None:
    """Prints one JSON line per prompt, with its completions; with ``--stream`` the text of one, as it grows; with
    ``--chat`` the answers to the turns of one conversation."""
    from jaxrl_llm import processes

    restore_or_say(trainer)
    prompts = read_prompts(options)
    processes.require_equal({"the prompts": prompts})
    if options.chat:
        chat(trainer, prompts or typed_turns())
        trainer.close()
        return
    if options.stream:
        trainer.generate(prompts, on_text=lambda prompt, sample, text: say(text, end="", flush=True))
        say()
        trainer.close()
        return
    for prompt, completions in zip(prompts, trainer.generate(prompts), strict=True):
        say(json.dumps({"prompt": prompt, "completions": completions}, ensure_ascii=False))
    trainer.close()


def chat(trainer: Trainer, turns: Iterable[str]) -> None:
    """Prints the answer to each turn of a conversation, as it grows."""
    from jaxrl_llm.conversation import Chat

    conversation = Chat(trainer)
    for turn in turns:
        conversation.say(turn, on_text=lambda text: say(text, end="", flush=True))
        say()


def typed_turns() -> Iterator[str]:
    """The lines of standard input until it ends, empty ones left out; a person is shown where to type.

    Raises:
      UserError: a line is longer than `LINE_CHARACTERS` or is no text.
    """
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline(LINE_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            raise UserError(f"A turn is not {error.encoding} text ({error.reason}). Type or send it so.") from error
        if len(line) > LINE_CHARACTERS:
            raise UserError(f"A turn is a line of at most {LINE_CHARACTERS:,} characters; this one goes on.")
        if line.strip():
            yield line.rstrip("\r\n")
        elif not line:
            return


LINE_CHARACTERS = 100_000


def export(trainer: Trainer, options: argparse.Namespace) -> None:
    """Writes the policy, or the agent of `--role`, as a Hugging Face folder."""
    restore_or_say(trainer)
    trainer.export(options.output, role=options.role, overwrite=options.overwrite)
    trainer.close()
    say(options.output)


def say(*values: Any, **how: Any) -> None:
    """`print`, by one process of several."""
    from jaxrl_llm import processes

    if processes.is_first():
        print(*values, **how)


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
    parser.add_argument(
        "--chat",
        action="store_true",
        help="generate: the prompts are turns of one conversation; without prompts, lines of standard input are",
    )
    parser.add_argument("--output", type=_path, help="export: the folder to write")
    parser.add_argument("--role", default="", help="export: which agent of ippo, such as policy_1; default: the first")
    parser.add_argument("--overwrite", action="store_true", help="export: replace what the folder holds")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where no cluster says it")
    parser.add_argument("--processes", type=int, help="how many processes the run has, with --coordinator")
    parser.add_argument("--process", type=int, help="which of them this is, from 0, with --coordinator")
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
    if options.command == "generate" and not options.chat and not read_prompts(options):
        raise UserError(
            "generate needs a prompt: give --prompt TEXT (may be repeated), --prompts_file FILE, or --chat to type."
        )
    if options.chat and (options.command != "generate" or options.stream):
        raise UserError("--chat is for generate alone, and streams by itself: leave --stream or the other command out.")
    if options.command == "generate":
        from jaxrl_llm.algorithms import find_algorithm

        find_algorithm(config.algorithm.name).require_writer(config.algorithm.options)
    if options.stream and (len(read_prompts(options)) != 1 or config.rollout.samples_per_prompt != 1):
        raise UserError(
            f"--stream shows one completion, but this makes {len(read_prompts(options))} x "
            f"{config.rollout.samples_per_prompt} (prompts x rollout.samples_per_prompt). Give one --prompt and "
            "--config.rollout.samples_per_prompt=1."
        )
    if options.command == "export" and not options.output:
        raise UserError("export needs --output FOLDER.")
    if options.role:
        from jaxrl_llm.algorithms import find_algorithm

        find_algorithm(config.algorithm.name).exported_role(config.algorithm.options, options.role)


def require_export_target(options: argparse.Namespace) -> None:
    """Refuses a folder that can't be exported to, on all processes; process 0 alone looks, since it alone writes.

    Raises:
      UserError: see `models.export.export_target`.
    """
    from jaxrl_llm import processes
    from jaxrl_llm.models.export import export_target

    with processes.agreement():
        if processes.is_first():
            export_target(options.output, overwrite=options.overwrite)


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of ``--prompt`` and ``--prompts_file``, in this order; empty lines are left out.

    Raises:
      UserError: there is no such file, or it is not UTF-8.
    """
    prompts = list(options.prompt)
    if options.prompts_file:
        with readable(f"--prompts_file={options.prompts_file}"):
            if not options.prompts_file.is_file():
                found = "this is no file" if options.prompts_file.exists() else "there is no such file"
                raise UserError(f"--prompts_file={options.prompts_file}: {found}. Give one with a prompt in each line.")
            content = options.prompts_file.read_bytes()
        try:
            text = content.decode("utf-8-sig")
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
        say("note: no checkpoint in the work folder; this is the model before training", file=sys.stderr)


def print_options() -> None:
    """Prints every option with its type, default, range and what it does."""
    from jaxrl_llm.config import describe_options

    for path, text in describe_options():
        print(f"{path}\n    {text}")


if __name__ == "__main__":
    sys.exit(main())
