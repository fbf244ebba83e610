"""How the other nodes join the run whose folder node 0 has made, and how all wait until every node is ready."""

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
"""How long a shared file system may take to show on one node what another has written (NFS keeps attributes 3 s)."""

LOOK_S = 0.2

GOING_S = 5.0
"""How long node 0's ranks may take to end after a rank on another node has written its error to status.json."""

LEAVING_S = 30.0
"""How long another node's ranks may take to end after those of node 0."""


def announce_run(rendezvous: Rendezvous | None, folder: RunFolder) -> None:
    """On node 0: send the run's folder, which is complete now, to the others."""
    if rendezvous is not None:
        rendezvous.gather({"folder": str(folder.path), "resolved": _digest(folder)})


def join_run(rendezvous: Rendezvous) -> tuple[RunFolder, str]:
    """On another node: the run's folder, once node 0 has made it, and the digest that its resolved config has there.

    Raises:
        SftplayError: node 0 has ended with it.
    """
    from_host = rendezvous.gather({})[0]
    return RunFolder(Path(from_host["folder"])), from_host["resolved"]


def await_ready(rendezvous: Rendezvous | None, error: SftplayError | None = None) -> None:
    """Wait until every node is ready to start its processes. An `error` of one node is raised on all."""
    if rendezvous is not None:
        mine = {"host": socket.gethostname(), **({"error": error.as_json()} if error else {})}
        check_nodes_match(rendezvous.gather(mine))


def watch_nodes(rendezvous: Rendezvous | None, folder: RunFolder) -> Callable[[], None] | None:
    """A function that raises NodeLost when another node has ended while the run's processes run; None for one node.

    Once the ranks have met, a rank that loses another one notices by itself, and node 0 may go on alone to save the
    result. Before that, and on other nodes after node 0 has ended, nothing else would end the processes for long.
    """
    if rendezvous is None:
        return None
    ended_at = [0.0]

    def look() -> None:
        if not (endings := rendezvous.endings()):
            return
        ended_at[0] = ended_at[0] or time.monotonic()
        is_due = time.monotonic() > ended_at[0] + (GOING_S if rendezvous.is_host else LEAVING_S)
        if is_due and not (rendezvous.is_host and folder.read_json("status.json").get("ranks")):
            what = "; ".join(f"node {node}: {how}" for node, how in endings.items())
            raise NodeLost(what, where=str(folder.path), fix="look there for why, then start all nodes again")

    return look


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
