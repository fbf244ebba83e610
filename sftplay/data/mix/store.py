"""A source's tokens on disk: flat files that only grow, and an index that says how much of them counts.

A store is filled by one process. Others may read what the index shows while it grows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sftplay.atomic import write_text
from sftplay.data.mix.documents import ENTRY, GROUP_DOCUMENTS, GROUP_TOKENS, Documents
from sftplay.data.prepare.batch import Example, RowOutcome
from sftplay.data.prepare.output import CHATS, REFUSED, REPORT, refused_line
from sftplay.data.prepare.policies import SIDES, RowPolicies, Side
from sftplay.data.records import IGNORE_INDEX, Source

INDEX = "index.json"
SMALL_IDS = 1 << 16
"""Vocabularies up to this size are kept in two bytes a token."""


@dataclass
class Index:
    """What a store's readers know of it."""

    id_bytes: int
    """Of each token: 2 or 4."""

    has_mask: bool
    """Not all tokens are learned."""

    groups: dict[Side, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})
    """For each side the number of documents up to the end of each group."""

    paths: list[str] = field(default_factory=list)
    """The files in which the documents stand, by number."""

    is_whole: bool = False
    resume: dict[str, Any] = field(default_factory=dict)
    """Where a filler goes on that takes over; empty in a whole store."""

    def write(self, folder: Path) -> None:
        """Show the store so far to its readers."""
        write_text(folder / INDEX, json.dumps(vars(self)))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a store.

        Raises:
            OSError: there is none yet.
        """
        return cls(**json.loads((folder / INDEX).read_text(encoding="utf-8")))


@dataclass
class Store:
    """A store that is open for reading."""

    folder: Path
    index: Index
    sides: dict[Side, Documents]

    @classmethod
    def open(cls, folder: Path) -> Store:
        """The store in `folder`, which must be whole."""
        index = Index.read(folder)
        return cls(folder, index, {side: _mapped(folder, side, index=index) for side in SIDES})

    def place(self, side: Side, document: int) -> Source:
        """Where a document stands."""
        entry = self.sides[side].table[document]
        return Source(self.index.paths[int(entry["path"])], int(entry["line"]), int(entry["record"]))

    def report(self) -> dict[str, Any]:
        """What the pass that filled it has counted."""
        found = json.loads((self.folder / REPORT).read_text(encoding="utf-8"))
        return dict(found)

    def chats(self) -> list[str]:
        """Its held-out chats, as JSON."""
        return (self.folder / CHATS).read_text(encoding="utf-8").splitlines()


def _mapped(folder: Path, side: Side, *, index: Index) -> Documents:
    groups = index.groups[side]
    n_documents = groups[-1] if groups else 0
    table = map_file(folder / f"{side}.documents", ENTRY, count=n_documents)
    n_tokens = int(table["end"][-1]) if n_documents else 0
    tokens = map_file(folder / f"{side}.tokens", np.dtype(f"<u{index.id_bytes}"), count=n_tokens)
    learned = map_file(folder / f"{side}.learned", np.dtype(np.uint8), count=n_tokens) if index.has_mask else None
    return Documents(tokens, table, groups, learned, index.is_whole)


def map_file(path: Path, dtype: np.dtype[Any], *, count: int) -> Any:
    """The first `count` numbers of a file, without reading them."""
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


class StoreFiles:
    """Fills a store: an `Output` of the pass over rows."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self.index = folder, index
        self._files, self._closing = dict[str, BinaryIO](), ExitStack()
        self._path_numbers = {path: number for number, path in enumerate(index.paths)}
        self._sides = {side: _Side() for side in SIDES}

    def __enter__(self) -> StoreFiles:
        kinds = ["tokens", "documents", *(["learned"] if self.index.has_mask else [])]
        for name in [CHATS, REFUSED, *(f"{side}.{kind}" for side in SIDES for kind in kinds)]:
            self._files[name] = self._closing.enter_context((self._folder / name).open("ab"))
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.close()

    def begin(self, _: RowPolicies) -> int:
        """As `Output.begin`."""
        return 0

    def write(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> None:
        """As `Output.write`."""
        if not kept:
            return
        ids = np.frombuffer(b"".join([example.ids for _, example in kept]), np.int32)
        lengths = np.array([len(example.ids) // 4 for _, example in kept])
        starts = np.cumsum(lengths) - lengths
        table = np.zeros(len(kept), ENTRY)
        n_learned = lengths - 1
        if self.index.has_mask:
            labels = np.frombuffer(b"".join([example.labels for _, example in kept]), np.int32)
            learned = (labels != IGNORE_INDEX).astype(np.uint8)
            learned[starts] = 0  # nothing stands before a first token
            n_learned = np.add.reduceat(learned, starts, dtype=np.int64)
            self._files[f"{side}.learned"].write(learned.tobytes())
        counts = self._sides[side]
        table["end"] = counts.n_tokens + np.cumsum(lengths)
        table["learned_end"] = counts.n_learned + np.cumsum(n_learned)
        table["n_bytes"] = [example.n_bytes for _, example in kept]
        table["row"] = [outcome.row for outcome, _ in kept]
        table["line"] = [outcome.source.line for outcome, _ in kept]
        table["record"] = [outcome.source.record for outcome, _ in kept]
        table["path"] = [self._number_of(outcome.source.path) for outcome, _ in kept]
        self._files[f"{side}.tokens"].write(ids.astype(f"<u{self.index.id_bytes}").tobytes())
        self._files[f"{side}.documents"].write(table.tobytes())
        self.index.groups[side] += counts.add(table)

    def write_chat(self, chat: str) -> None:
        """As `Output.write_chat`."""
        self._files[CHATS].write(chat.encode() + b"\n")

    def write_refused(self, place: Source, reason: str) -> None:
        """As `Output.write_refused`."""
        self._files[REFUSED].write(refused_line(place, reason).encode())

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """As `Output.end_batch`."""

    def finish(self, report: Mapping[str, Any]) -> None:
        """As `Output.finish`: the store is whole."""
        for side, counts in self._sides.items():
            self.index.groups[side] += counts.rest()
        (self._folder / REPORT).write_text(json.dumps(report), encoding="utf-8")
        self._closing.close()
        self.index.is_whole, self.index.resume = True, {}
        self.index.write(self._folder)

    def _number_of(self, path: str) -> int:
        if path not in self._path_numbers:
            self._path_numbers[path] = len(self.index.paths)
            self.index.paths.append(path)
        return self._path_numbers[path]


@dataclass
class _Side:
    """How far one side is filled."""

    n_documents: int = 0
    n_tokens: int = 0
    n_learned: int = 0
    group_documents: int = 0
    """Documents before the open group."""

    group_tokens: int = 0
    """Tokens before it."""

    def add(self, table: Any) -> list[int]:
        """Count new documents; where groups end among them."""
        before, ends = self.n_documents, table["end"]
        found: list[int] = []
        self.n_documents += len(table)
        self.n_tokens, self.n_learned = int(ends[-1]), int(table["learned_end"][-1])
        while True:
            by_tokens = before + int(np.searchsorted(ends, self.group_tokens + GROUP_TOKENS)) + 1
            end = min(self.group_documents + GROUP_DOCUMENTS, by_tokens)
            if end > self.n_documents:
                return found
            found.append(end)
            self.group_documents, self.group_tokens = end, int(ends[end - 1 - before])

    def rest(self) -> list[int]:
        """Where the last group ends, if it is not full."""
        return [self.n_documents] if self.n_documents > self.group_documents else []
