"""Starts a run: sizes it for the machine, builds its command, follows it to its end and restarts it where it may."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import TYPE_CHECKING, Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_config, notes
from sftplay.config.resolved import dump_resolved, flow
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError, MachineError, SftplayError
from sftplay.launch.checkpoints import newest_complete
from sftplay.launch.command import Launch, Scale, build_launch
from sftplay.launch.follow import FolderGone, follow, record_end
from sftplay.launch.processes import cause_of_death
from sftplay.launch.run_folder import RESIZED, RESTARTED, RunFolder, name_taken
from sftplay.log import is_terminal
from sftplay.machine.ports import RENDEZVOUS_PORT, bound_port, free_port
from sftplay.machine.probe import Machine
from sftplay.plan.forecast import Hardware
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.runs.finished_run import describe_end, report_at_end
from sftplay.runs.inputs import known_lengths, known_shape, needs_no_hub
from sftplay.runs.strategy_setup import (
    build_strategy_environment,
    gpu_settings,
    prepare_deepspeed,
    refuse_missing_compiler,
    refuse_unusable,
    with_accumulation,
)
from sftplay.signals import StopAtOnce, Stopped, catching
from sftplay.units import GIB, format_bytes

if TYPE_CHECKING:
    from sftplay.launch.nodes import Rendezvous
    from sftplay.plan.fit import Fit


def run_workers(
    command: Launch, folder: RunFolder, *, cfg: RunConfig, args: Namespace, rendezvous: Rendezvous | None = None
) -> int:
    """Start the workers and follow them; return the last exit code.

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
        from sftplay.launch.nodes import announce_run, await_ready, watch_nodes

        announce_run(rendezvous, folder)
        prepare_deepspeed(cfg, folder, command=command)
        await_ready(rendezvous)
        check_nodes = watch_nodes(rendezvous, folder)
    exit_code = _follow_attempts(command, folder, cfg=cfg, args=args, check_nodes=check_nodes)
    if exit_code in (ConfigError.exit_code, MachineError.exit_code, DataError.exit_code) and rendezvous is None:
        folder = archive_aborted_run(folder)
    report_at_end(folder)
    if args.json and (args.verb != "demo" or exit_code):
        print(json.dumps(describe_end(folder)))
    return exit_code


def _follow_attempts(
    command: Launch, folder: RunFolder, *, cfg: RunConfig, args: Namespace, check_nodes: Callable[[], None] | None
) -> int:
    """Start and follow the run's attempts; record a stop signal or an error that comes while no worker is there."""
    stop = StopAtOnce(of_make=True)
    try:
        with catching(stop.on_signal):
            return _restart_while_due(command, folder, cfg=cfg, args=args, check_nodes=check_nodes)
    except Stopped as stopped:
        name, code = str(stopped), 128 + stop.received
        recorded = folder.read_json("status.json").get("exit_code")
        if recorded is None and folder.resolved.exists():
            record_end(folder, name, state="stopped", exit_code=code, signal=name)
            log.say(f"stopped by {name} before the workers had started; `make resume` continues the run")
        return code if recorded is None else int(recorded)
    except FolderGone:
        raise
    except SftplayError as error:
        if folder.read_json("status.json").get("exit_code") is None:
            record_end(folder, error.what, state="failed", exit_code=error.exit_code, error=error.as_json())
        raise


def _restart_while_due(
    command: Launch, folder: RunFolder, *, cfg: RunConfig, args: Namespace, check_nodes: Callable[[], None] | None
) -> int:
    restarts, max_restarts = 0, cfg.cluster.max_restarts
    while True:
        write_text(folder.path / "launch.txt", command.as_text() + "\n")
        attempts = folder.read_json("status.json").get("attempts")
        if attempts and attempts[-1]["cause"] is None and args.node_rank == 0:  # it was killed
            from sftplay.launch.cost import last_write_s, with_ends

            folder.update_status(attempts=with_ends(attempts, end_s=last_write_s(folder.path)))
        started = round(time.time(), 3)
        folder.update_status(
            state="running", exit_code=None, signal=None, error=None, ranks=[], pid=None, started=started
        )
        followed = follow
        if cfg.task.turns == 1 and cfg.grpo.generation == "vllm_server":
            from sftplay.runs.generation_server import choose_follow

            followed = choose_follow(cfg, args)
        log.say("starting the worker")
        exit_code = followed(command, folder, check_nodes=check_nodes)
        error = folder.read_json("status.json").get("error") or {}
        # Several nodes would have to agree on smaller micro-batches.
        if args.nnodes == 1 and error.get("code") == "memory" and error.get("batch_size"):
            shrink(folder, int(error["batch_size"]))
            command = with_accumulation(command, load_config(folder.resolved))
        elif restarts < max_restarts and (cause := cause_of_death(folder)):
            restarts += 1
            folder.add_event(RESTARTED, cause=cause)
            log.say(f"restart {restarts} of {max_restarts}: {cause}")
            stored = load_config(folder.resolved)
            # Without a complete checkpoint yet, the next start uses once more the one that `train.resume` names.
            if stored.train.resume in ("never", "auto") or newest_complete(folder.checkpoints)[0] is not None:
                write_text(folder.resolved, dump_resolved(stored.with_values({"train.resume": "auto"}, "restart")))
        else:
            return exit_code


def shrink(folder: RunFolder, rows: int) -> None:
    """Write smaller sizes into the run folder. The run's next attempt reads them there."""
    stored, plan = load_config(folder.resolved), folder.read_json("plan.json")
    sizes = split_rows(stored, rows, world_size=plan["world_size"])
    write_text(folder.resolved, dump_resolved(stored.with_values({**sizes, "train.resume": "auto"}, "out of memory")))
    smaller = {"batch_size": rows, "grad_accum": sizes["train.grad_accum"]}
    folder.write_json("plan.json", {**plan, **smaller})
    folder.add_event(RESIZED, world_size=plan["world_size"], batch_size_before=stored.train.batch_size, **smaller)
    log.say(
        "out of memory in a step that cannot be run again: the run continues from its last checkpoint with "
        f"{rows} rows at a time instead of {stored.train.batch_size}"
    )


def split_rows(cfg: RunConfig, rows: int, *, world_size: int) -> dict[str, Any]:
    """Return a step's micro-batch and accumulation, by config key, for micro-batches of `rows` rows."""
    return {"train.batch_size": rows, "train.grad_accum": cfg.train.effective_batch_size // world_size // rows}


def size(cfg: RunConfig, machine: Machine, *, scale: Scale, fit: Fit | None = None) -> SizedRun:
    """Return the config with every `auto` decided for this machine. Raise ConfigError where the effective batch cannot
    be split exactly, and MachineError where not even one row at a time fits, or what is asked for cannot run here.
    """
    shape, lengths, world_size = known_shape(cfg), known_lengths(cfg), scale.world_size
    sizing = partial(size_run, machine=machine, world_size=world_size, local_processes=scale.nproc)
    sized = sizing(cfg, shape=shape, fit=fit, lengths=lengths)
    forecast = sized.forecast
    if forecast is None or shape is None or forecast.verdict != "does_not_fit" or cfg.train.batch_size != "auto":
        return sized
    from sftplay.plan.report import find_report

    task, hardware = find_report(cfg), Hardware(forecast.setting.device, world_size, lengths)
    suggestions = task.suggest(cfg, sized, sizing=sizing, hardware=hardware)
    listed = "; ".join(f"{found.change} ({format_bytes(found.peak_bytes)})" for found in suggestions)
    sizes = f"{format_bytes(forecast.peak_bytes)} of {format_bytes(forecast.budget_bytes)}"
    what = f"{shape.name} does not fit: even one row at a time takes {sizes} on each {forecast.setting.device.name}"
    fix = f"{listed}; `make plan` shows every part; train.batch_size=1 tries it anyway"
    raise MachineError(what, where=task.where_model(cfg), fix=fix)


def build_command(cfg: RunConfig, folder: RunFolder, *, scale: Scale, machine: Machine) -> Launch:
    """Return what starts the run's workers. Raise ConfigError as `refuse_restarts`, or where the launcher cannot start
    this run, and MachineError where its kernels cannot be built here.
    """
    refuse_restarts(cfg, nnodes=scale.nnodes)
    refuse_missing_compiler(cfg, machine)
    has_gpu, strategy, launcher = bool(machine.gpus), None, cfg.cluster.launcher
    if launcher != "auto" and scale.world_size == 1:
        log.say(f"note: cluster.launcher {launcher} has no effect: a single process is started directly")
    if cfg.accelerate_shards and scale.world_size > 1:
        strategy = build_strategy_environment(cfg, folder, scale=scale, has_gpu=has_gpu)
    python, by_vllm = sys.executable, dict[str, str]()
    if cfg.task.turns == 1 and cfg.grpo.generation.startswith("vllm"):
        from sftplay.launch.generation_server import find_worker_python, vllm_environment

        python, by_vllm = find_worker_python(cfg), vllm_environment()
    launch = build_launch(
        folder.path, scale, has_gpu=has_gpu, is_offline=needs_no_hub(cfg), strategy=strategy, launcher=launcher,
        python=python,
    )  # fmt: skip
    env = {**launch.env, **by_vllm, **gpu_settings(cfg, machine, processes=scale.world_size)}
    if scale.world_size > 1:
        from sftplay.launch.nccl import list_interfaces, nccl_environment

        env |= nccl_environment(cfg, folder.logs, has_gpu=has_gpu, environ=os.environ, interfaces=list_interfaces())
    return replace(launch, env=env)


def refuse_restarts(cfg: RunConfig, *, nnodes: int) -> None:
    """Raise ConfigError where several nodes are asked to restart: their parents know nothing of each other."""
    if cfg.cluster.max_restarts and nnodes > 1:
        where = cfg.describe_origin("cluster.max_restarts", unset="cluster")
        fix = "set cluster.max_restarts=0 and let the job continue it with train.resume=auto"
        raise ConfigError(f"a run of {nnodes} nodes cannot restart by itself", where=where, fix=fix)


def read_scale(args: Namespace, machine: Machine) -> Scale:
    """Return processes and nodes as the command line gives them. Raise ConfigError where they give no number of
    processes, and MachineError where there are fewer GPUs than processes, or torch cannot use them.
    """
    is_here = not getattr(args, "is_elsewhere", False)
    if is_here:
        refuse_unusable(machine)
    if args.nproc in (None, ""):
        nproc = 1
    elif args.nproc == "gpu":
        nproc = len(machine.gpus)
        if nproc == 0:
            what = f"there is no GPU to start a process on ({machine.gpu_reason})"
            fix = "give the number of processes (NPROC=2), or use `make train`"
            raise MachineError(what, where="--nproc gpu", fix=fix)
    elif args.nproc.isdecimal() and int(args.nproc) > 0:
        nproc = int(args.nproc)
    else:
        raise ConfigError(f"not a number of processes: {args.nproc!r}", where="--nproc", fix="write NPROC=2")
    if is_here and 0 < len(machine.gpus) < nproc:
        what = f"{nproc} processes need {nproc} GPUs, {len(machine.gpus)} are visible"
        raise MachineError(what, where="--nproc", fix=f"use NPROC={len(machine.gpus)}")
    if not 0 <= args.node_rank < args.nnodes:
        what = f"there is no node {args.node_rank} of {args.nnodes}: the first is node 0"
        fix = "give every node the same NNODES=, and a NODE_RANK= of its own below it"
        raise ConfigError(what, where="--node-rank", fix=fix)
    # Several nodes must know the port in advance. On one node, two runs at once must not get the same port.
    port = args.master_port or (RENDEZVOUS_PORT if args.nnodes > 1 else free_port(0))
    if args.nnodes == 1 < nproc and is_here and not bound_port(port):
        what = f"something listens on port {port} already"
        raise MachineError(what, where="--master-port", fix="leave MASTER_PORT= out, or give another")
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
        ram = f"{machine.ram_bytes / GIB:.1f} GiB of memory"
        log.say(f"No GPU ({machine.gpu_reason}): {machine.cores} CPU cores, {ram}")
    log.say(f"run {folder.path}")
    if sized.decisions:
        # A file or a pipe takes lines of any length.
        width = max(80, shutil.get_terminal_size().columns) if is_terminal(log.screen()) else 10_000
        log.say("chosen automatically:")
        log.show("\n".join(decision_lines(sized, width=width)))
    sizes = f"{train.batch_size} per {'GPU' if gpus else 'process'}"
    label = "Auto-calculated batch size" if "train.batch_size" in sized.decisions else "Batch size"
    log.say(f"{label}: {sizes}, gradient accumulation: {train.grad_accum}")
    log.say(f"Effective batch size: {train.effective_batch_size}, precision: {train.precision}")
    for note in all_notes(sized):
        log.say(f"note: {note}")


def decision_lines(sized: SizedRun, *, width: int) -> list[str]:
    """Return every automatic choice with its reason, one below the other; a reason is shown once."""
    rows = [(key, flow(decision.value), decision.reason) for key, decision in sized.decisions.items()]
    keys, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    shown: set[str] = set()
    lines = []
    for key, value, reason in rows:
        before = f"  {key:<{keys}}  {value:<{values}}  "
        text = "the same" if reason in shown else reason
        lines += textwrap.wrap(text, width, initial_indent=before, subsequent_indent=" " * len(before)) or [before]
        shown.add(reason)
    return lines


def write_plan(folder: RunFolder, sized: SizedRun, **more: Any) -> None:
    """Write plan.json: the sizes, the notes, and the FLOPs of a model whose shape is known before it is loaded."""
    plan = {**sized.as_plan(), **more, "notes": all_notes(sized)}
    # New tokens add rows to the embedding: the workers count them when the tokenizer has them.
    if sized.forecast is not None and sized.cfg.task.reads_text and not sized.cfg.tuning.new_tokens.is_on:
        from sftplay.plan.flops import model_flops

        setting = sized.forecast.setting
        if flops := model_flops(setting.shape, setting.execution):
            plan["model_flops"] = vars(flops)
    folder.write_json("plan.json", plan)


def all_notes(sized: SizedRun) -> list[str]:
    """Return what the user should know before the start: settings without effect, and a shortage of memory."""
    forecast, listed = sized.forecast, [*notes(sized.cfg), *sized.notes]
    if forecast is not None and forecast.verdict != "fits":
        needed, budget = format_bytes(forecast.peak_bytes), format_bytes(forecast.budget_bytes)
        figures = f"{needed} planned with its margin, {budget} to plan with"
        listed.append(f"memory: {forecast.verdict.replace('_', ' ')} ({figures}); `make plan` shows what would fit")
    return listed


def print_command(command: Launch, args: Namespace) -> int:
    """Print the command and its environment, for --dry-run."""
    if args.json:
        print(json.dumps({"argv": list(command.argv), "env": dict(command.env), "files": dict(command.files)}))
    else:
        print(command.as_text())
    return 0


def archive_earlier_start(folder: RunFolder) -> None:
    """Move what an earlier start without a step has left in `folder` to the archive. Raise ConfigError where the run
    has made a step, or runs, or the folder holds files that no run of the kit has made, and MachineError where its
    folder cannot be moved.
    """
    # Every run of the kit has one of these soon after its start.
    if not any((folder.path / name).exists() for name in (RESOLVED, "status.json", "manifest.json")):
        # A start, or a job waiting for one, makes these; the last is what a kill leaves of the first file.
        first = ("logs", "base", "slurm*", ".lock", ".status.lock", f".{RESOLVED}.*")
        names = [path.name for path in folder.path.iterdir()] if folder.path.is_dir() else []
        if others := sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in first)):
            more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
            what = f"holds {', '.join(map(repr, others[:3]))}{more}, and was never a run of this kit"
            fix = "choose another run_name or output_dir, or move the files"
            raise ConfigError(what, where=str(folder.path), fix=fix)
        return
    with folder.locked():
        if folder.resolved.exists() and folder.has_made_step:
            raise name_taken(folder, str(folder.path))
        status = folder.read_json("status.json")
        why = (status.get("error") or {}).get("what", "").split("\n")[0] or status.get("signal") or "it was ended"
        log.say(f"the earlier start of {folder.name} made no step ({why}): kept in {folder.set_aside().path}")


def archive_aborted_run(folder: RunFolder) -> RunFolder:
    """Archive a run that was refused before its first step, so that its name can be used again; return its folder now.

    The caller holds the run's lock.
    """
    if folder.has_made_step:
        return folder
    try:
        kept = folder.set_aside()
    except MachineError as error:
        log.say(f"note: {error}")
        return folder
    log.say(f"failed before the first step; kept in {kept.path}, and the name {folder.name} can be used again")
    return kept


@contextmanager
def archive_if_refused(folder: RunFolder, *, is_alone: bool) -> Iterator[None]:
    """Archive the run where the block refuses to start it and no other node looks for its folder.

    The caller holds the run's lock.
    """
    try:
        yield
    except SftplayError as error:
        if is_alone and folder.path.exists() and not folder.has_made_step and not isinstance(error, FolderGone):
            folder.update_status(state="failed", exit_code=error.exit_code, error=error.as_json())
            archive_aborted_run(folder)
        raise
