"""The verb `gpu-check`: every promise of the kit that this machine can show, tried one by one."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.errors import ConfigError, RunError, nearest_names
from sftplay.machine.probe import probe
from sftplay.runs.gpu_check import checks
from sftplay.runs.gpu_check.check import Check
from sftplay.runs.gpu_check.conduct import Row, conduct
from sftplay.runs.gpu_check.table import JSON_FILE, MARKDOWN_FILE, STATES, Table
from sftplay.signals import StopAtOnce, Stopped


def gpu_check(args: Namespace) -> int:
    """`gpu-check`: a row for each check on the screen and in both files; code 5 when one has failed.

    A stop signal ends the check that runs and removes what it has written. The rows so far stay.
    """
    stop = StopAtOnce()
    stop.install()
    try:
        return run_table(args, list(checks.CHECKS), module=checks.__name__)
    except Stopped as signal:
        log.show(f"stopped by {signal}; the rows so far are in {args.out}")
        return 128 + stop.received


def run_table(args: Namespace, table: list[Check], *, module: str) -> int:
    """Run the checks of `table`, the CHECKS of `module`, as far as `--only` names them."""
    chosen = select(table, args.only)
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ConfigError("is a file, and the table needs a folder", where=str(out), fix="name a folder with OUT=")
    found = Table(probe(), out)
    found.save()  # a folder that cannot be written is refused before the first check

    def note(row: Row) -> None:
        found.add(row)
        log.show(f"{STATES[row.state]:<18} {row.name}: {row.figure or row.why} ({row.seconds:.0f} s)")

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        conduct(chosen, Path(scratch), module=module, is_fast=args.fast, note=note)
    if args.json:
        print(json.dumps(found.as_dict(), ensure_ascii=False))
    log.show(found.summary())
    log.show(f"the table: {out / MARKDOWN_FILE}; to attach to a report: {out / JSON_FILE}")
    return RunError.exit_code if found.count("failed") else 0


def select(table: list[Check], only: str) -> list[Check]:
    """The checks whose names contain one of the words in `only`, separated by commas; all where it is empty.

    Raises:
        ConfigError: a word is in no name.
    """
    words = [word.strip() for word in only.split(",") if word.strip()]
    names = [check.name for check in table]
    for word in words:
        if not any(word in name for name in names):
            near = nearest_names(word, names)
            fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"no check is called {word!r}", where="--only", fix=fix, nearest=near)
    return [check for check in table if not words or any(word in check.name for word in words)]
