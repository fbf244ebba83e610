"""Compares the reports of a run's nodes: which values differ, and on which node. `runs/nodes.py` collects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftplay.errors import ConfigError, DataError, MachineError, SftplayError, error_from_json

SHOWN = 12
"""How many differences an error lists."""

MISSING = "missing"

FIXES = {
    "config": "give every node the same config file, command line and NNODES, NPROC",
    "data": "give every node the same files, or one folder that all share",
    "machine": "make the nodes alike (`make install` by the same requirements.lock, the same commit of the kit)",
}
SECTIONS = {"launch": "config", "config": "config", "files": "data", "versions": "machine", "gpus": "machine"}
"""Part of a report -> the kind of error for a difference in it. The error text has this order."""


@dataclass(frozen=True)
class Difference:
    """A value of one node that differs from that of the other nodes."""

    node: int
    kind: str
    what: str


def find_differences(reports: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Every value that differs from the most frequent one. If no value is the most frequent, that of node 0 counts.

    `reports` are in the order of the nodes. Each has `host` and, for each of SECTIONS, a mapping of names to values. A
    node that could not read its config has not all sections. A missing section is compared among the other nodes.
    """
    differences = []
    for section, kind in SECTIONS.items():
        parts = {node: report[section] for node, report in enumerate(reports) if section in report}
        for name in sorted({name for part in parts.values() for name in part}):
            values = {node: str(part.get(name, MISSING)) for node, part in parts.items()}
            differences += [Difference(node, kind, what) for node, what in _deviations(section, name, values=values)]
    return differences


def _deviations(section: str, name: str, *, values: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Node and description of every value that differs from the most frequent one."""
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: (counts[value], value == values[min(values)]))
    usual_nodes = [node for node in values if values[node] == usual]
    others = f"node {usual_nodes[0]}" if len(usual_nodes) == 1 else f"nodes {', '.join(map(str, usual_nodes))}"
    for node, value in values.items():
        if value == usual:
            continue
        if section != "files":
            yield node, f"{name} is {value}, on {others} it is {usual}"
        elif MISSING in (value, usual):
            here, there = ("is missing", "exists") if value == MISSING else ("exists", "is missing")
            yield node, f"the path in {name} {here}, on {others} it {there}"
        else:
            yield node, f"the path in {name} has other content than on {others}"


def check_nodes_match(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error, the same one on every node, if nodes differ or if a node reports an error of its own.

    Raises:
        SftplayError: its kind is that of the first problem. It names every node that differs.
    """
    names = [f"node {node} ({report['host']})" for node, report in enumerate(reports)]
    errors = {node: error_from_json(report["error"]) for node, report in enumerate(reports) if report.get("error")}
    if errors:
        first = next(iter(errors.values()))
        problems = [
            f"{names[node]}: {error.where + ': ' if error.where else ''}{error.what}" for node, error in errors.items()
        ]
        raise type(first)("; ".join(problems), where="nodes", fix=first.fix)
    differences = find_differences(reports)
    if not differences:
        return
    lines = [f"{names[difference.node]}: {difference.what}" for difference in differences]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    kinds = list(dict.fromkeys(difference.kind for difference in differences))
    error_class: type[SftplayError] = {"config": ConfigError, "data": DataError}.get(kinds[0], MachineError)
    raise error_class("; ".join(lines[:SHOWN]) + more, where="nodes", fix="; ".join(FIXES[kind] for kind in kinds))
