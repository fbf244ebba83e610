"""A source's tokens on disk: flat files that only grow, and an index that says how much of them is valid.

One process writes a store (`store_writer`). Others may read what the index shows while it grows (`streamed_store`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sftplay.atomic import write_text
from sftplay.data.mixture.documents import ENTRY, Documents
from sftplay.data.records import Source
from sftplay.data.tokenize.one_pass import CHATS, REPORT
from sftplay.data.tokenize.policies import SIDES, Side

INDEX = "index.json"


@dataclass
class Index:
    """The part of a store that is valid for its readers."""

    id_bytes: int  # of each token: 2 or 4
    has_mask: bool  # not all tokens are learned
    groups: dict[Side, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})
    """For each side the number of documents up to the end of each group."""

    paths: list[str] = field(default_factory=list)  # the files in which the documents stand, by number
    whole: list[Side] = field(default_factory=list)  # sides to which no document is added any more
    resume: dict[str, Any] = field(default_factory=dict)
    """Where a process that takes over the writing continues; empty in a whole store."""

    @property
    def is_whole(self) -> bool:
        """True if the store is finished."""
        return len(self.whole) == len(SIDES)

    def write(self, folder: Path) -> None:
        """Show the store so far to its readers."""
        write_text(folder / INDEX, json.dumps(vars(self)))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index of a store, or raise OSError where there is none yet."""
        return cls(**json.loads((folder / INDEX).read_text(encoding="utf-8")))


@dataclass
class Store:
    """A store that is open for reading."""

    folder: Path
    index: Index
    sides: dict[Side, Documents]

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open the part of the store in `folder` that its index shows."""
        index, sides = Index.read(folder), dict[Side, Documents]()

        def map_file(name: str, dtype: Any, *, count: int) -> Any:
            """Return the first `count` numbers of a file, without reading them."""
            return np.memmap(folder / name, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)

        for side in SIDES:
            groups = index.groups[side]
            table = map_file(f"{side}.documents", ENTRY, count=groups[-1] if groups else 0)
            n_tokens = int(table["end"][-1]) if len(table) else 0
            tokens = map_file(f"{side}.tokens", np.dtype(f"<u{index.id_bytes}"), count=n_tokens)
            learned = map_file(f"{side}.learned", np.dtype(np.uint8), count=n_tokens) if index.has_mask else None
            sides[side] = Documents(tokens, table, groups, learned, side in index.whole)
        return cls(folder, index, sides)

    def place(self, side: Side, document: int) -> Source:
        """Return the place of a document."""
        entry = self.sides[side].table[document]
        return Source(self.index.paths[int(entry["path"])], int(entry["line"]), int(entry["record"]))

    def refresh(self) -> None:
        """Show all that is there by now; of a whole store nothing is missing."""

    def report(self) -> dict[str, Any]:
        """Return the counts of the pass that wrote it; empty while it is being written."""
        return json.loads((self.folder / REPORT).read_text(encoding="utf-8")) if self.index.is_whole else {}

    def chats(self) -> list[str]:
        """Read its held-out chats, as JSON."""
        return (self.folder / CHATS).read_text(encoding="utf-8").splitlines()
