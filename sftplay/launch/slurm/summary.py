"""job_summary.txt: what a job was, how far its run came and how it ended, one fact a line."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sftplay import __version__
from sftplay.atomic import read_lines, read_object, write_text
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm.records import ENVIRONMENT, SUMMARY, JobFolder
from sftplay.machine.probe import library_versions
from sftplay.units import format_bytes

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
PASS = ("pass@1", "pass", "exact_match")
"""Names of the share of right answers, in the files of an evaluation."""

LAST_LINES, LAST_BYTES = 20, 8192
SHOWN = (
    "SLURM", "CUDA", "NVIDIA", "NCCL", "GLOO", "MASTER_", "OMP_", "HF_", "TRANSFORMERS_", "TORCH", "PYTHON", "WANDB_",
    "SFTPLAY_", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_", "HOSTNAME",
)  # fmt: skip
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def write_environment(job: JobFolder) -> None:
    """Write the variables on which a run may depend to env.txt; none whose name speaks of a secret."""
    shown = {key: value for key, value in os.environ.items() if key.startswith(SHOWN)}
    lines = [f"{key}={shown[key]}" for key in sorted(shown) if not any(part in key.upper() for part in SECRET)]
    write_text(job.path / ENVIRONMENT, "\n".join(lines) + "\n")


def write_summary(job: JobFolder, *, processes: int, exit_code: int | None) -> None:
    """Write job_summary.txt. `exit_code` is None while the job runs."""
    facts = [*_job_facts(job, processes=processes), *_run_facts(job)]
    facts += [("exit code", "still running" if exit_code is None else exit_code)]
    lines = [f"{name + ':':<18}{value}" for name, value in facts if value not in (None, "")]
    if exit_code and exit_code < 128:
        for path in (job.server_log, job.log):
            lines += ["", f"the last lines of {path.name}:", *_last_lines(path)] if path.exists() else []
    write_text(job.path / SUMMARY, "\n".join(lines) + "\n")


def _job_facts(job: JobFolder, *, processes: int) -> Iterator[tuple[str, Any]]:
    slurm = {name: os.environ.get(f"SLURM_{name}", "") for name in ("JOB_NODELIST", "JOB_NUM_NODES", "JOB_PARTITION")}
    lives = job.lives()
    yield "job id", job.job
    yield "run", job.run
    yield "nodes", f"{slurm['JOB_NUM_NODES'] or 1} ({slurm['JOB_NODELIST'] or platform.node()})"
    yield "partition", slurm["JOB_PARTITION"]
    yield "GPUs", _gpus(job)
    yield "processes", f"{processes} on each node"
    versions = library_versions()
    named = [f"{name} {versions[name]}" for name in LIBRARIES if name in versions]
    yield "versions", ", ".join([f"sftplay {__version__}", f"python {platform.python_version()}", *named])
    yield "start", lives[0]["start"] if lives else time.strftime("%Y-%m-%dT%H:%M:%S%z")
    yield "end", lives[-1]["end"] if lives else ""
    ended = [f"{life['from_step']}-{life['to_step']} ({life['exit_code']})" for life in lives]
    yield "lives", f"{len(lives)}: steps (exit code) {', '.join(ended)}" if lives else ""


def _gpus(job: JobFolder) -> str:
    machine = read_object(job.run / "manifest.json").get("machine") or {}
    names = ", ".join(str(gpu["name"]) for gpu in machine.get("gpus", ()))
    number = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_NODE") or "0"
    return f"{number} on this node{f': {names}' if names else ''}"


def _run_facts(job: JobFolder) -> Iterator[tuple[str, Any]]:
    folder = RunFolder(job.run)
    status, metrics, lives = folder.read_json("status.json"), read_lines(folder.metrics)[0], job.lives()
    yield "state", status.get("state")
    yield "steps", status.get("step", 0)
    seconds = sum(life["seconds"] for life in lives)
    made = sum(life["to_step"] - life["from_step"] for life in lives)
    yield "steps/h", f"{3600 * made / seconds:.1f}" if seconds else None
    for name, key in (("last loss", "loss"), ("last reward", "reward"), ("last true reward", "true_reward")):
        yield name, next((line[key] for line in reversed(metrics) if line.get(key) is not None), None)
    yield "last pass@1", _last_pass(folder.eval)
    peaks = [line[key] for line in metrics for key in ("peak_bytes", "peak_rss_bytes") if key in line]
    yield "peak memory", format_bytes(max(peaks)) if peaks else None
    yield "last checkpoint", status.get("last_checkpoint")
    complete = sorted(path.parent.name for path in folder.checkpoints.glob("checkpoint-*/COMPLETE.json"))
    yield "checkpoints", ", ".join(sorted(complete, key=lambda name: int(name.rpartition("-")[2])))
    error = status.get("error") or {}
    yield "error", error.get("what", "").split("\n")[0]
    yield "note", job.note.replace("\n", "; ")


def _last_pass(folder: Path) -> str | None:
    """The newest share of right answers, with the file that it stands in."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        content = read_object(path)
        for name in PASS:
            if isinstance(content.get(name), float | int):
                return f"{content[name]:.3f} ({name} in {path.parent.name}/{path.name})"
    return None


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:]
