"""The kit's lines for the user, and the only reader of the launcher's rank variables.

A worker marks its lines and sends them to its parent through the original standard output. The output of libraries goes
to the rank's own log file. No logging framework is involved.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from sftplay.terminal import Console, Progress, Screen, has_colours, is_terminal

LINE = "\x1e"
"""Marks a line the user should see."""

STATUS = "\x1d"
"""Marks a line that replaces the line before it on a terminal. Elsewhere only some of these lines are printed."""

PROGRESS = "\x1c"
"""Marks the figures of a live line, as JSON."""

FOLLOWED = "SFTPLAY_FOLLOWED"
"""The parent sets it for its workers, because it reads their lines: they must mark them."""

REDIRECTED = "2"
"""Its value in a process whose other output goes to a log file."""


JSON = "SFTPLAY_JSON"
"""The command line sets it for --json: standard output carries one document only, lines go to standard error."""

_CONSOLE_FD = 9
"""A worker's original standard output after `redirect`. The number is high, so that nothing else uses it."""


CLUSTER_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "FORK_LAUNCHED", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
CLUSTER_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "TORCHELASTIC_")
"""Variables by which launchers number processes and choose strategies (accelerate 1.15, `state.py` and `utils/`; torch
2.13, `distributed/elastic`). MASTER_ADDR, MASTER_PORT and NODE_RANK are not among them: make exports what was typed."""

HARMLESS = ("ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE", "ACCELERATE_DISABLE_RICH", "ACCELERATE_ENABLE_RICH")


def clear_cluster_variables() -> list[str]:
    """Remove the variables of other launches from this process's environment; their names, in order.

    With them a single process would believe to be one of many, and wait for the others, or shard the model.
    """
    names = [
        name
        for name in sorted(os.environ)
        if name in CLUSTER_NAMES or (name.startswith(CLUSTER_PREFIXES) and name not in HARMLESS)
    ]
    for name in names:
        del os.environ[name]
    return names


def rank() -> int:
    """This process's number among all processes of the run, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's number among those on this node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes of the run; 1 when no launcher set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> range:
    """The ranks of the processes on this node; all ranks where no launcher set their number."""
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
    """Say what is being done: one changing line on a terminal, elsewhere now and then a line."""
    if is_main():
        _emit(STATUS, [f"[{tag}] {message}"])


def progress(done: int, total: int | None, *, what: str, text: str = "", tag: str = "train") -> None:
    """Show how far the work is: a live line with bar and clock on a terminal, elsewhere now and then a line."""
    if is_main():
        _emit(PROGRESS, [json.dumps({"tag": tag, "what": what, "done": done, "total": total, "text": text})])


def redirect(path: Path) -> None:
    """Send this process's output, that of C libraries too, to the file `path`. The kit's lines still reach the user."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(1, _CONSOLE_FD, inheritable=False)
    log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    os.environ[FOLLOWED] = REDIRECTED


def _emit(mark: str, lines: list[str]) -> None:
    followed = os.environ.get(FOLLOWED)
    if followed == REDIRECTED:
        os.write(_CONSOLE_FD, "".join(f"{mark}{line}\n" for line in lines).encode())
        if mark == LINE:
            _write(sys.stdout, lines)
    elif followed:
        _write(sys.stdout, [f"{mark}{line}" for line in lines])
    else:
        console = _own_console()
        for line in lines:
            # Whoever reads a pipe of a short verb sees every stage of it.
            show_marked(f"{mark if console.is_tty or mark == PROGRESS else LINE}{line}", console=console)
        if not console.is_tty:
            console.tick(time.monotonic())


def show_marked(text: str, *, console: Console) -> bool:
    """Show a marked line; False for a line without a mark."""
    mark, text = text[:1], text[1:]
    if mark == LINE:
        console.line(text)
    elif mark == STATUS:
        console.status(text)
    elif mark == PROGRESS:
        console.progress(Progress(**json.loads(text)))
    else:
        return False
    return True


def new_console() -> Console:
    """The user's screen, for a process that writes to it."""
    return Console(Screen(screen), is_tty=is_terminal(screen()), has_colours=has_colours(screen()))


def close_live_line() -> None:
    """Clear the live line of this process, if there is one, before something else writes to the terminal."""
    for _, console in _OWN:
        console.close()


_OWN: list[tuple[TextIO, Console]] = []
"""This process's own console and the stream it writes to, once it was used."""


def _own_console() -> Console:
    stream = screen()
    if not _OWN or _OWN[0][0] is not stream:
        if not _OWN:
            atexit.register(close_live_line)
        _OWN[:] = [(stream, new_console())]
    return _OWN[0][1]


def own_screen() -> Screen | None:
    """What this process's lines were written to; None before the first line."""
    written = _OWN[0][1].write if _OWN else None
    return written if isinstance(written, Screen) else None


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
