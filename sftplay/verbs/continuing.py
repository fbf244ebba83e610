"""How a run is continued: on the sizes of its first start where they fit, and never as another run."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.load import dump_resolved, load_config
from sftplay.config.sameness import SIZES, decisive, differences
from sftplay.config.schema import RunConfig
from sftplay.errors import ConfigError, ConfigErrors
from sftplay.launch.command import Scale
from sftplay.launch.folder import RESOLVED, RunFolder, find_run, write_text
from sftplay.machine.probe import probe
from sftplay.plan.sizing import SizedRun
from sftplay.verbs.inputs import check_inputs
from sftplay.verbs.launching import all_notes, build_command, print_command, read_scale, run_workers, size
from sftplay.verbs.lessons import sizes_of
from sftplay.watch.checkpoints import list_checkpoints, read_marker


def continue_run(args: Namespace, cfg: RunConfig) -> int:
    """Continue the run that `cfg` or `--run` names; nothing is done where it is finished.

    Raises:
        ConfigErrors: values that decide the result have changed since its first start.
    """
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
    scale = read_scale(args, machine)
    cfg = check_inputs(cfg)
    starts_anew = _check_processes(folder, scale) and cfg.train.resume == "auto"
    # Sizes that are free follow the run's first start: another cut would round, and draw dropout, differently.
    plan = folder.read_json("plan.json")
    kept = {key: _value(stored, key) for key in SIZES if _value(cfg, key) == "auto" and not starts_anew}
    if kept and (shortages := plan.get("shortages")):
        # The rows of a step that ran out of memory went on in smaller pieces.
        learned = sizes_of(stored, shortages[-1]["batch_size"], scale.world_size)
        kept = {key: learned[key] for key in kept}
    named = cfg.with_values({"run_name": stored.run_name}, "resume")
    sized = size(named.with_values(kept, "resume"), machine, scale)
    fits = not kept or _fits(sized)
    if not fits:
        sized = size(named, machine, scale)
        _say_resized(stored, sized.cfg)
    resized = not fits or bool(kept and plan.get("shortages"))
    starts_anew = starts_anew or resized
    sizes = {key: _value(sized.cfg, key) for key in SIZES} if starts_anew else {}
    _refuse_changes(stored.with_values(sizes, "resume"), sized.cfg, folder)
    command = build_command(sized, folder, scale, machine)
    if args.dry_run:
        return print_command(command, args)
    with folder.locked():
        write_text(folder.resolved, dump_resolved(sized.cfg))
        if starts_anew:
            history = {"resized": resized, "shortages": plan.get("shortages", [])}
            folder.write_json("plan.json", {**sized.as_plan(), "notes": all_notes(sized), **history})
        return run_workers(command, (sized, folder), args)


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
