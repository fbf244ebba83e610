"""The verbs that launch training: from a config to a run folder, a command, and its exit code."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from sftplay import log
from sftplay.config.load import dump_resolved, load_config
from sftplay.config.rules import notes
from sftplay.config.schema import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.command import Launch, Scale, build_launch
from sftplay.launch.folder import RunFolder, find_run, has_run, new_folder, write_text
from sftplay.launch.follow import follow
from sftplay.launch.ports import free_port
from sftplay.machine.probe import Machine, probe
from sftplay.model.source import read_shape
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.units import GIB
from sftplay.verbs.inputs import check_inputs, needs_no_hub

MEETING_PORT = 29511
"""Where nodes meet when no port is given."""

FREE_TO_CHANGE = (
    "train.resume",
    "logging",
    "eval",
    "run_name",
    "output_dir",
    "train.save_total_limit",
    "data.val_path",
)
"""Config keys that may differ when a run is resumed: they change neither rows nor weights.

With `data.leaks: drop` the held-out rows decide which rows are trained on, so data.val_path is not free then.
"""


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
    check_inputs(cfg)
    sized = _size(cfg, machine, scale)
    folder = folder or new_folder(cfg, args.config, claim=not args.dry_run)
    command = _command(sized, folder, scale, machine)
    if args.dry_run:
        return _print_command(command, args)
    with folder.locked():
        folder.create()
        say_sizing(sized, machine, folder)
        write_text(folder.resolved, dump_resolved(sized.cfg))
        folder.write_json("plan.json", sized.as_plan())
        return _start(command, folder, args)


def _continue(args: Namespace, cfg: RunConfig) -> int:
    folder = find_run(cfg, args.config, getattr(args, "run", None))
    status = folder.read_json("status.json")
    if status.get("state") == "done":
        log.say(f"{folder.path} is finished: nothing to do", "resume")
        if args.json:
            print(json.dumps({"run": str(folder.path), **status}))
        return 0
    machine = probe()
    scale = _scale(args, machine)
    check_inputs(cfg)
    stored = load_config(folder.resolved)
    sized = _size(cfg.with_values({"run_name": stored.run_name}, "resume"), machine, scale)
    changed = find_changes(stored, sized.cfg)
    if changed:
        key, before, after = changed[0]
        raise ConfigError(
            f"{key} was {before!r} when the run began and is {after!r} now; the result would be neither run's",
            where=f"{cfg.origins.get(key, str(folder.resolved))} {key}",
            fix="restore it, or train under a new run_name",
        )
    command = _command(sized, folder, scale, machine)
    if args.dry_run:
        return _print_command(command, args)
    with folder.locked():
        write_text(folder.resolved, dump_resolved(sized.cfg))
        return _start(command, folder, args)


def find_changes(before: RunConfig, after: RunConfig) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ and would make a resumed run another run: (dotted key, before, after)."""
    old, new = _flat(before.model_dump()), _flat(after.model_dump())
    sizes = ("train.batch_size", "train.grad_accum")  # how a step is cut changes speed, not the step
    free = {*FREE_TO_CHANGE, *sizes} - ({"data.val_path"} if after.data.leaks == "drop" else set())
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and not any(key == f or key.startswith(f"{f}.") for f in free)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _start(command: Launch, folder: RunFolder, args: Namespace) -> int:
    write_text(folder.path / "launch.txt", command.as_text() + "\n")
    if args.tb:
        from sftplay.verbs.board import start_board

        start_board(folder.path.parent, 6006)
    folder.update_status(state="running", exit_code=None, signal=None, ranks=[], pid=None)
    code = follow(command, folder)
    if args.json and args.verb != "demo":
        print(json.dumps({"run": str(folder.path), **folder.read_json("status.json")}))
    return code


def _size(cfg: RunConfig, machine: Machine, scale: Scale) -> SizedRun:
    vocab_size = read_shape(cfg.model.name).get("vocab_size")
    return size_run(cfg, machine, world_size=scale.world_size, vocab_size=vocab_size)


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
    else:
        log.say(
            f"No GPU ({machine.gpu_reason}): {machine.cores} CPU cores, {machine.ram_bytes / GIB:.1f} GiB of memory"
        )
    log.say(f"run {folder.path}")
    for decision in sized.decisions:
        log.say(f"auto {decision.key} = {decision.value}: {decision.reason}")
    log.say(f"Batch size: {train_section.batch_size} per process, gradient accumulation: {train_section.grad_accum}")
    log.say(f"Effective batch size: {train_section.effective_batch_size}, precision: {train_section.precision}")
    for note in [*notes(sized.cfg), *sized.notes]:
        log.say(f"note: {note}")


def _print_command(command: Launch, args: Namespace) -> int:
    if args.json:
        print(json.dumps({"argv": list(command.argv), "env": dict(command.env)}))
    else:
        print(command.as_text())
    return 0
