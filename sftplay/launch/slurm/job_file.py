"""The text of a run's job file. It holds no path of a site: what a site needs comes from the request."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from sftplay.launch.slurm.request import JobRequest, directives, word
from sftplay.machine.ports import JOB_PORTS

SUPERVISOR = "sftplay.launch.slurm.job"

_TEMPLATE = """\
#!/usr/bin/env bash
# The job of the run {name}. `make submit` has written it; `sbatch` of this file queues the run once more.
{directives}
set -euo pipefail
trap '' USR1  # until the process below listens to it
{setup}export HF_HUB_OFFLINE="${{HF_HUB_OFFLINE:-1}}"
export TRANSFORMERS_OFFLINE="${{TRANSFORMERS_OFFLINE:-$HF_HUB_OFFLINE}}"
export HF_DATASETS_OFFLINE="${{HF_DATASETS_OFFLINE:-$HF_HUB_OFFLINE}}"
export WANDB_MODE="${{WANDB_MODE:-offline}}"
export NCCL_DEBUG="${{NCCL_DEBUG:-WARN}}"
export MASTER_PORT="${{MASTER_PORT:-$(({first_port} + SLURM_JOB_ID % {ports}))}}"
command=({command})
exec "${{command[@]}}"
"""


def job_file(request: JobRequest, folder: Path, *, chdir: Path, python: str, launcher_args: Sequence[str] = ()) -> str:
    """The job file of the run in `folder`, an absolute path. `python` runs the kit, in `chdir`."""
    argv = [python, "-m", SUPERVISOR, str(folder), "--nproc", str(request.processes)]
    argv += ["--server"] if request.server_gpus is not None else []
    argv += ["--", *launcher_args] if launcher_args else []
    return _TEMPLATE.format(
        name=folder.name,
        directives="\n".join(f"#SBATCH {line}" for line in directives(request, folder, chdir=chdir)),
        setup=f"source {word(str(request.setup.absolute()))}\n" if request.setup else "",
        first_port=JOB_PORTS.start,
        ports=len(JOB_PORTS),
        command=shlex.join(argv),
    )
