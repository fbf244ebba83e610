"""Continues a run: with the sizes of its first start where they fit, and never as another run."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.keys import DRAWN, SIZES, differences, values_that_decide_weights
from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved, flow
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, ConfigErrors
from sftplay.launch.checkpoints import list_checkpoints, read_marker
from sftplay.launch.command import Scale
from sftplay.launch.run_folder import OUT_OF_MEMORY, RESIZED, RunFolder, find_run
from sftplay.machine.probe import probe
from sftplay.model.start_point import resolve_names
from sftplay.plan.sizing import SizedRun
from sftplay.runs.finished_run import describe_end
from sftplay.runs.inputs import check_inputs
from sftplay.runs.start import build_command, print_command, read_scale, run_workers, size, split_rows, write_plan

if TYPE_CHECKING:
    from sftplay.launch.nodes import Rendezvous


def continue_run(args: Namespace, cfg: RunConfig, *, rendezvous: Rendezvous | None = None) -> int:
    """Continue the run that `cfg` or `--run` names. A finished run is left as it is. Raise ConfigErrors where values
    that decide the result have changed since its first start.
    """
    run = getattr(args, "run", None)
    holder = Path(cfg.train.resume).parent.parent  # the run with the checkpoint that train.resume names
    if not run and cfg.run_name is None and (holder / RESOLVED).is_file():
        run = str(holder)
    folder = find_run(cfg, args.config, run=run)
    stored = load_config(folder.resolved)
    if Path(args.config) == folder.resolved:  # sizes that the run has chosen hold only where they still fit
        chosen = [key for key in SIZES if stored.get_value(key) and cfg.origins.get(key) != "command line"]
        cfg = cfg.with_values(dict.fromkeys(chosen, "auto"), "resume")
    if folder.read_json("status.json").get("state") == "done":
        left_open = [key for key, value in values_that_decide_weights(cfg).items() if value in (None, "auto")]
        filled = cfg.with_values({key: stored.get_value(key) for key in left_open}, "resume")
        _refuse_changes(stored, resolve_names(filled), folder=folder)
        log.say(f"{folder.path} is finished: nothing to do", "resume")
        if args.json:
            print(json.dumps(describe_end(folder)))
        return 0
    machine = probe()
    scale = read_scale(args, machine)
    cfg = check_inputs(cfg)
    before = find_processes(cfg.train.resume, folder)
    starts_anew = before is None and cfg.train.resume == "auto"
    moves = before not in (None, scale.world_size)
    if moves or folder.is_resized:
        cfg = free_sizes(cfg, scale)
    # Open sizes keep the values of the first start: other micro-batches round differently and other dropout is drawn.
    smaller_rows = _rows_after_shortage(folder)
    kept = {} if starts_anew or moves else _kept_sizes(cfg, stored, smaller_rows=smaller_rows)
    named = cfg.with_values({"run_name": stored.run_name}, "resume")
    sized = size(named.with_values(kept, "resume"), machine, scale=scale)
    fits = not kept or sized.forecast is None or sized.forecast.verdict != "does_not_fit"
    if not fits:
        sized = size(named, machine, scale=scale)
        old, new = (f"{config.train.batch_size} x {config.train.grad_accum}" for config in (stored, sized.cfg))
        log.say(
            f"note: the first start's sizes, {old} rows a process, do not fit here; the run continues with {new}. The "
            "effective batch and the rows stay the same; from here on sums round differently",
            "resume",
        )
    if moves:
        _move(before, sized, scale=scale)
    resized = moves or not fits or bool(kept and smaller_rows)
    starts_anew |= resized
    sizes = {key: sized.cfg.get_value(key) for key in (*SIZES, DRAWN)} if starts_anew else {}
    _refuse_changes(stored.with_values(sizes, "resume"), sized.cfg, folder=folder)
    command = build_command(sized.cfg, folder, scale=scale, machine=machine)
    if args.dry_run:
        return print_command(command, args)
    with folder.locked():
        folder.set_broken_aside()
        write_text(folder.resolved, dump_resolved(sized.cfg))
        if starts_anew or "world_size" not in folder.read_json("plan.json"):
            write_plan(folder, sized)
        if resized:  # sizes that the task does not have are left out
            changed = {key.rpartition(".")[2]: value for key, value in sizes.items() if value is not None}
            folder.add_event(RESIZED, world_size=sized.world_size, **changed)
        return run_workers(command, folder, cfg=sized.cfg, args=args, rendezvous=rendezvous)


def _rows_after_shortage(folder: RunFolder) -> int | None:
    """The micro-batch that a step needed after it ran out of memory; None when a later start has used it already."""
    events = [event for event in folder.read_events() if event["event"] in (OUT_OF_MEMORY, RESIZED)]
    return events[-1]["batch_size"] if events and events[-1]["event"] == OUT_OF_MEMORY else None


def _kept_sizes(cfg: RunConfig, stored: RunConfig, *, smaller_rows: int | None) -> dict[str, Any]:
    """The run's last values of the sizes that `cfg` leaves open."""
    last = {key: stored.get_value(key) for key in SIZES}
    if smaller_rows:
        train = stored.train
        world_size = train.effective_batch_size // (int(train.batch_size) * int(train.grad_accum))
        last = split_rows(stored, smaller_rows, world_size=world_size)
    last[DRAWN] = stored.get_value(DRAWN)
    return {key: value for key, value in last.items() if cfg.get_value(key) in ("auto", None)}


def _move(before: int | None, sized: SizedRun, *, scale: Scale) -> None:
    """Say that another number of processes continues, or refuse it where the checkpoint cannot be read by it.

    FSDP's checkpoints are whole (`FULL_STATE_DICT`): any number of processes above 1 can read them.
    """
    cfg, strategy, now = sized.cfg, sized.cfg.cluster.strategy, scale.world_size
    if cfg.accelerate_shards and (strategy != "fsdp" or 1 in (before, now)):
        fix = f"continue it with NPROC={before}, or train under a new run_name"
        if strategy == "fsdp":
            what = (
                f"a checkpoint of {before} process(es) cannot continue on {now}: one process trains without fsdp, and "
                "fsdp's checkpoints give the optimizer's state other names"
            )
            fix = fix if before == 1 else f"continue it with NPROC={before} or another number above 1"
        elif strategy == "hsdp":
            what = f"{now} processes would split the model into other copies than {before} did; this was never tried"
        else:
            what = f"the checkpoints of {strategy} hold one part for each of {before} processes, not for {now}"
        raise ConfigError(what, where=cfg.describe_origin("cluster.strategy", unset="cluster"), fix=fix)
    draws = ", dropout and noise draw other numbers" if draws_at_random(cfg) else ""
    log.say(
        f"note: the run began on {before} process(es) and continues on {sized.world_size}, each with "
        f"{cfg.train.batch_size} x {cfg.train.grad_accum} rows. The effective batch and the rows stay the same; from "
        f"here on sums round differently{draws}",
        "resume",
    )


def find_changes(before: RunConfig, after: RunConfig) -> list[tuple[str, Any, Any]]:
    """Return keys whose values differ and would make a resumed run another run: (dotted key, before, after)."""
    return differences(values_that_decide_weights(before), values_that_decide_weights(after))


def _print(value: Any) -> str:
    return flow(value) if value is None or isinstance(value, bool) else repr(value)


def _refuse_changes(stored: RunConfig, cfg: RunConfig, *, folder: RunFolder) -> None:
    other = "train under a new run_name" if folder.has_made_step else "`make train`: this start made no step"
    problems = [
        ConfigError(
            f"{key} was {_print(before)} when the run began and is {_print(after)} now; the result would be neither"
            " run's",
            where=cfg.describe_origin(key, unset=str(folder.resolved)),
            fix=f"restore it, or {other}",
        )
        for key, before, after in find_changes(stored, cfg)
    ]
    if problems:
        raise ConfigErrors(problems)


def find_processes(resume: str, folder: RunFolder) -> int | None:
    """Return the number of processes that wrote the checkpoint `train.resume` means; None where there is none yet."""
    named = [] if resume in ("never", "auto") else [Path(resume)]
    markers = map(read_marker, named or reversed(list_checkpoints(folder.checkpoints)))
    return next((marker["world_size"] for marker in markers if marker.get("world_size")), None)


def free_sizes(cfg: RunConfig, scale: Scale) -> RunConfig:
    """`cfg` without the sizes that do not fit the new number of processes.

    The accumulation is left open first, then the micro-batch.
    """
    train, share = cfg.train, cfg.train.effective_batch_size // scale.world_size
    given = [size for size in (train.batch_size, train.grad_accum) if isinstance(size, int)]
    product = math.prod(given)
    if product == share or (len(given) < len(SIZES) and share % product == 0):
        return cfg
    divides = not isinstance(train.batch_size, int) or share % train.batch_size == 0
    return cfg.with_values(dict.fromkeys(SIZES[1:] if divides else SIZES, "auto"), "resume")


def draws_at_random(cfg: RunConfig) -> bool:
    """Return whether a step draws random numbers: dropout of the adapter or the model, or NEFTune's noise.

    A model whose config.json is not on this machine counts as one without dropout.
    """
    if cfg.train.neftune_alpha or (cfg.tuning.mode != "full" and cfg.tuning.lora.dropout):
        return True
    try:
        content = json.loads((Path(cfg.model.name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any(value for key, value in content.items() if "drop" in key and isinstance(value, float))
