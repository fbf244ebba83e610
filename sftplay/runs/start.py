"""Starts a run: sizes it for the machine, builds its command, follows it to its end and restarts it where it may."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.load import dump_resolved, load_config
from sftplay.config.resolved import RESOLVED, flow
from sftplay.config.rules import notes
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError, MachineError, SftplayError
from sftplay.launch.checkpoints import newest_complete
from sftplay.launch.command.command import Launch, Scale, build_launch
from sftplay.launch.nodes.rendezvous import Rendezvous
from sftplay.launch.run_folder import RESIZED, RESTARTED, RunFolder, name_taken
from sftplay.launch.supervise.exit_cause import cause_of_death
from sftplay.launch.supervise.follow import FolderGone, follow
from sftplay.log import is_terminal
from sftplay.machine.ports import RENDEZVOUS_PORT, free_port
from sftplay.machine.probe import Machine
from sftplay.plan.memory.forecast import Hardware
from sftplay.plan.memory.probe_fit import Fit
from sftplay.plan.sizing.size_run import size_run
from sftplay.plan.sizing.task_sizing import SizedRun
from sftplay.runs.finished_run import report_at_end
from sftplay.runs.gpus_at_launch import gpu_settings, refuse_missing_compiler, refuse_unusable
from sftplay.runs.inputs import known_lengths, needs_no_hub
from sftplay.runs.model_shape import known_shape
from sftplay.runs.strategy_setup import environment_of, prepare_deepspeed, with_accumulation
from sftplay.units import GIB, format_bytes


def run_workers(
    command: Launch, folder: RunFolder, *, cfg: RunConfig, args: Namespace, rendezvous: Rendezvous | None = None
) -> int:
    """Start the workers and follow them; the last exit code.

    They start again with smaller micro-batches where memory ran out in a step that cannot run again. They start again
    from the last checkpoint where a process died, up to `cluster.max_restarts` times.

    The parent restarts, not torchrun. torchrun would also restart after a stop signal or an error of our own, does not
    choose the checkpoint, and does not start single processes.
    """
    if args.tb:
        from sftplay.runs.tensorboard import start_board

        start_board(folder.path.parent, 6006)
    check_nodes = None
    if rendezvous is None:
        prepare_deepspeed(cfg, folder, command=command)
    else:
        from sftplay.launch.nodes.join import announce_run, await_ready, watch_nodes

        announce_run(rendezvous, folder)
        prepare_deepspeed(cfg, folder, command=command)
        await_ready(rendezvous)
        check_nodes = watch_nodes(rendezvous, folder)
    exit_code, restarts, max_restarts = _start(command, folder, check_nodes=check_nodes), 0, cfg.cluster.max_restarts
    while True:
        if rows := smaller_start(folder, args):
            shrink(folder, rows)
            command = with_accumulation(command, load_config(folder.resolved))
        elif restarts < max_restarts and (cause := cause_of_death(folder)):
            restarts += 1
            folder.add_event(RESTARTED, cause=cause)
            log.say(f"restart {restarts} of {max_restarts}: {cause}")
            continue_at_next_start(folder)
        else:
            break
        exit_code = _start(command, folder, check_nodes=check_nodes)
    if exit_code in REFUSALS and rendezvous is None:
        folder = free_refused(folder)
    report_at_end(folder)
    if args.json and args.verb != "demo":
        print(json.dumps({"run": str(folder.path), **folder.read_json("status.json")}))
    return exit_code


def _start(command: Launch, folder: RunFolder, *, check_nodes: Callable[[], None] | None) -> int:
    write_text(folder.path / "launch.txt", command.as_text() + "\n")
    folder.update_status(state="running", exit_code=None, signal=None, error=None, ranks=[], pid=None)
    log.say("starting the worker")
    return follow(command, folder, check_nodes=check_nodes)


def smaller_start(folder: RunFolder, args: Namespace) -> int | None:
    """The micro-batch with which a run that ran out of memory may continue from its last checkpoint.

    None where it ended for another reason or must not restart. None on several nodes, because they would have to agree.
    """
    error = folder.read_json("status.json").get("error") or {}
    rows = error.get("batch_size") if error.get("code") == "memory" and args.nnodes == 1 else None
    return int(rows) if rows else None


def shrink(folder: RunFolder, rows: int) -> None:
    """Write smaller sizes into the run folder. The run's next attempt reads them there."""
    stored, plan = load_config(folder.resolved), folder.read_json("plan.json")
    sizes = sizes_of(stored, rows, world_size=plan["world_size"])
    write_text(folder.resolved, dump_resolved(stored.with_values({**sizes, "train.resume": "auto"}, "out of memory")))
    smaller = {"batch_size": rows, "grad_accum": sizes["train.grad_accum"]}
    folder.write_json("plan.json", {**plan, **smaller})
    folder.add_event(RESIZED, world_size=plan["world_size"], batch_size_before=stored.train.batch_size, **smaller)
    log.say(
        "out of memory in a step that cannot be run again: the run continues from its last checkpoint with "
        f"{rows} rows at a time instead of {stored.train.batch_size}"
    )


def sizes_of(cfg: RunConfig, rows: int, *, world_size: int) -> dict[str, Any]:
    """Micro-batch and accumulation of a step, by config key, for micro-batches of `rows` rows."""
    return {"train.batch_size": rows, "train.grad_accum": cfg.train.effective_batch_size // world_size // rows}


def continue_at_next_start(folder: RunFolder) -> None:
    """Let the run's next start continue from its newest complete checkpoint.

    Where it has none yet, the next start uses once more the checkpoint that `train.resume` names.
    """
    stored = load_config(folder.resolved)
    names_checkpoint = stored.train.resume not in ("never", "auto")
    if not (names_checkpoint and newest_complete(folder.checkpoints)[0] is None):
        write_text(folder.resolved, dump_resolved(stored.with_values({"train.resume": "auto"}, "restart")))


def size(cfg: RunConfig, machine: Machine, *, scale: Scale, fit: Fit | None = None) -> SizedRun:
    """The config with every `auto` decided for this machine.

    Raises:
        ConfigError: the effective batch cannot be split exactly.
        MachineError: not even one row at a time fits, or what is asked for cannot run here.
    """
    shape, lengths, world_size = known_shape(cfg), known_lengths(cfg), scale.world_size
    sizing = partial(size_run, machine=machine, world_size=world_size, local_processes=scale.nproc)
    sized = sizing(cfg, shape=shape, fit=fit, lengths=lengths)
    forecast = sized.forecast
    if forecast is None or shape is None or forecast.verdict != "does_not_fit" or cfg.train.batch_size != "auto":
        return sized
    from sftplay.plan.report.task_report import find_report

    task, hardware = find_report(cfg), Hardware(forecast.setting.device, world_size, lengths)
    suggestions = task.suggest(cfg, sized, sizing=sizing, hardware=hardware)
    listed = "; ".join(f"{each.change} ({format_bytes(each.peak_bytes)})" for each in suggestions)
    raise MachineError(
        f"{shape.name} does not fit: even one row at a time takes {format_bytes(forecast.peak_bytes)} of "
        f"{format_bytes(forecast.budget_bytes)} on each {forecast.setting.device.name}",
        where=task.where_model(cfg),
        fix=f"{listed}; `make plan` shows every part; train.batch_size=1 tries it anyway",
    )


def build_command(cfg: RunConfig, folder: RunFolder, *, scale: Scale, machine: Machine) -> Launch:
    """What starts the run's workers.

    Raises:
        ConfigError: `cluster.max_restarts` is set for several nodes, whose parents know nothing of each other; or the
            launcher cannot start this run.
        MachineError: its kernels cannot be built here.
    """
    refuse_restarts(cfg, nnodes=scale.nnodes)
    refuse_missing_compiler(cfg, machine)
    has_gpu, strategy, launcher = bool(machine.gpus), None, cfg.cluster.launcher
    if launcher != "auto" and scale.world_size == 1:
        log.say(f"note: cluster.launcher {launcher} has no effect: a single process is started directly")
    if cfg.accelerate_shards and scale.world_size > 1:
        strategy = environment_of(cfg, folder, scale=scale, has_gpu=has_gpu)
    is_offline = needs_no_hub(cfg)
    launch = build_launch(
        folder.path, scale, has_gpu=has_gpu, is_offline=is_offline, strategy=strategy, launcher=launcher
    )
    launch = replace(launch, env={**launch.env, **gpu_settings(cfg, machine, processes=scale.world_size)})
    if scale.world_size == 1:
        return launch
    from sftplay.launch.command.network import list_interfaces, nccl_environment

    nccl = nccl_environment(cfg, folder.logs, has_gpu=has_gpu, environ=os.environ, interfaces=list_interfaces())
    return replace(launch, env={**launch.env, **nccl})


def refuse_restarts(cfg: RunConfig, *, nnodes: int) -> None:
    """Raise ConfigError where several nodes are asked to restart: their parents know nothing of each other."""
    if cfg.cluster.max_restarts and nnodes > 1:
        raise ConfigError(
            f"a run of {nnodes} nodes cannot restart by itself",
            where=f"{cfg.origins.get('cluster.max_restarts', 'cluster')} cluster.max_restarts",
            fix="set cluster.max_restarts=0 and let the job continue it with train.resume=auto",
        )


def read_scale(args: Namespace, machine: Machine) -> Scale:
    """Processes and nodes as the command line gives them.

    Raises:
        ConfigError: not a number of processes.
        MachineError: there are fewer GPUs than processes, or torch cannot use them.
    """
    is_here = not getattr(args, "is_elsewhere", False)
    if is_here:
        refuse_unusable(machine)
    if args.nproc in (None, ""):
        nproc = 1
    elif args.nproc == "gpu":
        nproc = len(machine.gpus)
        if nproc == 0:
            raise MachineError(
                f"there is no GPU to start a process on ({machine.gpu_reason})",
                where="--nproc gpu",
                fix="give the number of processes (NPROC=2), or use `make train`",
            )
    elif args.nproc.isdigit() and int(args.nproc) > 0:
        nproc = int(args.nproc)
    else:
        raise ConfigError(f"not a number of processes: {args.nproc!r}", where="--nproc", fix="write --nproc 2")
    if is_here and 0 < len(machine.gpus) < nproc:
        raise MachineError(
            f"{nproc} processes need {nproc} GPUs, {len(machine.gpus)} are visible",
            where="--nproc",
            fix=f"use --nproc {len(machine.gpus)}",
        )
    # Several nodes must know the port in advance. On one node, two runs at once must not get the same port.
    port = args.master_port or (RENDEZVOUS_PORT if args.nnodes > 1 else free_port(0))
    launcher_args = tuple(getattr(args, "launcher_args", ()))
    return Scale(nproc, args.nnodes, args.node_rank, args.master_addr, port, launcher_args)


def say_sizing(sized: SizedRun, machine: Machine, *, folder: RunFolder) -> None:
    """Print the devices, the sizes and every automatic choice with its reason."""
    gpus, train = machine.gpus, sized.cfg.train
    if gpus:
        log.say(f"Detected {len(gpus)} GPUs:")
        for gpu in gpus:
            log.show(f"  GPU {gpu.index}: {gpu.name} ({gpu.total_bytes / GIB:.1f} GiB)")
        total = sum(gpu.total_bytes for gpu in gpus) / GIB
        log.say(f"Total VRAM: {total:.1f} GiB (not one pool: each GPU holds its own copy)")
    else:
        log.say(
            f"No GPU ({machine.gpu_reason}): {machine.cores} CPU cores, {machine.ram_bytes / GIB:.1f} GiB of memory"
        )
    log.say(f"run {folder.path}")
    if sized.decisions:
        log.say("chosen automatically:")
        log.show("\n".join(decision_lines(sized, width=_width())))
    sizes = f"{train.batch_size} per {'GPU' if gpus else 'process'}"
    label = "Auto-calculated batch size" if "train.batch_size" in sized.decisions else "Batch size"
    log.say(f"{label}: {sizes}, gradient accumulation: {train.grad_accum}")
    log.say(f"Effective batch size: {train.effective_batch_size}, precision: {train.precision}")
    for note in all_notes(sized):
        log.say(f"note: {note}")


def _width() -> int:
    """Columns of the user's terminal; a file or a pipe takes lines of any length."""
    return max(80, shutil.get_terminal_size().columns) if is_terminal(log.screen()) else 10_000


def decision_lines(sized: SizedRun, *, width: int) -> list[str]:
    """Every automatic choice with its reason, one below the other; a reason is told once. Lines end at `width`."""
    rows = [(key, flow(each.value), each.reason) for key, each in sized.decisions.items()]
    keys, values = (max(len(row[place]) for row in rows) for place in (0, 1))
    said: set[str] = set()
    lines = []
    for key, value, reason in rows:
        before = f"  {key:<{keys}}  {value:<{values}}  "
        told = "the same" if reason in said else reason
        lines += textwrap.wrap(told, width, initial_indent=before, subsequent_indent=" " * len(before)) or [before]
        said.add(reason)
    return lines


def all_notes(sized: SizedRun) -> list[str]:
    """What the user should know before the start: settings without effect, and a shortage of memory."""
    forecast = sized.forecast
    warning = []
    if forecast is not None and forecast.verdict != "fits":
        needed, budget = format_bytes(forecast.peak_bytes), format_bytes(forecast.budget_bytes)
        figures = f"{needed} planned with its margin, {budget} to plan with"
        warning = [f"memory: {forecast.verdict.replace('_', ' ')} ({figures}); `make plan` shows what would fit"]
    return [*notes(sized.cfg), *sized.notes, *warning]


def print_command(command: Launch, args: Namespace) -> int:
    """Print the command and its environment, for --dry-run."""
    if args.json:
        print(json.dumps({"argv": list(command.argv), "env": dict(command.env), "files": dict(command.files)}))
    else:
        print(command.as_text())
    return 0


REFUSALS = (ConfigError.exit_code, MachineError.exit_code, DataError.exit_code)
"""Exit codes of a run that could not begin as it was asked to."""

MARKS = (RESOLVED, "status.json", "manifest.json")
"""Files of which every run of the kit has one soon after its start."""

FIRST = ("logs", "base", "slurm*", ".lock", ".status.lock")
"""What a start, or a job that waits for one, makes before that."""


def free_name(folder: RunFolder) -> None:
    """Set aside what an earlier start without a step has left under the name of `folder`.

    Raises:
        ConfigError: the run has made a step, or runs; or the folder holds files that no run of the kit has made.
        MachineError: its folder cannot be moved.
    """
    if not any((folder.path / name).exists() for name in MARKS):
        refuse_files_of_others(folder)
        return
    with folder.locked():
        if folder.resolved.exists() and folder.has_made_step:
            raise name_taken(folder.name, str(folder.path))
        status = folder.read_json("status.json")
        why = (status.get("error") or {}).get("what", "").split("\n")[0] or status.get("signal") or "it was ended"
        log.say(f"the earlier start of {folder.name} made no step ({why}): kept in {folder.set_aside().path}")


def refuse_files_of_others(folder: RunFolder) -> None:
    """Raise ConfigError where a folder that was never a run holds more than a run makes first: it is not ours."""
    names = [path.name for path in folder.path.iterdir()] if folder.path.is_dir() else []
    if others := sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in FIRST)):
        more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
        what = f"holds {', '.join(map(repr, others[:3]))}{more}, and was never a run of this kit"
        raise ConfigError(what, where=str(folder.path), fix="choose another run_name or output_dir, or move the files")


def free_refused(folder: RunFolder) -> RunFolder:
    """Set a run aside that was refused before its first step, so that its name is free; the folder that it is in now.

    The caller holds the run's lock.
    """
    if folder.has_made_step:
        return folder
    try:
        kept = folder.set_aside()
    except MachineError as error:
        log.say(f"note: {error}")
        return folder
    log.say(f"no step was made: the name {folder.name} is free, and this start is kept in {kept.path}")
    return kept


@contextmanager
def refusals_free_name(folder: RunFolder, *, is_alone: bool) -> Iterator[None]:
    """Set the run aside where the block refuses to start it. Other nodes look for the folder where it is.

    The caller holds the run's lock.
    """
    try:
        yield
    except SftplayError as error:
        if is_alone and folder.path.exists() and not folder.has_made_step and not isinstance(error, FolderGone):
            folder.update_status(state="failed", exit_code=error.exit_code, error=error.as_json())
            free_refused(folder)
        raise
