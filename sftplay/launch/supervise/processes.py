"""Processes of this node as the kernel shows them: from whom one descends, whether it lives, which rank it was
started as; and the end of a whole launch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

ENDING_S = 5.0
"""How long a killed process may take to disappear; one that waits inside the kernel takes for ever."""


def parent_of(pid: int) -> int:
    """The pid of a process's parent, 0 when there is no such process."""
    return int(_read_stat(pid, 1, column="ppid=") or 0)


def descends_from(pid: int, ancestor: int) -> bool:
    """True for a process itself, its children, theirs, and so on; false where one between them has ended."""
    while pid > 1 and pid != ancestor:
        pid = parent_of(pid)
    return pid == ancestor


def state_of(pid: int) -> str:
    """The letter that `ps` shows (R running, S sleeping, D in the kernel, T stopped); empty when it has ended, also
    where its parent has not asked for its code yet."""
    return _read_stat(pid, 0, column="stat=")[:1].replace("Z", "")


def _read_stat(pid: int, place: int, *, column: str) -> str:
    """One field behind the command's name in /proc/PID/stat (proc(5)), or where there is none the column of `ps`."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[place]
    except OSError:
        if Path("/proc/self").exists():
            return ""
    done = subprocess.run(["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def rank_of(pid: int) -> int | None:
    """The rank a process was started as, 0 without a launcher of ranks; None where the system does not tell."""
    try:
        settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(each[5:]) for each in settings if each.startswith(b"RANK=")), 0)


def children_of(pid: int) -> list[int]:
    """The pids of the processes whose parent it is."""
    if Path("/proc/self").exists():
        return [int(each.name) for each in Path("/proc").glob("[0-9]*") if parent_of(int(each.name)) == pid]
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in done.stdout.split()]


def end_launch(launcher: int) -> list[int]:
    """Kill a launcher, all that descends from it, and the process groups they lead; the pids that live on after
    `ENDING_S`."""
    pids = [launcher]
    for pid in pids:  # grows behind the one that is looked at
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # it starts none any more, and while it asks after none no pid is reused
        pids += children_of(pid)
    for pid in reversed(pids):
        with suppress(ProcessLookupError):
            kill = os.killpg if os.getpgid(pid) == pid else os.kill
            kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDING_S
    while any(map(state_of, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if state_of(pid)]
