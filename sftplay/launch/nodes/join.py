"""Nodes of a run compare themselves before anything starts."""

from __future__ import annotations

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.errors import ConfigError, DataError, MachineError, SftplayError, error_from_json
from sftplay.launch.nodes.rendezvous import Rendezvous
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.follow import NodeLost

SHOWN = 12  # how many differences an error lists
MISSING = "missing"

FIXES = {
    "config": "give every node the same config file, command line and NNODES, NPROC",
    "data": "give every node the same files, or one folder that all share",
    "machine": "make the nodes alike (`make install` by the same requirements.lock, the same commit of the kit)",
}
SECTIONS = {"launch": "config", "config": "config", "files": "data", "versions": "machine", "gpus": "machine"}
"""Part of a report -> the kind of error for a difference in it. The error text has this order."""


def find_differences(reports: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    """Node, kind of error and description of every value that differs from the most frequent one.

    If no value is the most frequent, that of node 0 counts. `reports` are in the order of the nodes. Each has `host`
    and, for each of SECTIONS, a mapping of names to values. A node that could not read its config has not all sections.
    A missing section is compared among the other nodes.
    """
    differences = []
    for section, kind in SECTIONS.items():
        parts = {node: report[section] for node, report in enumerate(reports) if section in report}
        for name in sorted({name for part in parts.values() for name in part}):
            values = {node: str(part.get(name, MISSING)) for node, part in parts.items()}
            counts = Counter(values.values())
            usual = max(counts, key=lambda value: (counts[value], value == values[min(values)]))
            usual_nodes = [node for node in values if values[node] == usual]
            others = f"node {usual_nodes[0]}" if len(usual_nodes) == 1 else f"nodes {', '.join(map(str, usual_nodes))}"
            for node, value in values.items():
                what = f"{name} is {value}, on {others} it is {usual}"
                if section == "files":
                    what = f"the path in {name} {_compare_files(value, usual, others=others)}"
                differences += [(node, kind, what)] if value != usual else []
    return differences


def _compare_files(value: str, usual: str, *, others: str) -> str:
    if MISSING not in (value, usual):
        return f"has other content than on {others}"
    here, there = ("is missing", "exists") if value == MISSING else ("exists", "is missing")
    return f"{here}, on {others} it {there}"


def check_nodes_match(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error, the same on every node, that names every node that differs or reports an error."""
    names = [f"node {node} ({report['host']})" for node, report in enumerate(reports)]
    errors = {node: error_from_json(report["error"]) for node, report in enumerate(reports) if report.get("error")}
    if errors:
        first = next(iter(errors.values()))
        problems = [
            f"{names[node]}: {error.where + ': ' if error.where else ''}{error.what}" for node, error in errors.items()
        ]
        raise type(first)("; ".join(problems), where="nodes", fix=first.fix)
    if differences := find_differences(reports):
        lines = [f"{names[node]}: {what}" for node, _, what in differences]
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        kinds = list(dict.fromkeys(kind for _, kind, _ in differences))
        error_class: type[SftplayError] = {"config": ConfigError, "data": DataError}.get(kinds[0], MachineError)
        raise error_class("; ".join(lines[:SHOWN]) + more, where="nodes", fix="; ".join(FIXES[kind] for kind in kinds))


SHARED_S = 10.0
"""How long a shared file system may take until a node sees what another has written (NFS caches attributes for 3 s)."""

POLL_S = 0.2

HOST_GRACE_S = 5.0
"""How long node 0's ranks may take to end after a rank on another node has written its error to status.json."""

OTHERS_GRACE_S = 30.0  # how long another node's ranks may take to end after those of node 0


def announce_run(rendezvous: Rendezvous, folder: RunFolder) -> None:
    """On node 0: send the run's folder, which is complete now, to the other nodes."""
    rendezvous.gather({"folder": str(folder.path), "resolved": _hash_config(folder)})


def join_run(rendezvous: Rendezvous) -> tuple[RunFolder, str]:
    """On another node: wait for the run's folder. It, and the digest of its config; or raise node 0's error."""
    message = rendezvous.gather({})[0]
    return RunFolder(Path(message["folder"])), message["resolved"]


def await_ready(rendezvous: Rendezvous, error: SftplayError | None = None) -> None:
    """Wait until every node is ready to start its processes. An `error` of one node is raised on all."""
    report = {"host": socket.gethostname(), **({"error": error.as_json()} if error else {})}
    check_nodes_match(rendezvous.gather(report))


def watch_nodes(rendezvous: Rendezvous, folder: RunFolder) -> Callable[[], None]:
    """A function that raises NodeLost when another node has ended before the run's processes here.

    After the ranks have met, a rank notices itself that another one is lost, and node 0 may continue alone to save the
    result. Before that, and on other nodes after the end of node 0, nothing else would end the processes soon.
    """
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
            if _hash_config(folder) == digest:
                return
        time.sleep(POLL_S)
    what = f"{folder.path.absolute()} is not the folder that node 0 has created"
    fix = "give output_dir a folder that all nodes share, as an absolute path"
    raise MachineError(what, where="output_dir", fix=fix)


def _hash_config(folder: RunFolder) -> str:
    return hashlib.sha256(folder.resolved.read_bytes()).hexdigest()
