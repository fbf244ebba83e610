"""The verbs `report` and `compare`. They change nothing in a run but its report."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from sftplay.config.load import load_config
from sftplay.config.read.resolved import RESOLVED
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import RunFolder, find_run


def report(args: Namespace) -> int:
    """`report`: write report.html of a run in any state, and print its path; and what was learned from rewards."""
    folder = find_run(load_config(args.config, args.overrides), args.config, run=args.run)
    from sftplay.report.learned import learned_table, learned_text
    from sftplay.report.report import NAME, write_report
    from sftplay.report.run_files import read_run_files

    try:
        path = write_report(folder)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise MachineError(what, where=str(folder.path / NAME), fix="make room, or allow writing there") from error
    if not args.json and (table := learned_table(read_run_files(folder))):
        print(f"{learned_text(table)}\n")
    print(json.dumps({"report": str(path)}) if args.json else path)
    return 0


def compare(args: Namespace) -> int:
    """`compare`: the different settings of two runs and their results, as a table or as JSON."""
    if args.overrides and not args.config:
        what = f"compare has nothing to set {args.overrides[0]!r} in"
        raise ConfigError(what, where="command line", fix="leave it out, or give the config with --config")
    output = Path(load_config(args.config, args.overrides).output_dir if args.config else "outputs")
    one, two = (_run_at(name, flag, output=output) for flag, name in (("--a", args.a), ("--b", args.b)))
    from sftplay.report.compare import compare_runs, comparison_table

    comparison = compare_runs(one, two)
    print(json.dumps(comparison, ensure_ascii=False) if args.json else comparison_table(comparison))
    return 0


def _run_at(name: str, flag: str, *, output: Path) -> RunFolder:
    if not name:
        raise ConfigError("no run is named", where=flag, fix="make compare RUN_A=name RUN_B=name")
    folder = next((path for path in (Path(name), output / name) if (path / RESOLVED).is_file()), None)
    if folder is None:
        places = f"neither {name} nor {output / name} holds a {RESOLVED}"
        raise ConfigError(f"no run {name!r} ({places})", where=flag, fix="give a run's folder, or its name")
    return RunFolder(folder)
