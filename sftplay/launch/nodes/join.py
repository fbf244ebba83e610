"""The other nodes join the run whose folder node 0 has created, and all wait until every node is ready."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sftplay.errors import MachineError, SftplayError
from sftplay.launch.nodes.compare import check_nodes_match
from sftplay.launch.nodes.rendezvous import Rendezvous
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.follow import NodeLost

SHARED_S = 10.0
"""How long a shared file system may take until a node sees what another has written (NFS caches attributes for 3 s)."""

POLL_S = 0.2

HOST_GRACE_S = 5.0
"""How long node 0's ranks may take to end after a rank on another node has written its error to status.json."""

OTHERS_GRACE_S = 30.0
"""How long another node's ranks may take to end after those of node 0."""


def announce_run(rendezvous: Rendezvous | None, folder: RunFolder) -> None:
    """On node 0: send the run's folder, which is complete now, to the other nodes."""
    if rendezvous is not None:
        rendezvous.gather({"folder": str(folder.path), "resolved": _digest(folder)})


def join_run(rendezvous: Rendezvous) -> tuple[RunFolder, str]:
    """On another node: wait until node 0 has created the run's folder. Its path, and the digest of its resolved config.

    Raises:
        SftplayError: node 0 has ended with this error.
    """
    message = rendezvous.gather({})[0]
    return RunFolder(Path(message["folder"])), message["resolved"]


def await_ready(rendezvous: Rendezvous | None, error: SftplayError | None = None) -> None:
    """Wait until every node is ready to start its processes. An `error` of one node is raised on all."""
    if rendezvous is not None:
        report = {"host": socket.gethostname(), **({"error": error.as_json()} if error else {})}
        check_nodes_match(rendezvous.gather(report))


def watch_nodes(rendezvous: Rendezvous | None, folder: RunFolder) -> Callable[[], None] | None:
    """A function that raises NodeLost when another node has ended before the run's processes here; None for one node.

    After the ranks have met, a rank notices itself that another one is lost, and node 0 may continue alone to save the
    result. Before that, and on other nodes after the end of node 0, nothing else would end the processes soon.
    """
    if rendezvous is None:
        return None
    ended_at: float | None = None

    def check() -> None:
        nonlocal ended_at
        if not (endings := rendezvous.endings()):
            return
        ended_at = ended_at or time.monotonic()
        is_due = time.monotonic() > ended_at + (HOST_GRACE_S if rendezvous.is_host else OTHERS_GRACE_S)
        if is_due and not (rendezvous.is_host and folder.read_json("status.json").get("ranks")):
            what = "; ".join(f"node {node}: {cause}" for node, cause in endings.items())
            raise NodeLost(what, where=str(folder.path), fix="find the reason there, then start all nodes again")

    return check


def check_folder(folder: RunFolder, digest: str) -> None:
    """Raise MachineError if this node does not see node 0's folder, that is, a resolved config with this `digest`."""
    deadline = time.monotonic() + SHARED_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if _digest(folder) == digest:
                return
        time.sleep(POLL_S)
    raise MachineError(
        f"{folder.path.absolute()} is not the folder that node 0 has created",
        where="output_dir",
        fix="give output_dir a folder that all nodes share, as an absolute path",
    )


def _digest(folder: RunFolder) -> str:
    return hashlib.sha256(folder.resolved.read_bytes()).hexdigest()
