"""Processes of this node as the kernel shows them: ancestors, state, the rank of a process. It also ends a launch."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

ENDING_S = 5.0
"""How long a killed process may take to disappear. A process that waits inside the kernel may never do so."""


def parent_of(pid: int) -> int:
    """The pid of a process's parent, 0 when there is no such process."""
    return int(_read_stat(pid, 1, column="ppid=") or 0)


def descends_from(pid: int, ancestor: int) -> bool:
    """True for the process itself, its children, their children and so on. False when one between them has ended."""
    while pid > 1 and pid != ancestor:
        pid = parent_of(pid)
    return pid == ancestor


def state_of(pid: int) -> str:
    """The letter that `ps` shows: R running, S sleeping, D in the kernel, T stopped. Empty when the process has ended,
    even if its parent has not read its exit code yet."""
    return _read_stat(pid, 0, column="stat=")[:1].replace("Z", "")


def _read_stat(pid: int, place: int, *, column: str) -> str:
    """A field after the command's name in /proc/PID/stat (proc(5)). Without /proc, the column of `ps`."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[place]
    except OSError:
        if Path("/proc/self").exists():
            return ""
    done = subprocess.run(["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def rank_of(pid: int) -> int | None:
    """The rank in a process's environment, 0 if there is none. None when the system does not show the environment."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in environ if entry.startswith(b"RANK=")), 0)


def children_of(pid: int) -> list[int]:
    """The pids of a process's children."""
    if Path("/proc/self").exists():
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [child for child in pids if parent_of(child) == pid]
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in done.stdout.split()]


def end_launch(launcher: int) -> list[int]:
    """Kill a launcher, all its descendants and the process groups that these lead.

    Returns the pids that are still alive after `ENDING_S`.
    """
    pids = [launcher]
    for pid in pids:  # the loop extends the list
        with suppress(ProcessLookupError):
            # A stopped process starts no more children. It reads no exit codes, so its children's pids are not reused.
            os.kill(pid, signal.SIGSTOP)
        pids += children_of(pid)
    for pid in reversed(pids):
        with suppress(ProcessLookupError):
            kill = os.killpg if os.getpgid(pid) == pid else os.kill
            kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDING_S
    while any(map(state_of, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if state_of(pid)]
