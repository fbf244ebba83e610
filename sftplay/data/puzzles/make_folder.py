"""Make the folder of both splits: it appears whole or not at all."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sftplay.atomic import check_new_file, locked, unfinished_folder, whole_folder
from sftplay.data.puzzles.folder import PuzzleFolder, write_folder
from sftplay.data.puzzles.make_checks import PuzzleSettings
from sftplay.data.puzzles.make_rows import write_rows
from sftplay.data.puzzles.make_tasks import write_tasks
from sftplay.data.puzzles.small_sudokus import ALPHABET, make_groups
from sftplay.errors import ConfigError, DataError


def make_folder(settings: PuzzleSettings) -> dict[str, Any]:
    """Write `settings.out` with both splits and a report; return the report.
    Raise ConfigError where the folder is there already, or another command is writing it; DataError, without a folder,
    where the puzzles cannot be used.
    """
    _check_source(settings)
    check_new_file(settings.out)
    lock = unfinished_folder(settings.out).with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(lock, waits=False), ExitStack() as at_end:
            at_end.callback(lock.unlink, missing_ok=True)
            check_new_file(settings.out)  # another command may have made it meanwhile
            with whole_folder(settings.out) as folder:
                return _write(settings, folder)
    except BlockingIOError:
        fix = "wait for it, or choose another folder with OUT="
        raise ConfigError("another command is writing it", where=str(settings.out), fix=fix) from None


def _check_source(settings: PuzzleSettings) -> None:
    if settings.kind == "sudoku4" and settings.source is not None:
        raise ConfigError("is not read for sudoku4", where="--in", fix="leave it out; sudoku4 is made here")
    if settings.kind == "sudoku4" and (settings.copies is not None or settings.subsample is not None):
        name = "--aug" if settings.copies is not None else "--subsample"
        raise ConfigError("does not fit sudoku4: its puzzles and copies are fixed", where=name, fix="leave it out")
    if settings.kind != "sudoku4" and settings.source is None:
        what = f"{settings.kind} puzzles are read from files"
        raise ConfigError(what, where="--in", fix="name a file or a folder with IN=")
    if settings.source is not None and not settings.source.exists():
        raise DataError("no such file or folder", where=str(settings.source), fix="correct IN=")


def _write(settings: PuzzleSettings, folder: Path) -> dict[str, Any]:
    if settings.kind == "arc":
        more = write_tasks(settings, folder)
    elif settings.kind == "sudoku4":
        more = {}
        for split, groups in make_groups(settings.seed).items():
            (folder / split).mkdir()
            write_folder(folder / split, groups, alphabet=ALPHABET)
    else:
        more = write_rows(settings, folder)
    source = None if settings.source is None else str(settings.source)
    report = {"kind": settings.kind, "source": source, "seed": settings.seed, **more}
    for split in ("train", "test"):
        written = PuzzleFolder.open(folder / split)  # the files are read back
        n_puzzles = sum(len(puzzle_set.puzzle_identifiers) for puzzle_set in written.sets)
        identifiers = written.facts.num_puzzle_identifiers
        counts = {"groups": written.facts.total_groups, "puzzles": n_puzzles, "examples": len(written)}
        report[split] = {**counts, "identifiers": identifiers}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report
