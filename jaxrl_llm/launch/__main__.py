"""Starts and supervises a run of several processes on this machine.

    python -m jaxrl_llm.launch --processes 4 -- --config configs/tiny_grpo.py

What stands behind ``--`` is the command line of `jaxrl_llm.main`, the same for every process. When one dies, the rest
is ended and all go on from the newest checkpoint; what each writes to standard error is in ``logs/process_<i>.log`` of
the work folder. SIGTERM and Ctrl-C are passed on; what does not hear them is killed after ``--save-grace-s`` seconds,
or ``--grace-s`` seconds after a second signal.

Exit codes: those of `jaxrl_llm.main`; of a process that was killed, 128 and the signal's number.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from jaxrl_llm import main
from jaxrl_llm.errors import EXIT_USER_ERROR, UserError
from jaxrl_llm.launch.supervisor import Supervisor


def launch(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code.

    Raises:
      UserError: the options don't fit this machine or each other; nothing was started.
    """
    from jaxrl_llm.config_file import default_workdir, split_overrides

    options, others = parse(arguments)
    run = main.parse(split_overrides(others)[1])
    if any(value is not None for value in (run.coordinator, run.processes, run.process)):
        raise UserError("--coordinator, --processes and --process behind -- are set by the launcher: leave them out.")
    workdir = pathlib.Path(run.workdir or default_workdir(run.config))
    per_process = devices_per_process(options.processes, options.devices_per_process, os.environ, gpus())
    return Supervisor(
        [sys.executable, "-m", "jaxrl_llm.main", *others],
        [device_environment(index, per_process, os.environ, gpus()) for index in range(options.processes)],
        workdir / "logs",
        progress=lambda: sorted(folder.name for folder in (workdir / "checkpoints").glob("[0-9]*")),
        tries=options.tries,
        grace_s=options.grace_s,
        save_s=options.save_grace_s,
    ).run()


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own options, and what stands behind ``--``."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s --processes N [options] -- --config FILE.py [options of jaxrl_llm.main]",
    )
    parser.add_argument("--processes", type=_positive, required=True, help="how many processes")
    parser.add_argument(
        "--devices-per-process",
        "--devices_per_process",
        type=_positive,
        help="GPUs of each, or simulated devices on a CPU; default: the machine's GPUs in equal parts, 1 on a CPU",
    )
    parser.add_argument(
        "--tries", type=_positive, default=3, help="failures without a new checkpoint in between, at most; default: 3"
    )
    parser.add_argument(
        "--grace-s",
        "--grace_s",
        type=_seconds,
        default=10.0,
        help="seconds between the request to end and SIGKILL, when another process has died, or after a second SIGTERM "
        "or Ctrl-C to the launcher; default: 10",
    )
    parser.add_argument(
        "--save-grace-s",
        "--save_grace_s",
        type=_seconds,
        default=600.0,
        help="seconds that the processes have to finish their step, save and end after SIGTERM or Ctrl-C to the "
        "launcher, before SIGKILL; default: 600",
    )
    own, separator, others = _cut(arguments)
    if not separator and not {"-h", "--help"} & set(own):
        parser.error("the command line of jaxrl_llm.main stands behind --, for example -- --config configs/run.py")
    return parser.parse_args(own), others


def _cut(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return list(arguments), False, []
    place = list(arguments).index("--")
    return list(arguments[:place]), True, list(arguments[place + 1 :])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is needed")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: seconds are needed, at least 0")
    return value


def gpus() -> int:
    """NVIDIA GPUs of this machine, or the visible ones; the driver's files say it without starting one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip()])
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def devices_per_process(processes: int, wanted: int | None, environment: Mapping[str, str], found: int) -> int:
    """How many devices each process has.

    Args:
      wanted: None for equal parts.
      found: GPUs of the machine.

    Raises:
      UserError: there are not so many GPUs, or they can't be divided.
    """
    if not _on_gpus(environment, found):
        return wanted or 1
    if wanted is None and found % processes:
        raise UserError(
            f"--processes={processes}: the {found} GPUs of this machine can't be divided among them. Use a divisor of "
            f"{found}, or say how many each has (--devices-per-process)."
        )
    wanted = wanted or found // processes
    if wanted * processes > found:
        raise UserError(
            f"--processes={processes} with --devices-per-process={wanted} needs {wanted * processes} GPUs, and this "
            f"machine has {found}. Lower one of them, or set JAX_PLATFORMS=cpu to simulate devices."
        )
    return wanted


def device_environment(index: int, devices: int, environment: Mapping[str, str], found: int) -> dict[str, str]:
    """The variables that give a process its devices."""
    if _on_gpus(environment, found):
        return {"JAX_LOCAL_DEVICE_IDS": ",".join(str(index * devices + one) for one in range(devices))}
    flags = [
        flag
        for flag in environment.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count=")
    ]
    return {"XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])}


def _on_gpus(environment: Mapping[str, str], found: int) -> bool:
    return found > 0 and not environment.get("JAX_PLATFORMS", "").startswith("cpu")


if __name__ == "__main__":
    try:
        sys.exit(launch(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
