"""Job files of a run for SkyPilot, dstack and Kubernetes. They are text; nothing is launched, and no tool is asked.

Each starts the kit once on every node, which is `make train-distributed` there. A job that starts again continues from
the newest complete checkpoint, where the run's folder is still there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml

from sftplay.errors import ConfigError

PORT = 29511
GRACE_S = 300  # seconds that dstack and Kubernetes leave between SIGTERM and SIGKILL, for a checkpoint
STOPPED, TERMINATED = 138, 143
"""Exit codes of a run that was stopped by SIGUSR1, which asks to be started again, or by SIGTERM."""

NEVER_AGAIN = [1, 2, 3, 4]  # exit codes of a bug, or of a config, machine or data that would be refused again
LOSSES = 5
"""How often a run of several nodes may lose one. The others then end with 5, which Kubernetes counts as failures."""

LEAST_SHARE = 0.97  # of a card's memory: what a driver reports where a part is kept for error correction

_AGAIN = """\
stopping=
trap 'stopping=1; kill -TERM "$!" 2>/dev/null' TERM INT
while [ -z "$stopping" ]; do
  {command} &
  trainer=$!
  [ -z "$stopping" ] || kill -TERM "$trainer" 2>/dev/null
  code=0; wait "$trainer" || code=$?
  while kill -0 "$trainer" 2>/dev/null; do code=0; wait "$trainer" || code=$?; done
  [ "$code" = {stopped} ] || exit "$code"
done
exit {terminated}
"""
"""For a tool that does not look at exit codes. A trap ends `wait` before the trainer has ended. A trap that comes right
behind a start finds the new trainer in `$!`, and still the old one in a variable. A signal that comes between two
trainers reaches neither: no other one is started then, and one that was just started is told."""


@dataclass(frozen=True)
class ClusterJob:
    """A run as a job: its config and values, and the machines that it was planned for."""

    name: str
    config: str
    overrides: tuple[str, ...]
    nodes: int
    gpus: int
    """On each node, one process for each."""

    gpu: str
    """Kind of GPU, as `make plan` names it."""

    gpu_bytes: int
    output_dir: str
    image: str = ""

    def command(self, python: str, **words: str) -> str:
        """The shell command that trains on one node. Words that hold a `$` are left to that shell."""
        argv = [python, "-m", "sftplay", "train", "--config", self.config, f"run_name={self.name}", "train.resume=auto"]
        command = shlex.join([*argv, *self.overrides, "--nproc", str(self.gpus)])
        if self.nodes == 1:
            return f"exec {command}"
        where = " ".join(f'--{flag.replace("_", "-")} "{word}"' for flag, word in words.items())
        return f"exec {command} --nnodes {self.nodes} {where} --master-port {PORT}"


def skypilot(job: ClusterJob) -> list[dict[str, Any]]:
    """A task for `sky launch` and `sky jobs launch` (docs.skypilot.co, SkyPilot YAML and distributed jobs)."""
    command = job.command(
        ".venv/bin/python", node_rank="$SKYPILOT_NODE_RANK", master_addr='$(echo "$SKYPILOT_NODE_IPS" | head -n1)'
    )
    gpu = job.gpu.replace("RTX-PRO-", "RTXPRO").replace("RTX-", "RTX").replace("A100-40GB", "A100")
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [STOPPED]}
    image = {"image_id": f"docker:{job.image}"} if job.image else {}
    return [
        {
            "name": job.name,
            "num_nodes": job.nodes,
            "workdir": ".",
            "resources": {"accelerators": f"{gpu}:{job.gpus}", **image, "job_recovery": recovery},
            "setup": "make install\n",
            "run": f"{command}\n",
        }
    ]


def dstack(job: ClusterJob) -> list[dict[str, Any]]:
    """A task for `dstack apply` (dstack.ai, tasks and distributed tasks). Its shell starts again after 138."""
    command = job.command(".venv/bin/python", node_rank="$DSTACK_NODE_RANK", master_addr="$DSTACK_MASTER_NODE_IP")
    # A100-80GB -> A100, RTX-4090 -> RTX4090, RTX-A6000 -> A6000
    name = re.sub("-(32|40|80)GB$", "", job.gpu).replace("-", "").replace("RTXA", "A")
    gpu = {"name": name, "count": job.gpus, "memory": f"{job.gpu_bytes * 9 // 10 // 2**30}GB.."}
    start = {"image": job.image} if job.image else {"python": "3.12"}
    again = _AGAIN.format(command=command.removeprefix("exec "), stopped=STOPPED, terminated=TERMINATED)
    return [
        {
            "type": "task",
            "name": job.name,
            "nodes": job.nodes,
            **start,
            "repos": ["."],
            "commands": ["make install", again],
            "resources": {"gpu": gpu, "shm_size": "16GB"},
            "retry": {"on_events": ["no-capacity", "interruption"], "duration": "1d"},
            "stop_duration": f"{GRACE_S}s",
        }
    ]


def kubernetes(job: ClusterJob) -> list[dict[str, Any]]:
    """An indexed Job, a Service by which its pods find the first one, and a claim of storage that all see.

    A pod that is moved, or ends with 138, is made again and counts as no failure; what would fail again ends the Job.

    Source: kubernetes.io, Job with pod-to-pod communication, and pod failure policy (since 1.31).
    """
    if not job.image:
        fix = "name one that holds the kit and its environment: --image registry/name:tag"
        raise ConfigError("pods are made of an image", where="--image", fix=fix)
    outputs = job.output_dir if job.output_dir.startswith("/") else "/outputs"
    job = replace(job, overrides=(*job.overrides, f"output_dir={outputs}"))
    command = job.command("python", node_rank="$JOB_COMPLETION_INDEX", master_addr=f"{job.name}-0.{job.name}")
    claim = f"{job.name}-outputs"
    container = {
        "name": "train",
        "image": job.image,
        "command": ["bash", "-c", command],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus}},
        "volumeMounts": [{"name": "outputs", "mountPath": outputs}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    # Nodes whose GPUs have the planned memory, by the label that NVIDIA's feature discovery gives them.
    least_mib = str(round(job.gpu_bytes * LEAST_SHARE) >> 20)
    rule = {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [least_mib]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    pod = {
        "subdomain": job.name,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "outputs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    moved = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = [
        {"action": action, "onExitCodes": {"containerName": "train", "operator": "In", "values": values}}
        for action, values in (("Ignore", [STOPPED, TERMINATED]), ("FailJob", NEVER_AGAIN))
    ]
    spec = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": LOSSES * (job.nodes - 1),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [moved, *codes]},
        "template": {"spec": pod},
    }
    storage = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": job.name}, "spec": service},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": storage},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.name}, "spec": spec},
    ]


KINDS: dict[str, Callable[[ClusterJob], list[dict[str, Any]]]] = {
    "skypilot": skypilot,
    "dstack": dstack,
    "k8s": kubernetes,
}
"""What `job-file --kind` takes."""

USES = {"skypilot": "sky jobs launch FILE", "dstack": "dstack apply -f FILE", "k8s": "kubectl apply -f FILE"}


def job_text(kind: str, job: ClusterJob) -> str:
    """The job file, with a head that says what uses it."""
    documents = yaml.dump_all(KINDS[kind](job), Dumper=_Blocks, sort_keys=False, width=10_000)
    plan = f"{job.nodes} node(s), {job.gpus} x {job.gpu} on each"
    return f"# {job.config} on {plan}, written by `make job-file`. Use: {USES[kind]}\n{documents}"


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines, and scripts, as blocks."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if text.endswith("\n") else None)


_Blocks.add_representer(str, _Blocks.represent_str)
