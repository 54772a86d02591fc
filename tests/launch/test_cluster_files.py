"""The Slurm script and the JobSet manifest: their syntax, and that they fit the program that they start."""

from __future__ import annotations

import importlib.resources
import os
import pathlib
import stat
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

from jaxrl_llm.errors import EXIT_PREEMPTED, EXIT_RUN_STOPPED, EXIT_USER_ERROR
from jaxrl_llm.launch.joining import Joining, find

FOLDER = pathlib.Path(str(importlib.resources.files("jaxrl_llm") / "launch"))


def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)
    text = (FOLDER / "slurm.sh").read_text()
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "--requeue" in options and all(option.startswith("--") for option in options)
    # sbatch reads no option after the first command.
    assert text.rindex("#SBATCH") < text.index("\nset ")


@pytest.mark.parametrize(
    ("codes", "result", "asked_again"),
    [
        ([0], 0, False),
        ([EXIT_USER_ERROR], 2, False),
        ([EXIT_RUN_STOPPED], 3, False),
        ([134, 0], 0, False),
        ([1, 134, 137], 137, False),
        ([134, EXIT_PREEMPTED], 0, True),
    ],
)
def test_the_slurm_script_knows_the_codes(tmp_path: pathlib.Path, codes: list[int], result: int, asked_again: bool):
    """With programs of Slurm's names that end as they are told. Caught: a loop that goes on after
    success."""
    programs = {
        "srun": f'echo "$@" >> {tmp_path}/calls; set -- {" ".join(map(str, codes))}; '
        f'shift $(($(wc -l < {tmp_path}/calls) - 1)); exit "$1"',
        "scontrol": f'echo "$@" > {tmp_path}/requeued',
        "sleep": "true",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", FOLDER / "slurm.sh", "--config", "a file.py"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=20, check=False)
    assert done.returncode == result
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(codes) and all(call.endswith("-m jaxrl_llm.main --config a file.py") for call in calls)
    assert (tmp_path / "requeued").exists() == asked_again


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """A JSON schema of an object with these fields and no others."""
    properties = {**required, **optional}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
CONTAINER = _object(
    {"name": TEXT, "image": TEXT},
    command=_list(TEXT),
    args=_list(TEXT),
    env=_list(
        {
            "oneOf": [
                _object({"name": TEXT, "value": TEXT}),
                _object({"name": TEXT, "valueFrom": _object({"fieldRef": _object({"fieldPath": TEXT})})}),
            ]
        }
    ),
    resources=_object({"limits": {"type": "object"}}),
    volumeMounts=_list(_object({"name": TEXT, "mountPath": TEXT})),
)
POD = _object(
    {"restartPolicy": {"const": "Never"}, "containers": _list(CONTAINER)},  # what a podFailurePolicy demands
    terminationGracePeriodSeconds=WHOLE,
    volumes=_list(
        _object(
            {"name": TEXT},
            persistentVolumeClaim=_object({"claimName": TEXT}),
            emptyDir=_object({"medium": {"enum": ["", "Memory"]}}),
        )
    ),
)
EXIT_CODES = _object({"operator": {"enum": ["In", "NotIn"]}, "values": _list(WHOLE)}, containerName=TEXT)
JOB = _object(
    {"template": _object({"spec": POD})},
    parallelism=WHOLE,
    completions=WHOLE,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=WHOLE,
    podFailurePolicy=_object(
        {
            "rules": _list(
                _object({"action": {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]}, "onExitCodes": EXIT_CODES})
            )
        }
    ),
)
RULE = _object(
    {
        "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "action": {"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    },
    onJobFailureReasons=_list(
        {"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy"]}
    ),
    targetReplicatedJobs=_list(TEXT),
)
JOBSET = _object(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": _object({"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}}),
        "spec": _object(
            {"replicatedJobs": _list(_object({"name": TEXT, "template": _object({"spec": JOB})}, replicas=WHOLE))},
            network=_object({}, enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
            failurePolicy=_object({"maxRestarts": WHOLE}, rules=_list(RULE)),
        ),
    }
)
"""The fields of a JobSet that the manifest uses, as JobSet's and Kubernetes' own definitions have them."""


def test_the_jobset_fits_its_schema_and_the_program():
    """Caught: a missing maxRestarts, and a coordinator that names another pod."""
    manifest = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    jsonschema.validate(manifest, JOBSET)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    name = manifest["metadata"]["name"]
    coordinator = f"{name}-{replicated['name']}-0-0.{name}:8476"
    assert find(environment) == Joining(coordinator, job["completions"], 1)
    assert job["parallelism"] == job["completions"] and replicated["replicas"] == 1
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [EXIT_USER_ERROR, EXIT_RUN_STOPPED]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
