"""How node 0 lets the other nodes join the folder of a run that it has made, and waits until they are ready."""

from __future__ import annotations

import hashlib
import socket
import time
from contextlib import suppress
from pathlib import Path

from sftplay.errors import MachineError, SftplayError
from sftplay.launch.alike import check_alike
from sftplay.launch.folder import RunFolder
from sftplay.launch.meeting import Meeting

SHARED_S = 10.0
"""How long a shared file system may take to show on one node what another has written (NFS keeps attributes 3 s)."""

LOOK_S = 0.2


def invite(meeting: Meeting | None, folder: RunFolder) -> None:
    """On node 0: tell the others of the run's folder, which is complete now."""
    if meeting is not None:
        meeting.gather({"folder": str(folder.path), "resolved": _digest(folder)})


def accept(meeting: Meeting) -> tuple[RunFolder, str]:
    """On another node: wait for the run's folder; also the digest of its resolved config on node 0.

    Raises:
        SftplayError: node 0 has ended with it.
    """
    told = meeting.gather({})[0]
    return RunFolder(Path(told["folder"])), told["resolved"]


def await_ready(meeting: Meeting | None, error: SftplayError | None = None) -> None:
    """Wait until every node is ready to start its processes, or has met an `error`, which all raise then."""
    if meeting is not None:
        mine = {"host": socket.gethostname(), **({"error": error.as_json()} if error else {})}
        check_alike(meeting.gather(mine))


def check_folder(folder: RunFolder, digest: str) -> None:
    """Raise MachineError where this node does not see the folder of node 0, by its resolved config's `digest`."""
    deadline = time.monotonic() + SHARED_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if _digest(folder) == digest:
                return
        time.sleep(LOOK_S)
    raise MachineError(
        f"{folder.path.absolute()} is not the folder that node 0 has made",
        where="output_dir",
        fix="give output_dir a folder that all nodes share, as an absolute path",
    )


def _digest(folder: RunFolder) -> str:
    return hashlib.sha256(folder.resolved.read_bytes()).hexdigest()
