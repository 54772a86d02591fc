"""How this process becomes one of several: told by flags or variables, or found out from the cluster.

Told: ``--coordinator HOST:PORT --processes N --process I``, or the variables ``JAXRL_COORDINATOR``,
``JAXRL_PROCESSES`` and ``JAXRL_PROCESS`` (which ``python -m jaxrl_llm.launch`` and the JobSet manifest set). Else found
out by jax itself, where one of these is there:

- Slurm, in a job step (``srun``) of several tasks;
- Open MPI, under ``mpirun`` with several ranks;
- a Kubernetes job with indexed completions, or a JobSet of one, where the ``kubernetes`` package is installed.

``JAX_COORDINATOR_PORT`` chooses another port than jax does. A process uses all devices that it sees, but with several
Slurm tasks or MPI ranks on a machine each uses the one of its local index, unless the cluster shows it only one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxrl_llm.errors import UserError

COORDINATOR, PROCESSES, PROCESS = "JAXRL_COORDINATOR", "JAXRL_PROCESSES", "JAXRL_PROCESS"
"""The variables; all three or none."""

LEAVING_S = 5  # an error of one process alone is not worth a longer wait for the others

logger = logging.getLogger(__name__)

_ending = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Joining:
    """What `jax.distributed.initialize` is told.

    Attributes:
      coordinator, processes, process: None where jax asks the cluster.
      cluster: the name of jax's own method, None for whichever finds something (Kubernetes has no name there), or
        ``deactivate``.
      all_devices: this process takes every device that it sees, also where jax would take one by its local index.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    cluster: str | None = "deactivate"
    all_devices: bool = False


def find(
    environment: Mapping[str, str], coordinator: str | None = None, processes: int | None = None,
    process: int | None = None,
) -> Joining | None:  # fmt: skip
    """How to join, or None for a run of one process. Starts nothing; arguments come before variables.

    Raises:
      UserError: some of the three are given and others not; one is not a number or out of range; or a cluster is there
        whose processes can't be told apart.
    """
    told = {
        f"--coordinator ({COORDINATOR})": coordinator or environment.get(COORDINATOR),
        f"--processes ({PROCESSES})": environment.get(PROCESSES) if processes is None else processes,
        f"--process ({PROCESS})": environment.get(PROCESS) if process is None else process,
    }
    missing = [name for name, value in told.items() if value in (None, "")]
    if len(missing) < len(told):
        if missing:
            given = ", ".join(f"{name} = {value}" for name, value in told.items() if name not in missing)
            raise UserError(f"{given}, but {' and '.join(missing)} not: give all three, or none to ask the cluster.")
        return _told(*told.items())
    return _found(environment)


def _told(where: tuple[str, object], number: tuple[str, object], own: tuple[str, object]) -> Joining | None:
    address, port = str(where[1]).rpartition(":")[::2]
    if not address or not port.isdigit():
        raise UserError(f"{where[0]} = {where[1]}: give the machine of process 0 and a free port there, HOST:PORT.")
    values = []
    for name, value in (number, own):
        if not str(value).isdigit():
            raise UserError(f"{name} = {value}: a whole number is needed, at least 0.")
        values.append(int(str(value)))
    processes, process = values
    if process >= processes:
        raise UserError(f"{own[0]} = {process} of {processes}: processes are counted from 0 to {processes - 1}.")
    return None if processes == 1 else Joining(str(where[1]), processes, process)


def _found(environment: Mapping[str, str]) -> Joining | None:
    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else 1

    one_visible = len([one for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]) == 1
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if all(name in environment for name in slurm) and number("SLURM_NTASKS") > 1:
        alone = environment.get("SLURM_STEP_TASKS_PER_NODE", "").partition("(")[0] == "1"
        return Joining(cluster="slurm", all_devices=alone or one_visible)
    if number("OMPI_COMM_WORLD_SIZE") > 1:
        alone = number("OMPI_COMM_WORLD_LOCAL_SIZE") == 1
        if "OMPI_MCA_orte_hnp_uri" not in environment:  # Open MPI 5 no longer says where rank 0 is
            if importlib.util.find_spec("mpi4py") is not None:  # which asks rank 0 itself
                return Joining(cluster="mpi4py", all_devices=alone or one_visible)
            raise UserError(
                f"mpirun has started {environment['OMPI_COMM_WORLD_SIZE']} ranks, but this version of Open MPI does "
                f"not tell where rank 0 is. Install mpi4py, or give each rank {COORDINATOR}=HOST:PORT (rank 0's "
                f"machine), {PROCESSES}=$OMPI_COMM_WORLD_SIZE and {PROCESS}=$OMPI_COMM_WORLD_RANK."
            )
        return Joining(cluster="ompi", all_devices=alone or one_visible)
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        if importlib.util.find_spec("kubernetes") is not None:
            return Joining(cluster=None)
        logger.warning(
            "This is an indexed Kubernetes job, but it runs by itself: nothing says how many processes there are. Set "
            "%s, %s and %s as launch/jobset.yaml does, or install the package kubernetes (and give the service "
            "account the right to read pods and jobs).",
            COORDINATOR,
            PROCESSES,
            PROCESS,
        )
    return None


def join(joining: Joining | None, *, heartbeat_s: int, join_timeout_s: int) -> None:
    """Connects this process with the others; None does nothing. Before anything has touched a device.

    Args:
      heartbeat_s, join_timeout_s: as in `config.ProcessesConfig`.
    """
    if joining is None:
        return
    import jax

    # jax's service would take SIGTERM for itself, and a run that ends by it saves first.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # where the devices are CPUs
    jax.distributed.initialize(
        joining.coordinator,
        joining.processes,
        joining.process,
        [] if joining.all_devices else None,
        cluster_detection_method=joining.cluster,
        initialization_timeout=join_timeout_s,
        heartbeat_timeout_seconds=heartbeat_s,
    )


def leave(code: int) -> None:
    """Ends a process of several that has failed, with its own exit code; returns where there is only one.

    An ordinary exit waits for all others. Those that wait for this process in a collective would never come, and jax
    would then abort all of them with a code that says nothing. From here on SIGTERM is ignored: it would take the code
    away, and ends nothing sooner.
    """
    if coordinator_client() is None:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_together(code)


def end_together(code: int) -> NoReturn:
    """Ends this process of several when all others end too, or soon. The first thread that asks decides on the code."""
    _ending.acquire()  # for ever
    client, first = coordinator_client(), _global_state().process_id == 0
    try:
        client.wait_at_barrier("jaxrl_llm/leave", LEAVING_S * 1000)  # all have failed alike: together
    except Exception as error:  # noqa: BLE001 - the others go on or have ended; either way this one ends
        logger.debug("leaving alone: %s", error)
    if first:
        time.sleep(0.5)  # its service ends with it, and the others would be aborted before they have ended
    _end(code)


def coordinator_client() -> Any:
    """jax's connection to what all processes of the run know; None in a run of one."""
    distributed = getattr(sys.modules.get("jax"), "distributed", None)  # jax may be half imported, by another thread
    if distributed is None or not distributed.is_initialized():
        return None
    return _global_state().client


def _global_state() -> Any:
    from jax._src.distributed import global_state  # no public name: whose failure this is must survive

    return global_state


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
