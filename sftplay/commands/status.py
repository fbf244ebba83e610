"""The verb `status`: the runs of an output folder, and their jobs; and --watch, which other verbs take too."""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sftplay import log
from sftplay.errors import ConfigError
from sftplay.runs.status import describe_runs, find_folder, format_run, format_table, list_runs

PAUSE_S = 2.0


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


def refuse_watched_json(args: Namespace) -> None:
    """Raise ConfigError where --json, which is one document, comes with --watch."""
    if args.watch and args.json:
        raise ConfigError("--watch and --json do not go together", where="command line", fix="leave one out")


def watch(args: Namespace, show: Callable[[], None]) -> int:
    """Call `show` once, or with --watch until Ctrl-C or until nobody reads it; return the exit code 0."""
    refuse_watched_json(args)
    if not args.watch:
        show()
        return 0
    with suppress(KeyboardInterrupt):
        while (screen := log.own_screen()) is None or screen.is_read:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[H\x1b[J")  # the cursor goes to the top left corner, the terminal is cleared
            show()
            time.sleep(PAUSE_S)
    return 0
