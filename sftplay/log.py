"""Rank-aware lines of the kit, and the only reader of the launcher's rank variables.

A worker's lines go to its parent through the original standard output, marked; everything libraries print goes to the
rank's own log file. No logging framework is involved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

LINE = "\x1e"
"""Marks a line the user should see."""

STATUS = "\x1d"
"""Marks a line that replaces the one before it on a terminal and is thinned out elsewhere."""

FOLLOWED = "SFTPLAY_FOLLOWED"
"""Set by the parent for its workers: mark the lines, somebody reads them."""

JSON = "SFTPLAY_JSON"
"""Set by the command line under --json: standard output belongs to one document, lines go to standard error."""

_CONSOLE_FD = 9
"""Where a worker keeps its original standard output after `redirect`; high enough not to be taken by accident."""


def rank() -> int:
    """This process's place among all processes of the run, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's place among those on this node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes of the run; 1 when no launcher set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> range:
    """The ranks of the processes on this node; all of them where no launcher says how many these are."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return range(world_size()) if local is None else range(rank() - local_rank(), rank() - local_rank() + int(local))


def is_main() -> bool:
    """True on the one process that prints and writes."""
    return rank() == 0


def say(message: str, tag: str = "train") -> None:
    """Print `[tag] message`, every line of it, on the main rank only."""
    if is_main():
        _emit(LINE, [f"[{tag}] {line}" if line else "" for line in message.splitlines()])


def show(text: str) -> None:
    """Print text as it is (tables, samples), on the main rank only."""
    if is_main():
        _emit(LINE, text.splitlines())


def show_error(text: str) -> None:
    """Print an error of any rank to the user's screen."""
    _emit(LINE, text.splitlines())


def status(message: str, tag: str = "train") -> None:
    """Print progress: one changing line on a terminal, now and then a line elsewhere."""
    if is_main():
        _emit(STATUS, [f"[{tag}] {message}"])


def redirect(path: Path) -> None:
    """From here on send this process's output, of C libraries too, to the file `path`; our lines keep their way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(1, _CONSOLE_FD, inheritable=False)
    log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    os.environ[FOLLOWED] = "2"


def _emit(mark: str, lines: list[str]) -> None:
    followed = os.environ.get(FOLLOWED)
    if followed == "2":
        os.write(_CONSOLE_FD, "".join(f"{mark}{line}\n" for line in lines).encode())
        if mark == LINE:
            _write(sys.stdout, lines)
        return
    _write(sys.stdout if followed else screen(), [f"{mark if followed else ''}{line}" for line in lines])


def screen() -> TextIO:
    """The stream for what a person reads."""
    return sys.stderr if os.environ.get(JSON) else sys.stdout


def _write(stream: TextIO, lines: list[str]) -> None:
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


def quiet_libraries() -> None:
    """Send the warnings of libraries to the rank's log, all of them, once each."""
    import logging
    import warnings

    logging.captureWarnings(True)
    warnings.simplefilter("default")
