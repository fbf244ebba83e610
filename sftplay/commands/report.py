"""The verbs that show runs: `report`, `compare`, and TensorBoard."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.load import load_config
from sftplay.config.resolved import RESOLVED
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.launch.run_folder import RunFolder, find_run
from sftplay.runs.tensorboard import PID_FILE, end_board, running, start_board


def report(args: Namespace) -> int:
    """`report`: write report.html of a run in any state, and print its path; and what was learned from rewards."""
    folder = find_run(load_config(args.config, args.overrides), args.config, run=args.run)
    from sftplay.report.report import NAME, write_report
    from sftplay.report.rewards import learned_table
    from sftplay.report.run_files import RunFiles

    try:
        path = write_report(folder)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise MachineError(what, where=str(folder.path / NAME), fix="make room, or allow writing there") from error
    if not args.json and (table := learned_table(RunFiles(folder))):
        print(f"{table.format()}\n")
    print(json.dumps({"report": str(path)}) if args.json else path)
    return 0


def compare(args: Namespace) -> int:
    """`compare`: the different settings of two runs and their results, as a table or as JSON."""
    output = Path(load_config(args.config, args.overrides).output_dir if args.config else "outputs")
    runs = []
    for flag, name in (("--a", args.a), ("--b", args.b)):
        if not name:
            raise ConfigError("no run is named", where=flag, fix="make compare RUN_A=name RUN_B=name")
        folder = next((path for path in (Path(name), output / name) if (path / RESOLVED).is_file()), None)
        if folder is None:
            places = f"neither {name} nor {output / name} holds a {RESOLVED}"
            raise ConfigError(f"no run {name!r} ({places})", where=flag, fix="give a run's folder, or its name")
        runs.append(RunFolder(folder))
    from sftplay.report.compare import compare_runs, comparison_table

    comparison = compare_runs(*runs)
    print(json.dumps(comparison, ensure_ascii=False) if args.json else comparison_table(comparison))
    return 0


def start(args: Namespace) -> int:
    """`tensorboard`: start it over all runs of the output folder, or print the address of the one that runs."""
    output = Path(load_config(args.config, args.overrides).output_dir) if args.config else Path("outputs")
    folder = output
    if args.run:
        named = (output / args.run, Path(args.run))
        found = next((folder for folder in named if (folder / RESOLVED).is_file() or (folder / "tb").is_dir()), None)
        if found is None:
            runs = [path.parent.name for path in output.glob(f"*/{RESOLVED}")]
            near = nearest_names(args.run, runs)
            fix = f"did you mean RUN={near[0]}?" if near else "leave RUN= out to see all runs"
            raise ConfigError(f"no run {args.run!r}", where=str(output), fix=fix, nearest=near)
        folder = found
    start_board(folder, args.port)
    return 0


def stop(args: Namespace) -> int:
    """`tb-stop`: end the TensorBoard that this kit started, and no other."""
    record = running()
    if record is None:
        log.say("no TensorBoard of ours is running", "tensorboard")
        PID_FILE.unlink(missing_ok=True)
        return 0
    end_board(record)
    log.say(f"stopped (process {record['pid']})", "tensorboard")
    return 0
