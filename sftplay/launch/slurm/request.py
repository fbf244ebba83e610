"""What a run asks of SLURM, as options of sbatch in a job file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from sftplay.errors import ConfigError, nearest_names
from sftplay.machine.ports import JOB_PORTS
from sftplay.units import parse_seconds

BATCH, ACCUM, EFFECTIVE = "train.batch_size", "train.grad_accum", "train.effective_batch_size"

ALIASES: dict[str, str] = {
    **{f"training_args.{name}": f"train.{name}" for name in (
        "max_steps", "learning_rate", "warmup_ratio", "weight_decay", "max_grad_norm", "gradient_checkpointing",
        "optim", "save_steps", "save_total_limit", "eval_steps",
    )},
    **{f"training_args.{name}": f"grpo.{name}" for name in (
        "num_generations", "max_completion_length", "max_prompt_length", "num_iterations", "temperature", "top_p",
        "beta", "epsilon", "loss_type",
    )},
    "training_args.num_train_epochs": "train.epochs",
    "training_args.lr_scheduler_type": "train.lr_scheduler",
    "training_args.per_device_train_batch_size": BATCH,
    "training_args.gradient_accumulation_steps": ACCUM,
    "training_args.logging_steps": "logging.steps",
    "training_args.seed": "seed",
    "evaluation.eval_interval_steps": "train.eval_steps",
}  # fmt: skip
"""Name in the guide on distributed GRPO -> the key here."""


def in_our_names(overrides: Sequence[str], *, world_size: int) -> tuple[list[str], list[str]]:
    """The overrides in the names of the config, and a note on each value that was not typed.

    In the names of other kits micro-batch and accumulation decide the effective batch together. Raises ConfigError if a
    name of these sections is not in the list.
    """
    ours, aliased = [], dict[str, str]()
    for text in overrides:
        name, sign, value = text.removeprefix("--").partition("=")
        if name.partition(".")[0] in ("training_args", "evaluation"):
            if name not in ALIASES:
                near = nearest_names(name, ALIASES)
                fix = f"did you mean {near[0]}?" if near else "write the key of the config; docs/config.md lists them"
                raise ConfigError(f"there is no {name!r}", where="command line", fix=fix, nearest=near)
            key = ALIASES[name]
            aliased[key] = value
            ours.append(f"{key}{sign}{value}")
        else:
            ours.append(text)
    sizes = [aliased.get(key, "") for key in (BATCH, ACCUM)]
    if not all(size.isdecimal() for size in sizes) or any(text.startswith(f"{EFFECTIVE}=") for text in ours):
        return ours, []
    effective = int(sizes[0]) * int(sizes[1]) * world_size
    note = f"{EFFECTIVE} is {effective}: {sizes[0]} rows x {sizes[1]} micro-batches x {world_size} processes"
    return [*ours, f"{EFFECTIVE}={effective}"], [note]


NOTICE_S = 300
"""How long before its end SLURM tells a job of it, where the job's time allows that. It may do so a minute earlier."""

NOTICE_SHARE = 0.2  # the notice takes at most this share of a job's time, so that a short job also makes steps

OURS = (
    "array", "wrap", "output", "error", "nodes", "ntasks", "ntasks-per-node", "chdir", "open-mode", "parsable", "wait",
)  # fmt: skip
"""Options of sbatch that the kit sets itself, or that make of a run something else than one job."""

SHORT = {"-a": "array", "-o": "output", "-e": "error", "-N": "nodes", "-n": "ntasks", "-D": "chdir", "-W": "wait"}


@dataclass(frozen=True)
class JobRequest:
    """Nodes, GPUs and time of a job. An empty text leaves the choice to the cluster."""

    nodes: int = 1
    gpus_per_node: int | None = None
    gres: str = ""
    time: str = ""
    partition: str = ""
    nproc: int | None = None
    sbatch: tuple[str, ...] = ()
    """More options of sbatch, such as `--account=lab`."""

    setup: Path | None = None
    """A file that the job's shell reads first, such as one that loads modules."""

    server_gpus: int | None = None
    """GPUs of the further node on which the generation server runs. None: the job has no such node."""

    server_sbatch: tuple[str, ...] = ()
    """More options of sbatch for that node."""

    @property
    def processes(self) -> int:
        """Processes on each node: as asked, else one for each GPU of a node, else one."""
        return self.nproc or self.gpus_per_node or gpus_in(self.gres) or 1

    def check(self) -> None:
        """Raise ConfigError where a part of it cannot be meant."""
        if self.gres and self.gpus_per_node:
            what = f"GPUs are asked for twice: gres {self.gres} and {self.gpus_per_node} for each node"
            raise ConfigError(what, where="--gres", fix="leave one of --gres and --gpus-per-node out")
        if self.time:
            limit_seconds(self.time)
        options = [("--sbatch", option) for option in self.sbatch]
        for flag, option in [*options, *(("--server-sbatch", option) for option in self.server_sbatch)]:
            name = option.partition("=")[0]
            if not re.fullmatch(r"-[a-zA-Z]\S*|--[a-z][a-z-]*(=.*)?", option, re.S) or "\n" in option:
                fix = "write options as one word each, such as --account=lab"
                raise ConfigError(f"{option!r} is no option of sbatch", where=flag, fix=fix)
            if SHORT.get(name[:2], name.removeprefix("--")) in OURS:
                raise ConfigError(f"{name} is set by the kit", where=flag, fix="leave it out; see docs/slurm.md")
        if self.setup is not None and not self.setup.is_file():
            raise ConfigError("there is no such file", where=f"--setup {self.setup}", fix="correct the path")


def gpus_in(gres: str) -> int:
    """GPUs on each node in `gpu:volta:2`, `gpu:2` or `gpu`; 0 where it names none."""
    counts = [entry.split("(")[0].split(":")[1:] for entry in gres.split(",") if entry.split(":")[0] == "gpu"]
    return sum(int(parts[-1]) if parts and parts[-1].isdecimal() else 1 for parts in counts)


def limit_seconds(text: str) -> float:
    """Seconds of a time as sbatch reads it: a bare number is minutes. Raises ConfigError if it is no such time."""
    try:
        if not re.fullmatch(r"[0-9:-]+", text):
            raise ValueError
        return parse_seconds(text) * (60 if text.isdecimal() else 1)
    except ValueError:
        fix = "write 12:00:00, 1-12:00:00 or a number of minutes"
        raise ConfigError(f"{text!r} is no time limit of SLURM", where="--time", fix=fix) from None


def directives(request: JobRequest, folder: Path, *, chdir: Path) -> Iterator[str]:
    """The options of the job of the run in `folder`, for lines of `#SBATCH`. Of two the last one counts: the user's.

    With a server the job is heterogeneous: behind `hetjob` stands its node. What is not said again there, such as
    account, memory and notice, is as for the trainers.
    """
    limits = [f"--{flag}={quote(getattr(request, flag))}" for flag in ("time", "partition") if getattr(request, flag)]
    yield from (f"--job-name={quote(folder.name)}", f"--nodes={request.nodes}", "--ntasks-per-node=1")
    if request.gres:
        yield f"--gres={quote(request.gres)}"
    yield from limits
    if request.gpus_per_node:
        yield f"--gpus-per-node={request.gpus_per_node}"
    notice_s = min(NOTICE_S, NOTICE_SHARE * limit_seconds(request.time)) if request.time else NOTICE_S
    yield from (f"--signal=B:USR1@{round(notice_s)}", "--requeue", "--open-mode=append")
    yield f"--output={quote(str(folder).replace('%', '%%'))}/slurm-%j.out"
    yield f"--chdir={quote(str(chdir))}"
    yield from map(_quote_value, request.sbatch)
    if request.server_gpus is None:
        return
    yield from ("hetjob", "--nodes=1", "--ntasks-per-node=1", *limits)
    if request.gpus_per_node or gpus_in(request.gres):
        yield f"--gpus-per-node={request.server_gpus}"
    yield from map(_quote_value, request.server_sbatch)


def _quote_value(option: str) -> str:
    """A line of `#SBATCH` takes the quotation marks of a shell."""
    name, sign, value = option.partition("=")
    return f"{name}{sign}{quote(value) if value else ''}"


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
    lines = "\n".join(f"#SBATCH {line}" for line in directives(request, folder, chdir=chdir))
    setup = f"source {quote(str(request.setup.absolute()))}\n" if request.setup else ""
    return _TEMPLATE.format(
        name=folder.name, directives=lines, setup=setup, first_port=JOB_PORTS.start, ports=len(JOB_PORTS),
        command=join(argv),
    )  # fmt: skip
