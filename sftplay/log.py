"""The kit's lines for the user: the terminal and its live line, marked lines of workers, the launcher's rank variables.

A worker marks its lines and sends them to its parent through the original standard output. The output of libraries goes
to the rank's own log file. No logging framework is involved.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

YELLOW, RED, PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""What a write says where nothing can be written: a full disk, a device that is none."""


def is_terminal(stream: TextIO) -> bool:
    """True where a line can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """True on a terminal that nobody asked to leave plain (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def painted(text: str, colour: str, *, stream: TextIO) -> str:
    """The text in a colour where the stream shows colours."""
    return f"{colour}{text}{PLAIN}" if has_colours(stream) else text


def open_closed() -> None:
    """Put the null device where a stream is closed: Python has None there, and the next file would get its number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def drop(fd: int) -> None:
    """Send what is still to be written to a stream into nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


SIGN_OF_LIFE_S = 9.0
"""Longest time without output in a file or a pipe. After ten seconds users think that the run hangs."""

CLEAR = "\r\x1b[K"

WARNING = re.compile(r"(\[[\w-]+\] )?(note|warning|out of memory|restart \d+)\b")
"""How a line begins that the user should not overlook."""

NARROWEST, WITH_BAR, WIDEST = 40, 109, 140  # columns of the live line; from how many on it has a bar


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a piece of work is: `what` is counted (`step`, `rows`), `total` is None where nobody knows it yet."""

    tag: str
    what: str
    done: int
    total: int | None = None
    text: str = ""
    """More figures."""


class Screen:
    """Writes for the user until nobody reads the screen any more. The run goes on without it."""

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self.is_read, self._stream = True, stream
        self.failure: OSError | None = None
        """Why nothing can be written, where it is not that the reader has gone."""

    def __call__(self, text: str) -> None:
        if not self.is_read:
            return
        stream = self._stream()
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:  # BrokenPipeError behind `head`, EIO when the terminal was closed
            self.is_read = False
            self.failure = None if isinstance(error, BrokenPipeError) else error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Console:
    """Lines, and progress: one live line on a terminal, elsewhere a new line from time to time."""

    def __init__(self, write: Callable[[str], Any], *, is_tty: bool, has_colours: bool = False) -> None:
        self.write, self.is_tty, self.has_colours = write, is_tty, has_colours
        self._written_at = self._since = time.monotonic()
        self._pending, self._on_line = "", False
        self._status = ""
        self._progress: Progress | None = None
        self._began: tuple[str, float, int] = ("", 0.0, 0)

    def line(self, text: str) -> None:
        """A line that stays; the live line goes on below it."""
        if self.has_colours and WARNING.match(text):
            text = f"{YELLOW}{text}{PLAIN}"
        self.write((CLEAR if self._on_line else "") + text + "\n")
        self._written_at = self._since = time.monotonic()
        self._pending, self._on_line, self._status = "", False, ""
        if self._progress and self.is_tty:
            self._draw()

    def status(self, text: str) -> None:
        """What is being done, until the next line."""
        self._pending, self._progress, self._status, self._since = text, None, text, time.monotonic()
        self._draw()

    def progress(self, progress: Progress) -> None:
        """How far the work is. A count that is not the one before begins anew."""
        now, (what, _, done) = time.monotonic(), self._began
        if what != f"{progress.tag} {progress.what}" or progress.done < done:
            self._began = (f"{progress.tag} {progress.what}", now, progress.done)
        self._progress, self._pending = progress, self._as_text(progress, now)
        self._draw()
        if progress.done == progress.total:
            self._progress = None

    def close(self) -> None:
        """Clear the live line."""
        self._progress, self._status = None, ""
        if self._on_line:
            self.write(CLEAR)
            self._on_line = False

    def tick(self, now: float) -> None:
        """Let the live line's clock go on; elsewhere end a long time without output by the newest progress."""
        if self.is_tty:
            if self._progress or now - self._since >= 1:
                self._draw()
        elif now - self._written_at >= SIGN_OF_LIFE_S:
            status, since = self._status, self._since
            self.line(self._pending or f"{status or '[train] working'} ({now - since:.0f} s)")
            self._status, self._since = status, since

    def _draw(self) -> None:
        if not self.is_tty:
            return
        now = time.monotonic()
        quiet_s = now - self._since
        text = self._status or "[train] working"
        if progress := self._progress:
            from tqdm import tqdm

            _, began, first = self._began
            figures = f"  {progress.text}".rstrip().replace("{", "(").replace("}", ")")
            width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns - 1))
            if not progress.total:
                bar = f"{{desc}} {{n_fmt}}{figures}  {{elapsed}}"
            elif width >= WITH_BAR:
                bar = f"{{desc}} {{n_fmt}}/{{total_fmt}} {{bar:24}}{figures}  {{elapsed}}<{{remaining}}"
            else:  # what is cut off at the end is the speed, not the time that is left
                bar = f"{{desc}} {{n_fmt}}/{{total_fmt}}  {{elapsed}}<{{remaining}}{figures}"
            text = tqdm.format_meter(
                progress.done, progress.total, now - began, initial=first, ncols=width, bar_format=bar,
                prefix=f"[{progress.tag}] {progress.what}",
            ).rstrip()[:width]  # fmt: skip
        elif quiet_s >= 1:
            text += f" ({quiet_s:.0f} s)"
        self.write(CLEAR + text)
        self._on_line = True

    def _as_text(self, progress: Progress, now: float) -> str:
        _, began, first = self._began
        of = f"/{progress.total}" if progress.total else ""
        parts = [f"[{progress.tag}] {progress.what} {progress.done}{of}", *([progress.text] if progress.text else [])]
        fresh = progress.done - first
        if progress.total and fresh > 0:
            from tqdm import tqdm

            left = (now - began) / fresh * (progress.total - progress.done)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        return "  ".join(parts)


LINE, STATUS, PROGRESS = "\x1e", "\x1d", "\x1c"
"""Marks of a line that the user should see, of one that replaces the line before it on a terminal (elsewhere only some
of them are printed), and of the figures of a live line, as JSON."""

FOLLOWED, REDIRECTED = "SFTPLAY_FOLLOWED", "2"
"""The parent sets the variable for its workers, because it reads their lines: they must mark them. The other is its
value in a process whose other output goes to a log file."""

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
    names = [name for name in sorted(os.environ) if name in CLUSTER_NAMES or name.startswith(CLUSTER_PREFIXES)]
    names = [name for name in names if name not in HARMLESS]
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
        stream = screen()
        if not _OWN or _OWN[0][0] is not stream:
            if not _OWN:
                atexit.register(close_live_line)
            _OWN[:] = [(stream, new_console())]
        console = _OWN[0][1]
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


_OWN: list[tuple[TextIO, Console]] = []  # this process's own console and the stream it writes to, once it was used


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
