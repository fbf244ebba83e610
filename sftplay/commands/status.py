"""The verb `status`: the runs of this machine's output folder, and their jobs where they have some."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.commands.watch import watch
from sftplay.runs.status import describe_runs, find_folder, format_run, format_table, list_runs


def status(args: Namespace) -> int:
    """`status`: how far every run is, the latest first; of one run with RUN= more; with --watch until Ctrl-C."""
    output = Path("outputs")
    if args.config:
        from sftplay.config.load import load_config

        output = Path(load_config(args.config, args.overrides).output_dir)

    def show() -> None:
        runs = describe_runs([find_folder(output, args.run)] if args.run else list_runs(output))
        if args.json:
            print(json.dumps(runs[0] if args.run else runs, ensure_ascii=False))
            return
        lines = format_run(runs[0]) if args.run else format_table(runs) if runs else [f"no run in {output}"]
        height = shutil.get_terminal_size().lines - 2
        if args.watch and sys.stdout.isatty() and len(lines) > height:  # else the latest runs would leave the screen
            lines = [*lines[: height - 1], "older runs do not fit the screen"]
        for line in lines:
            log.show(line)

    return watch(args, show)
