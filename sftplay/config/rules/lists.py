"""Rules about lists of sections (`datasets`, `rewards`): each entry has a name of its own."""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.rules.violation import Violation
from sftplay.config.schema.keys import list_keys
from sftplay.config.schema.run import RunConfig


def broken_list_rules(cfg: RunConfig) -> Iterator[Violation]:
    """Every entry that is named like one before it."""
    for outer in list_keys():
        first: dict[str, int] = {}
        for number, entry in enumerate(cfg.value_of(outer)):
            if first.setdefault(entry.name, number) != number:
                key, other = f"{outer}.{number}.name", f"{outer}.{first[entry.name]}.name"
                yield Violation(
                    (key, other), f"{entry.name!r} is the name of {other} too", fix="give each its own name"
                )
