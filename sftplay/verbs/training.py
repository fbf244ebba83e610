"""The verbs that launch training: from a config to a run folder, a command, and its exit code."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.load import dump_resolved, load_config
from sftplay.config.rules import notes
from sftplay.config.sameness import SIZES, decisive, differences
from sftplay.config.schema import RunConfig
from sftplay.errors import ConfigError, ConfigErrors, MachineError
from sftplay.launch.command import Launch, Scale, build_launch
from sftplay.launch.folder import RESOLVED, RunFolder, find_run, has_run, new_folder, write_text
from sftplay.launch.follow import follow
from sftplay.launch.ports import free_port
from sftplay.machine.probe import Machine, probe
from sftplay.plan.advice import Place, suggest
from sftplay.plan.probe_fit import Fit
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.units import GIB, format_bytes
from sftplay.verbs.inputs import check_inputs, needs_no_hub
from sftplay.verbs.look import leave_report
from sftplay.verbs.plan import known_shape
from sftplay.verbs.probing import Bench, look_closer
from sftplay.watch.checkpoints import list_checkpoints, read_marker

MEETING_PORT = 29511
"""Where nodes meet when no port is given."""


def train(args: Namespace) -> int:
    """`train`: start the run of a config, or continue it when train.resume says so."""
    cfg = load_config(args.config, args.overrides)
    if cfg.train.resume == "never" or (cfg.train.resume == "auto" and not has_run(cfg, args.config)):
        return launch(args, cfg)
    return _continue(args, cfg)


def resume(args: Namespace) -> int:
    """`resume`: continue the newest run of a config."""
    cfg = load_config(args.config, args.overrides)
    if cfg.train.resume == "never":
        cfg = cfg.with_values({"train.resume": "auto"}, "resume")
    return _continue(args, cfg)


def launch(args: Namespace, cfg: RunConfig, folder: RunFolder | None = None) -> int:
    """Size, create the folder (a new one, if none is given), start the workers and follow them."""
    machine = probe()
    scale = _scale(args, machine)
    cfg = check_inputs(cfg)
    sized = _size(cfg, machine, scale)
    folder = folder or new_folder(cfg, args.config, claim=not args.dry_run)
    command = _command(sized, folder, scale, machine)
    if args.dry_run:
        return _print_command(command, args)
    with folder.locked():
        folder.create()
        bench = Bench(machine, scale.nproc, folder.logs)
        sized, probed = look_closer(sized, bench, lambda found: _size(cfg, machine, scale, found))
        say_sizing(sized, machine, folder)
        write_text(folder.resolved, dump_resolved(sized.cfg))
        folder.write_json("plan.json", {**sized.as_plan(), "probe": probed, "notes": _notes(sized)})
        return _start(command, folder, args)


def _continue(args: Namespace, cfg: RunConfig) -> int:
    folder = find_run(cfg, args.config, getattr(args, "run", None) or _run_of(cfg))
    status, stored = folder.read_json("status.json"), load_config(folder.resolved)
    if status.get("state") == "done":
        given = cfg.with_values({key: _value(stored, key) for key in _left_open(cfg)}, "resume")
        _refuse_changes(stored, given, folder)
        log.say(f"{folder.path} is finished: nothing to do", "resume")
        if args.json:
            print(json.dumps({"run": str(folder.path), **status}))
        return 0
    machine = probe()
    scale = _scale(args, machine)
    cfg = check_inputs(cfg)
    starts_anew = _check_processes(folder, scale) and cfg.train.resume == "auto"
    # Sizes that are free follow the run's first start: another cut would round, and draw dropout, differently.
    kept = {key: _value(stored, key) for key in SIZES if _value(cfg, key) == "auto" and not starts_anew}
    named = cfg.with_values({"run_name": stored.run_name}, "resume")
    sized = _size(named.with_values(kept, "resume"), machine, scale)
    resized = bool(kept) and not _fits(sized)
    if resized:
        sized = _size(named, machine, scale)
        _say_resized(stored, sized.cfg)
    starts_anew = starts_anew or resized
    sizes = {key: _value(sized.cfg, key) for key in SIZES} if starts_anew else {}
    _refuse_changes(stored.with_values(sizes, "resume"), sized.cfg, folder)
    command = _command(sized, folder, scale, machine)
    if args.dry_run:
        return _print_command(command, args)
    with folder.locked():
        write_text(folder.resolved, dump_resolved(sized.cfg))
        if starts_anew:
            folder.write_json("plan.json", {**sized.as_plan(), "notes": _notes(sized), "resized": resized})
        return _start(command, folder, args)


def _fits(sized: SizedRun) -> bool:
    return sized.forecast is None or sized.forecast.verdict != "does_not_fit"


def _say_resized(stored: RunConfig, cfg: RunConfig) -> None:
    before, now = (f"{each.train.batch_size} x {each.train.grad_accum}" for each in (stored, cfg))
    log.say(
        f"note: the first start's {before} rows a process do not fit here, {now} do; the effective batch and the rows "
        "stay, sums are rounded otherwise from here on",
        "resume",
    )


def _run_of(cfg: RunConfig) -> str | None:
    """The run that a checkpoint given as train.resume lies in, where the config names none."""
    run = Path(cfg.train.resume).parent.parent
    return str(run) if cfg.run_name is None and (run / RESOLVED).is_file() else None


def find_changes(before: RunConfig, after: RunConfig) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ and would make a resumed run another run: (dotted key, before, after)."""
    return differences(decisive(before), decisive(after))


def _refuse_changes(stored: RunConfig, cfg: RunConfig, folder: RunFolder) -> None:
    problems = [
        ConfigError(
            f"{key} was {before!r} when the run began and is {after!r} now; the result would be neither run's",
            where=f"{cfg.origins.get(key, str(folder.resolved))} {key}",
            fix="restore it, or train under a new run_name",
        )
        for key, before, after in find_changes(stored, cfg)
    ]
    if problems:
        raise ConfigErrors(problems)


def _check_processes(folder: RunFolder, scale: Scale) -> bool:
    """True when there is no checkpoint yet that ties the run to a number of processes.

    Raises:
        ConfigError: there is one of another number; the worker would refuse it too, seconds later.
    """
    markers = [read_marker(checkpoint) for checkpoint in reversed(list_checkpoints(folder.checkpoints))]
    before = next((marker["world_size"] for marker in markers if marker.get("world_size")), None)
    if before not in (None, scale.world_size):
        raise ConfigError(
            f"the run's checkpoints are of {before} process(es), {scale.world_size} would not go on bit for bit",
            where=f"{folder.path} --nproc",
            fix=f"continue it with --nproc {before} (make resume NPROC={before}), or train under a new run_name",
        )
    return before is None


def _left_open(cfg: RunConfig) -> list[str]:
    return [key for key, value in decisive(cfg).items() if value in (None, "auto")]


def _value(cfg: RunConfig, key: str) -> Any:
    value: Any = cfg
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def _start(command: Launch, folder: RunFolder, args: Namespace) -> int:
    write_text(folder.path / "launch.txt", command.as_text() + "\n")
    if args.tb:
        from sftplay.verbs.board import start_board

        start_board(folder.path.parent, 6006)
    folder.update_status(state="running", exit_code=None, signal=None, ranks=[], pid=None)
    code = follow(command, folder)
    if args.node_rank == 0:  # nodes share the folder
        leave_report(folder)
    if args.json and args.verb != "demo":
        print(json.dumps({"run": str(folder.path), **folder.read_json("status.json")}))
    return code


def _size(cfg: RunConfig, machine: Machine, scale: Scale, fit: Fit | None = None) -> SizedRun:
    shape = known_shape(cfg)
    sized = size_run(cfg, machine, world_size=scale.world_size, shape=shape, local_processes=scale.nproc, fit=fit)
    seen = sized.forecast
    if seen is None or shape is None or seen.verdict != "does_not_fit" or cfg.train.batch_size != "auto":
        return sized
    found = suggest(sized.cfg, shape, Place(seen.setting.device, scale.world_size))
    listed = "; ".join(f"{each.change} ({format_bytes(each.peak_bytes)})" for each in found)
    raise MachineError(
        f"{shape.name} does not fit: even one row at a time takes {format_bytes(seen.peak_bytes)} of "
        f"{format_bytes(seen.budget_bytes)} on each {seen.setting.device.name}",
        where=f"{cfg.origins.get('model.name', 'model')} model.name",
        fix=f"{listed}; `make plan` shows every part; train.batch_size=1 tries it all the same",
    )


def _command(sized: SizedRun, folder: RunFolder, scale: Scale, machine: Machine) -> Launch:
    return build_launch(folder.path, scale, has_gpu=bool(machine.gpus), is_offline=needs_no_hub(sized.cfg))


def _scale(args: Namespace, machine: Machine) -> Scale:
    if args.nproc in (None, ""):
        nproc = 1
    elif args.nproc == "gpu":
        nproc = len(machine.gpus)
        if nproc == 0:
            raise MachineError(
                f"no GPU to take one process each ({machine.gpu_reason})",
                where="--nproc gpu",
                fix="give the number of processes (NPROC=2), or use `make train`",
            )
    elif args.nproc.isdigit() and int(args.nproc) > 0:
        nproc = int(args.nproc)
    else:
        raise ConfigError(f"not a number of processes: {args.nproc!r}", where="--nproc", fix="write --nproc 2")
    if 0 < len(machine.gpus) < nproc:
        raise MachineError(
            f"{nproc} processes need {nproc} GPUs, {len(machine.gpus)} are visible",
            where="--nproc",
            fix=f"use --nproc {len(machine.gpus)}",
        )
    # Nodes must agree on a port beforehand; alone, two runs at once must not meet on the same one.
    port = args.master_port or (MEETING_PORT if args.nnodes > 1 else free_port(0))
    return Scale(nproc, args.nnodes, args.node_rank, args.master_addr, port)


def say_sizing(sized: SizedRun, machine: Machine, folder: RunFolder) -> None:
    """Tell devices, sizes and every automatic choice with its reason."""
    gpus, train_section = machine.gpus, sized.cfg.train
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
    for decision in sized.decisions:
        log.say(f"auto {decision.key} = {decision.value}: {decision.reason}")
    chosen = any(decision.key == "train.batch_size" for decision in sized.decisions)
    sizes = f"{train_section.batch_size} per {'GPU' if gpus else 'process'}"
    said = "Auto-calculated batch size" if chosen else "Batch size"
    log.say(f"{said}: {sizes}, gradient accumulation: {train_section.grad_accum}")
    log.say(f"Effective batch size: {train_section.effective_batch_size}, precision: {train_section.precision}")
    for note in _notes(sized):
        log.say(f"note: {note}")


def _notes(sized: SizedRun) -> list[str]:
    seen = sized.forecast
    warning = []
    if seen is not None and seen.verdict != "fits":
        what = (
            f"{format_bytes(seen.peak_bytes)} planned with its margin, {format_bytes(seen.budget_bytes)} to plan with"
        )
        warning = [f"memory: {seen.verdict.replace('_', ' ')} ({what}); `make plan` shows what would fit"]
    return [*notes(sized.cfg), *sized.notes, *warning]


def _print_command(command: Launch, args: Namespace) -> int:
    if args.json:
        print(json.dumps({"argv": list(command.argv), "env": dict(command.env)}))
    else:
        print(command.as_text())
    return 0
