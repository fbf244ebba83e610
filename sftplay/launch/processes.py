"""Processes of a run: found, ended, asked for their stacks; and of what one died."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from sftplay.errors import RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.signals import STOP_SIGNALS, popen_tied

ENDING_S = 5.0
"""How long a killed process may take to disappear. A process that waits inside the kernel may never do so."""


def find_parent(pid: int) -> int:
    """The pid of a process's parent, 0 when there is no such process."""
    return int(_read_stat(pid, 1, column="ppid=") or 0)


def descends_from(pid: int, ancestor: int) -> bool:
    """True for the process itself, its children, their children and so on. False when one between them has ended."""
    while pid > 1 and pid != ancestor:
        pid = find_parent(pid)
    return pid == ancestor


def read_state(pid: int) -> str:
    """The letter that `ps` shows: R running, S sleeping, D in the kernel, T stopped. Empty when the process has ended,
    even if its parent has not read its exit code yet."""
    return _read_stat(pid, 0, column="stat=")[:1].replace("Z", "")


def _read_stat(pid: int, place: int, *, column: str) -> str:
    """A field after the command's name in /proc/PID/stat (proc(5)). Without /proc, the column of `ps`."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    if Path("/proc/self").exists():
        return ""
    done = subprocess.run(["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def read_rank(pid: int) -> int | None:
    """The rank in a process's environment, 0 if there is none. None when the system does not show the environment."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in environ if entry.startswith(b"RANK=")), 0)


def list_children(pid: int) -> list[int]:
    """The pids of a process's children."""
    if Path("/proc/self").exists():
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [child for child in pids if find_parent(child) == pid]
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in done.stdout.split()]


def end_launch(launcher: int) -> list[int]:
    """Kill a launcher, its descendants and the groups that they lead; the pids alive after `ENDING_S`."""
    pids = [launcher]
    for pid in pids:  # the loop extends the list
        with suppress(ProcessLookupError):
            # A stopped process starts no more children. It reads no exit codes, so its children's pids are not reused.
            os.kill(pid, signal.SIGSTOP)
        pids += list_children(pid)
    for pid in reversed(pids):
        with suppress(ProcessLookupError):
            kill = os.killpg if os.getpgid(pid) == pid else os.kill
            kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDING_S
    while any(map(read_state, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if read_state(pid)]


def run_with_limit(argv: Sequence[str], *, env: Mapping[str, str], output: Path, limit_s: float) -> int | None:
    """Run a command to its end and return its exit code; after `limit_s` seconds end all its processes, return None."""
    with output.open("wb") as handle:
        process = popen_tied(argv, output=handle, env=env)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # where it has died, the kernel ends what it had started
                end_launch(process.pid)
                process.wait()


STACKS_SIGNAL = signal.SIGUSR2

ANSWER_S = 2.0  # How long an answer may take. A process that is stopped or waits inside the kernel does not answer.

COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""Every collective that Python code starts goes through this file of torch."""

NATIVE_COLLECTIVES = ("torch/nn/parallel/distributed.py", "torch/distributed/utils.py", "torch/autograd/graph.py")
"""DDP starts collectives in native code from these files: buffers before the forward pass, gradients inside the
backward pass. A rank whose innermost call is in one of them may wait in a collective or may compute."""

_FRAME = re.compile(r'  File "(.*)", line \S+ in .*')


@dataclass(frozen=True)
class Stack:
    """The stack of a process's main thread."""

    lines: tuple[str, ...] = ()
    """Innermost call first, as `faulthandler` writes them. Empty: there was no answer."""

    @property
    def is_in_collective(self) -> bool:
        return any(file.endswith(COLLECTIVES) for file in self._files())

    @property
    def may_be_in_collective(self) -> bool:
        return any(file.endswith(NATIVE_COLLECTIVES) for file in self._files()[:1])

    def _files(self) -> list[str]:
        return [match[1] for line in self.lines if (match := _FRAME.fullmatch(line))]


def stacks_path(logs: Path, rank: int) -> Path:
    """Where rank `rank` writes its stacks; `logs` is the run's folder of logs."""
    return logs / f"rank{rank}.stacks"


def answer_with_stacks(logs: Path, rank: int) -> None:
    """Make this process answer `STACKS_SIGNAL` with the stacks of all its threads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    faulthandler.register(STACKS_SIGNAL, file=os.open(stacks_path(logs, rank), flags, 0o644), all_threads=True)


def ask_for_stacks(logs: Path, pids: Mapping[int, int]) -> dict[int, Stack]:
    """Rank -> the present stack of its main thread. `pids` are the processes of the ranks. Takes at most `ANSWER_S`."""
    files = {rank: stacks_path(logs, rank) for rank in pids}
    old_sizes = {rank: path.stat().st_size for rank, path in files.items() if path.exists()}
    for rank in old_sizes:  # a rank without its file does not handle the signal yet, and would die of it
        with suppress(ProcessLookupError):
            os.kill(pids[rank], STACKS_SIGNAL)
    deadline, previous = time.monotonic() + ANSWER_S, dict[int, int]()
    while time.monotonic() < deadline:
        sizes = {rank: files[rank].stat().st_size for rank in old_sizes}
        if sizes == previous and all(sizes[rank] > size for rank, size in old_sizes.items()):
            break
        previous = sizes
        # A file that has grown and then stays the same for this long is complete: writing it takes a millisecond.
        time.sleep(0.1)
    stacks = dict.fromkeys(pids, Stack())
    for rank, size in old_sizes.items():
        stacks[rank] = main_stack(files[rank].read_bytes()[size:].decode("utf-8", "replace"))
    return stacks


def main_stack(text: str) -> Stack:
    """The main thread's part of one answer. It is the last part: threads are listed from the newest to the oldest.

    Source: _Py_DumpTracebackThreads in CPython's Python/traceback.c. After a hundred threads it writes "..." and leaves
    the others out. Then the main thread's stack is not known.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            lines.append(line)
        elif line:
            lines = []
    return Stack(tuple(lines))


REPORTED_CODES = (0, 1, 2, 3, 4, 5, *(128 + number for number in STOP_SIGNALS))
"""Exit codes of a worker that has reported why it ends, in status.json or by a traceback."""

ROOT_CAUSE = "Root Cause"
RANK_LINE = re.compile(r"\s*rank\s*: (\d+) \(local_rank: \d+\)")
CODE_LINE = re.compile(r"\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
"""Lines in torchrun's list of failed ranks. The rank that failed first comes last, under the title `ROOT_CAUSE`
(torch/distributed/elastic/multiprocessing/errors/__init__.py). Without the list a death is noticed with less detail."""

LOST = "rank {rank} (pid {pid}) died"
LOST_LINE = re.compile(r"rank \d+ \(pid (\d+)\) died")  # what a rank says that has lost another one of its node
DEEPSPEED_LINE = re.compile(r"\[ERROR\] \[launch\.py:.*\] exits with return code = (-?\d+)$")
"""DeepSpeed's launcher writes it for the first process that failed. It does not name the rank (launcher/launch.py)."""


class Death(RunError):
    """A process of the run has ended and has not reported why."""

    code = "death"


def find_death(lines: Iterable[str], *, said: str = "") -> str:
    """Which rank died first and of what, from the launcher's `lines`; empty when that rank reported why it ended.

    Only the first one counts: torchrun ends all others, at last with SIGKILL, and lists them too. Where `said`, the
    reason that a rank recorded, is the loss of another one, that one died first, whichever torchrun noticed first.
    """
    lines = list(lines)
    if lost := LOST_LINE.fullmatch(said):
        causes = [cause for pid, cause in _listed_deaths(lines) if pid == lost[1]]
        if any(causes):
            return causes[0]
    if first := next(_listed_deaths(dropwhile(lambda line: not line.startswith(ROOT_CAUSE), lines)), None):
        return first[1]
    codes = [int(match[1]) for line in lines if (match := DEEPSPEED_LINE.search(line))]
    cause = describe_code(codes[0]) if codes else ""
    return f"a rank {cause}" if cause else ""


def _listed_deaths(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The pid and the death of each rank of torchrun's list; the death is empty for one that reported why it ended."""
    rank = ""
    for line in lines:
        if match := RANK_LINE.match(line):
            rank = match[1]
        elif rank and (match := CODE_LINE.match(line)):
            cause = describe_code(int(match[1]))
            yield match[2], f"rank {rank} {cause}" if cause else ""


def describe_code(code: int) -> str:
    """How a process with this exit code died (negative: by a signal); empty when it reported why it ended."""
    if code in REPORTED_CODES or -code in STOP_SIGNALS:
        return ""
    return f"ended with code {code} and no message" if code > 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """SIGKILL for 9. Real-time signals have only a number."""
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def follows_from_death(status: Mapping[str, Any]) -> bool:
    """True when the end in status.json may be that of a rank which only lost another rank: a library fails in it, or
    torchrun stops it. An error class of our own is the run's error, even if another rank died at the same time.
    """
    error = status.get("error") or {"code": Death.code}
    return bool(status.get("exit_code") != 0 and error.get("code") == Death.code)


def cause_of_death(folder: RunFolder) -> str:
    """The death that ended the run's last launch; empty when it ended in another way."""
    error = folder.read_json("status.json").get("error") or {}
    return str(error["what"]) if error.get("code") == Death.code else ""
