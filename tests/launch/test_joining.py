"""Which variables make a process one of several."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.launch.joining import Joining, find

# jax is loaded here, which warns of the fork; the child becomes another program at once.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}
TOLD = {"JAXRL_COORDINATOR": "host:1234", "JAXRL_PROCESSES": "2", "JAXRL_PROCESS": "1"}


def test_what_is_told_counts_more_than_the_cluster():
    assert find(TOLD | SLURM) == Joining("host:1234", 2, 1)
    assert find(TOLD, "other:99", 3, 0) == Joining("other:99", 3, 0)  # 0 is a value
    assert find(TOLD | {"JAXRL_PROCESSES": "1", "JAXRL_PROCESS": "0"}) is None
    assert find({}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"JAXRL_PROCESS": ""}, "give all three"),
        ({"JAXRL_COORDINATOR": "host"}, "HOST:PORT"),
        ({"JAXRL_PROCESS": "2"}, "counted from 0 to 1"),
        ({"JAXRL_PROCESSES": "two"}, "whole number"),
    ],
)
def test_half_told_is_refused(changed: dict[str, str], message: str):
    with pytest.raises(UserError, match=message):
        find(TOLD | changed)


def test_slurm():
    """Caught: the batch script itself, which has no step, taken for a task; and one GPU of eight used by the only task
    of a machine, which is what jax does with a local index."""
    assert find(SLURM) == Joining(cluster="slurm")
    assert find({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}) == Joining(cluster="slurm", all_devices=True)
    assert find({**SLURM, "CUDA_VISIBLE_DEVICES": "3"}) == Joining(cluster="slurm", all_devices=True)
    assert find({**SLURM, "SLURM_NTASKS": "1"}) is None
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert find(batch) is None


def test_open_mpi(monkeypatch: pytest.MonkeyPatch):
    assert find(MPI) == Joining(cluster="ompi")
    assert find({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}) == Joining(cluster="ompi", all_devices=True)
    newer = {name: value for name, value in MPI.items() if "orte" not in name}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert find(newer) == Joining(cluster="mpi4py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"JAXRL_PROCESS=\$OMPI_COMM_WORLD_RANK"):
        find(newer)


def test_kubernetes(monkeypatch: pytest.MonkeyPatch, caplog):
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find(pod) is None and "JAXRL_COORDINATOR" in caplog.text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert find(pod) == Joining(cluster=None)
    assert find({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None  # any pod, a notebook say


JOIN = """
import os
from jaxrl_llm import processes
from jaxrl_llm.launch.joining import find, join
join(find(os.environ), heartbeat_s=10, join_timeout_s=60)
import jax
print(processes.exchange(lambda: [processes.index(), len(jax.local_devices()), len(jax.devices())]))
"""


@pytest.mark.parametrize("cluster", ["slurm", "ompi"])
def test_two_processes_join_by_the_variables_of_a_cluster(cluster: str):
    """As `srun` and `mpirun` set them, on this machine. Caught: a name of jax's method that it does not know, which
    leaves each process alone."""
    port = free_port()
    started = []
    for rank in range(2):
        variables = {
            "slurm": {
                **SLURM,
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_STEP_TASKS_PER_NODE": "2",
            },
            "ompi": {
                **MPI,
                "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            },
        }[cluster]
        environment = {
            **os.environ,
            **variables,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "JAX_COORDINATOR_PORT": str(port),
            "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }
        command = [sys.executable, "-c", JOIN]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        told = [process.communicate(timeout=90) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    # gloo says on standard output that it is connected.
    assert [out.splitlines()[-1] for out, _ in told] == ["[[0, 1, 2], [1, 1, 2]]"] * 2, told


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_jax_understands_the_clusters_that_are_found(monkeypatch: pytest.MonkeyPatch):
    """The names of its methods, and the variables that make it think of one, are jax's own."""
    from jax._src.clusters import ClusterEnv

    for environment, name, address in ((SLURM, "slurm", "node1:"), (MPI, "ompi", "10.0.0.1:")):
        with monkeypatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            if name == "ompi":
                patch.setenv("OMPI_COMM_WORLD_RANK", "1")
                patch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
            (cluster,) = [one for one in ClusterEnv._cluster_types if one.name == name]
            assert cluster.is_env_present()
            assert cluster.get_coordinator_address(timeout_secs=1, override_coordinator_port=None).startswith(address)
    assert "K8sCluster" in [one.__name__ for one in ClusterEnv._cluster_types if not one.opt_in_only_method]
