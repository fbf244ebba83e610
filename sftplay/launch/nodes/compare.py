"""Compares the reports of a run's nodes: in what they differ, and which node differs from the others.

It makes the error text too. `control/nodes.py` collects the reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftplay.errors import ConfigError, DataError, MachineError, SftplayError, error_from_json

SHOWN = 12
"""Differences that an error lists."""

MISSING = "missing"

FIXES = {
    "config": "give every node the same config file, command line and NNODES, NPROC",
    "data": "give every node the same files, or one folder that all share",
    "machine": "make the nodes alike (`make install` by the same requirements.lock, the same commit of the kit)",
}
SECTIONS = {"launch": "config", "config": "config", "files": "data", "versions": "machine", "gpus": "machine"}
"""Part of a report -> the kind of error that a difference in it is, in the order of the error text."""


@dataclass(frozen=True)
class Difference:
    """A value of one node that differs from the others'."""

    node: int
    kind: str
    what: str


def find_differences(reports: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Every value in which a node differs from most nodes, or from node 0 where no value is the most frequent.

    `reports` are by node number. Each holds `host` and, for each of SECTIONS, a mapping of names to values. A node that
    could not read its config lacks sections; these are compared among the other nodes.
    """
    found = []
    for section, kind in SECTIONS.items():
        known = {node: report[section] for node, report in enumerate(reports) if section in report}
        for name in sorted({name for values in known.values() for name in values}):
            values = {node: each.get(name, MISSING) for node, each in known.items()}
            found += [Difference(node, kind, what) for node, what in _odd_ones(section, name, values=values)]
    return found


def _odd_ones(section: str, name: str, *, values: Mapping[int, Any]) -> Iterator[tuple[int, str]]:
    shown = {node: str(value) for node, value in values.items()}
    counts = Counter(shown.values())
    usual = max(counts, key=lambda text: (counts[text], text == shown[min(shown)]))
    holders = [node for node in shown if shown[node] == usual]
    whose = f"node {holders[0]}" if len(holders) == 1 else f"nodes {', '.join(map(str, holders))}"
    for node, text in shown.items():
        if text == usual:
            continue
        if section != "files":
            yield node, f"{name} is {text}, on {whose} {usual}"
        elif MISSING in (text, usual):
            yield node, f"what {name} names is {'missing' if text == MISSING else 'there'}, on {whose} it is not"
        else:
            yield node, f"what {name} names has another content than on {whose}"


def check_nodes_match(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise the same error on every node where nodes differ, or where one of them has an error of its own.

    Raises:
        SftplayError: of the kind of the first problem. It names every node that differs.
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
    lines = [f"{names[each.node]}: {each.what}" for each in differences]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    kinds = {each.kind: None for each in differences}
    kind: type[SftplayError] = {"config": ConfigError, "data": DataError}.get(next(iter(kinds)), MachineError)
    raise kind("; ".join(lines[:SHOWN]) + more, where="nodes", fix="; ".join(FIXES[each] for each in kinds))
