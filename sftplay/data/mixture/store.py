"""A source's tokens on disk: written by the pass over its rows, read by mapping them into memory."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from sftplay.atomic import write_text
from sftplay.data.records import IGNORE_INDEX, Source
from sftplay.data.row_outcomes import SIDES, Example, RowCounts, RowOutcome, RowPolicies, Side, where_rows_went
from sftplay.data.tokenize import CHATS, REFUSED, REPORT, Output, refused_line
from sftplay.errors import DataError

Ints = NDArray[np.int64]

GROUP_DOCUMENTS, GROUP_TOKENS = 16_384, 1 << 24
"""A group ends at this number of documents, or with the document that reaches this number of tokens."""

ENTRY = np.dtype(
    {"names": ["end", "learned_end", "n_bytes", "row", "line", "record", "path"], "formats": ["<i8"] * 5 + ["<i4"] * 2}
)
"""The record of a document: the tokens of the source up to its end, and those of them that are learned without any
context of other documents; its bytes of UTF-8 (0 for a chat); its row in its file, and its place."""


@dataclass
class Documents:
    """One side of a source, whole in memory or mapped into it."""

    tokens: NDArray[Any]  # ids of all documents, as uint16 or uint32
    table: NDArray[Any]  # one ENTRY a document
    group_ends: list[int]  # number of documents up to the end of each group
    learned: NDArray[np.uint8] | None = None  # 1 where a token is learned; None where all are but a document's first

    def group(self, number: int) -> tuple[int, int]:
        """Return the first document of a group, and the first behind it."""
        return (self.group_ends[number - 1] if number else 0), self.group_ends[number]

    def lengths(self, first: int, end: int, *, only_learned: bool = False) -> Ints:
        """Count the tokens of each of these consecutive documents, or only the learned ones."""
        return np.diff(self._ends("learned_end" if only_learned else "end", first=first, end=end))

    def starts(self, documents: Ints) -> Ints:
        """Return where in `tokens` these documents begin."""
        before = np.maximum(documents - 1, 0)
        return np.where(documents > 0, self.table["end"][before], 0).astype(np.int64)

    def span(self, document: int) -> slice:
        """Return the range of a document in `tokens`."""
        first, end = self._ends("end", first=document, end=document + 1)
        return slice(int(first), int(end))

    @property
    def n_tokens(self) -> int:
        return int(self.table["end"][-1]) if len(self.table) else 0

    @property
    def n_learned(self) -> int:
        """Tokens that are learned where no document sees another."""
        return int(self.table["learned_end"][-1]) if len(self.table) else 0

    def _ends(self, name: str, *, first: int, end: int) -> Ints:
        """Return the ends of the documents before `first` .. `end`: one more than documents."""
        known = np.asarray(self.table[name][max(first - 1, 0) : end], np.int64)
        return known if first else np.concatenate((np.zeros(1, np.int64), known))


def find_group_ends(table: NDArray[Any]) -> list[int]:
    """Return the number of documents up to the end of each group."""
    found: list[int] = []
    ends, begin = table["end"], 0
    while begin < len(table):
        n_tokens = (int(ends[begin - 1]) if begin else 0) + GROUP_TOKENS
        last = min(begin + GROUP_DOCUMENTS, len(table))
        begin = min(bisect_left(ends, n_tokens, begin, last) + 1, last)  # a few entries are read, not the whole table
        found.append(begin)
    return found


INDEX = "index.json"


@dataclass
class Index:
    """How to read the files of a store, and where a process that takes over the writing continues."""

    id_bytes: int  # of each token: 2 or 4
    has_mask: bool  # not all tokens are learned
    paths: list[str] = field(default_factory=list)  # the files in which the documents stand, by number
    resume: dict[str, Any] = field(default_factory=dict)  # the progress of an unfinished store; empty in a whole one

    def write(self, folder: Path) -> None:
        write_text(folder / INDEX, json.dumps(vars(self)))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the index of a store, or raise OSError where there is none yet."""
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        # Stores of older releases name more.
        return cls(**{name: found[name] for name in ("id_bytes", "has_mask", "paths", "resume")})


@dataclass
class Store:
    """A store that is open for reading."""

    folder: Path
    index: Index
    sides: dict[Side, Documents]

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open the whole store in `folder`."""
        index, sides = Index.read(folder), dict[Side, Documents]()

        def map_file(name: str, dtype: Any) -> Any:
            """Return the numbers of a file, without reading them."""
            path = folder / name
            return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

        for side in SIDES:
            table = map_file(f"{side}.documents", ENTRY)
            tokens = map_file(f"{side}.tokens", np.dtype(f"<u{index.id_bytes}"))
            learned = map_file(f"{side}.learned", np.dtype(np.uint8)) if index.has_mask else None
            sides[side] = Documents(tokens, table, find_group_ends(table), learned)
        return cls(folder, index, sides)

    def place(self, side: Side, document: int) -> Source:
        entry = self.sides[side].table[document]
        return Source(self.index.paths[int(entry["path"])], int(entry["line"]), int(entry["record"]))

    def report(self) -> dict[str, Any]:
        """Return the counts of the pass that wrote it."""
        return json.loads((self.folder / REPORT).read_text(encoding="utf-8"))

    def chats(self) -> list[str]:
        return (self.folder / CHATS).read_text(encoding="utf-8").splitlines()


SEEN = "seen_records"  # the keys of all records so far; a file of an unfinished store only
SEEN_ENTRY = np.dtype([("keys", "<u8", 3), ("is_held_out", "u1"), ("is_chat", "u1")])

ROWS_BETWEEN_NOTES = 16_384  # after so many rows the progress is noted; a killed process loses no more than these


class StoreWriter(Output):
    """Write the store in `folder`, from where an earlier process has left it: the output of a pass over rows."""

    def __init__(self, folder: Path, index: Index) -> None:
        """`index` is that of a new store."""
        self._folder = folder
        with suppress(OSError, ValueError, TypeError, KeyError):
            index = Index.read(folder)
        self.index = index
        self._files, self._closing = dict[str, BinaryIO](), ExitStack()
        self._path_numbers = {path: number for number, path in enumerate(index.paths)}
        sides = index.resume.get("sides", {})
        self._ends = {side: sides.get(side, {"n_tokens": 0, "n_learned": 0}) for side in SIDES}
        self._n_rows = self._n_noted = int(index.resume.get("rows", 0))

    def __enter__(self) -> StoreWriter:
        kinds = ["tokens", "documents", *(["learned"] if self.index.has_mask else [])]
        lengths = self.index.resume.get("lengths", {})
        for name in [CHATS, REFUSED, SEEN, *(f"{side}.{kind}" for side in SIDES for kind in kinds)]:
            file = self._closing.enter_context((self._folder / name).open("ab"))
            file.truncate(lengths.get(name, 0))
            self._files[name] = file
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.close()

    def begin(self, policies: RowPolicies) -> int:
        if self._n_rows:
            counts = {side: RowCounts.from_state(self.index.resume["counts"][side]) for side in SIDES}
            seen = np.fromfile(self._folder / SEEN, SEEN_ENTRY)
            sides = {"train": seen["is_held_out"] == 0, "held_out": seen["is_held_out"] == 1}
            policies.resume(
                counts,
                seen={side: seen["keys"][sides[side]] for side in SIDES},
                chats=seen["keys"][sides["train"] & (seen["is_chat"] == 1)],
            )
        return self._n_rows

    def write(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> None:
        if not kept:
            return
        ids = np.frombuffer(b"".join([example.ids for _, example in kept]), np.int32)
        lengths = np.array([len(example.ids) // 4 for _, example in kept])
        starts = np.cumsum(lengths) - lengths
        n_learned = lengths - 1
        if self.index.has_mask:
            labels = np.frombuffer(b"".join([example.labels for _, example in kept]), np.int32)
            learned = (labels != IGNORE_INDEX).astype(np.uint8)
            learned[starts] = 0  # nothing stands before a first token
            n_learned = np.add.reduceat(learned, starts, dtype=np.int64)
            self._files[f"{side}.learned"].write(learned.tobytes())
        ends, numbers = self._ends[side], self._path_numbers
        table = np.zeros(len(kept), ENTRY)
        table["end"] = ends["n_tokens"] + np.cumsum(lengths)
        table["learned_end"] = ends["n_learned"] + np.cumsum(n_learned)
        table["n_bytes"] = [example.n_bytes for _, example in kept]
        table["row"] = [outcome.row for outcome, _ in kept]
        table["line"] = [outcome.source.line for outcome, _ in kept]
        table["record"] = [outcome.source.record for outcome, _ in kept]
        table["path"] = [numbers.setdefault(outcome.source.path, len(numbers)) for outcome, _ in kept]
        self.index.paths = list(numbers)
        self._ends[side] = {"n_tokens": int(table["end"][-1]), "n_learned": int(table["learned_end"][-1])}
        self._files[f"{side}.tokens"].write(ids.astype(f"<u{self.index.id_bytes}").tobytes())
        self._files[f"{side}.documents"].write(table.tobytes())

    def write_chat(self, chat: str) -> None:
        self._files[CHATS].write(chat.encode() + b"\n")

    def write_refused(self, place: Source, reason: str) -> None:
        self._files[REFUSED].write(refused_line(place, reason).encode())

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """As `Output.end_batch`: note the progress from time to time."""
        judged = [outcome for outcome in outcomes if not outcome.refused]
        seen = np.zeros(len(judged), SEEN_ENTRY)
        if judged:
            seen["keys"] = np.array([outcome.keys for outcome in judged], np.uint64)
            seen["is_held_out"] = [outcome.held_out for outcome in judged]
            seen["is_chat"] = [outcome.is_chat for outcome in judged]
        self._files[SEEN].write(seen.tobytes())
        self._n_rows += len(outcomes)
        if self._n_rows - self._n_noted >= ROWS_BETWEEN_NOTES and not policies.n_bad:
            self._note_progress(policies)

    def finish(self, report: Mapping[str, Any]) -> None:
        self._closing.close()
        (self._folder / REPORT).write_text(json.dumps(report), encoding="utf-8")
        (self._folder / SEEN).unlink()
        self.index.resume = {}
        self.index.write(self._folder)

    def _note_progress(self, policies: RowPolicies) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())  # what the index promises must be there after a power cut too
        self.index.resume = {
            "rows": self._n_rows,
            "lengths": {name: file.tell() for name, file in self._files.items()},
            "counts": {side: policies.counts[side].as_state() for side in SIDES},
            "sides": self._ends,
        }
        self.index.write(self._folder)
        self._n_noted = self._n_rows


def nothing_to_learn(store: Store, *, path: str) -> DataError:
    """Return the error about a source with a weight that teaches nothing: its share could never be reached."""
    went = where_rows_went(store.report()["sources"].get("train", {}))
    fix = "give the source rows, hold out less of it, or weight: 0"
    return DataError(f"nothing is left to learn: {went}", where=path, fix=fix)
