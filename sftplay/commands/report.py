"""The verbs that show runs: `report`, `compare`, and TensorBoard."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sftplay import log
from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.launch.run_folder import RunFolder, find_run
from sftplay.runs.status import find_folder
from sftplay.runs.tensorboard import PID_FILE, end_board, running, start_board


def report(args: Namespace) -> int:
    """`report`: write report.html of a run in any state, and print its path; and what was learned from rewards. Of
    several runs, named with commas, write one page.
    """
    output = Path(load_config(args.config, args.overrides).output_dir if args.config else "outputs")
    names = _split_names(args.run or "", output)
    if len(names) > 1:
        return _report_several(args, names, output)
    if args.out:
        raise ConfigError("is for a page of several runs", where="--out", fix="leave it out, or name runs: RUN=a,b")
    if args.config:
        folder = find_run(load_config(args.config, args.overrides), args.config, run=args.run)
    elif args.run:
        folder = RunFolder(find_folder(output, args.run, (RESOLVED,), where="--run"))
    else:
        raise ConfigError("no run is named", where="--run", fix="name one with RUN=, or its config with CONFIG=")
    from sftplay.report.report import NAME, write_report
    from sftplay.report.rewards import learned_table
    from sftplay.report.run_files import RunFiles

    with _writable(folder.path / NAME):
        path = write_report(folder)
    if not args.json and (table := learned_table(RunFiles(folder))):
        print(f"{table.format()}\n")
    print(json.dumps({"report": str(path)}) if args.json else path)
    return 0


def _report_several(args: Namespace, names: list[str], output: Path) -> int:
    folders = [RunFolder(find_folder(output, name, (RESOLVED,), where="--run")) for name in names]
    if twice := [folder.name for n, folder in enumerate(folders) if folder in folders[:n]]:
        raise ConfigError(f"names {twice[0]!r} twice", where="--run", fix="name each run once")
    from sftplay.report.several import write_runs_page

    text = "+".join(folder.name for folder in folders)
    if len(text.encode()) > 100:
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        text = f"{folders[0].name[:60]}-and-{len(folders) - 1}-more-{digest}"
    title = ", ".join(folder.name for folder in folders) if len(folders) <= 4 else f"{len(folders)} runs"
    path = Path(args.out) if args.out else output / f"report-{text}.html"
    with _writable(path):
        write_runs_page(folders, path, title=title)
    print(json.dumps({"report": str(path), "runs": [str(folder.path) for folder in folders]}) if args.json else path)
    return 0


def _split_names(text: str, output: Path) -> list[str]:
    """Split names at commas; a run whose own name has some is one name, and quotes keep them in a list."""
    is_one = "," not in text
    with suppress(OSError):  # a list may be longer than a name can be
        is_one = is_one or any((place / text / RESOLVED).is_file() for place in (Path(), output))
    if is_one:
        return [text]
    words = next(csv.reader([text], skipinitialspace=True))
    return [os.path.expanduser(name.strip()) for name in words if name.strip()]  # noqa: PTH111 - as the flag does it


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise MachineError(what, where=str(path), fix="make room, or allow writing there") from error


def compare(args: Namespace) -> int:
    """`compare`: the different settings of two runs and their results, as a table or as JSON."""
    output = Path(load_config(args.config, args.overrides).output_dir if args.config else "outputs")
    runs = []
    for flag, name in (("--a", args.a), ("--b", args.b)):
        if not name:
            raise ConfigError("no run is named", where=flag, fix="make compare RUN_A=name RUN_B=name")
        runs.append(RunFolder(find_folder(output, name, (RESOLVED,), where=flag)))
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
