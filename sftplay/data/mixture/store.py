"""A source's tokens on disk: written by the pass over its rows, read while they grow."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from sftplay.atomic import examine_object, is_locked, unfinished_folder, write_text
from sftplay.data.cache import SEAL, get_lock_path
from sftplay.data.records import IGNORE_INDEX, Source
from sftplay.data.row_outcomes import SIDES, Example, RowCounts, RowOutcome, RowPolicies, Side, where_rows_went
from sftplay.data.tokenize import CHATS, REFUSED, REPORT, Output, refused_line
from sftplay.errors import DataError, RunError, error_from_json

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
    is_whole: bool = True  # false while more documents may come
    wait_for_more: Callable[[], None] | None = None  # wait until another process has written more of them

    def has_group(self, number: int) -> bool:
        """Return whether there is a group of that number; wait for it while documents are still coming."""
        while self.wait_for_more and number >= len(self.group_ends) and not self.is_whole:
            self.wait_for_more()
        return number < len(self.group_ends)

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
        """Tokens of all documents."""
        return int(self.table["end"][-1]) if len(self.table) else 0

    @property
    def n_learned(self) -> int:
        """Tokens that are learned where no document sees another."""
        return int(self.table["learned_end"][-1]) if len(self.table) else 0

    def _ends(self, name: str, *, first: int, end: int) -> Ints:
        """Return the ends of the documents before `first` .. `end`: one more than documents."""
        known = np.asarray(self.table[name][max(first - 1, 0) : end], np.int64)
        return known if first else np.concatenate((np.zeros(1, np.int64), known))


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
        entry = self.sides[side].table[document]
        return Source(self.index.paths[int(entry["path"])], int(entry["line"]), int(entry["record"]))

    def refresh(self) -> None:
        """Show all that is there by now; of a whole store nothing is missing."""

    def report(self) -> dict[str, Any]:
        """Return the counts of the pass that wrote it; empty while it is being written."""
        return json.loads((self.folder / REPORT).read_text(encoding="utf-8")) if self.index.is_whole else {}

    def chats(self) -> list[str]:
        return (self.folder / CHATS).read_text(encoding="utf-8").splitlines()


SEEN = "seen_records"  # the keys of all records so far; a file of an unfinished store only
SEEN_ENTRY = np.dtype([("keys", "<u8", 3), ("is_held_out", "u1"), ("is_chat", "u1")])


class StoreWriter(Output):
    """Write the store in `folder`, from where an earlier process has left it: the output of a pass over rows."""

    def __init__(self, folder: Path, index: Index, *, held_out_first: bool = True, is_streamed: bool = False) -> None:
        """`index` is that of a new store. With `held_out_first` no row is held out after the first to train on.

        With `is_streamed` a bad row ends the pass before the next group is shown, not at the end of all rows.
        """
        self._folder, self._held_out_first, self._is_followed = folder, held_out_first, is_streamed
        with suppress(OSError, ValueError, TypeError, KeyError):
            index = Index.read(folder)
        self.index = index
        self._files, self._closing = dict[str, BinaryIO](), ExitStack()
        self._path_numbers = {path: number for number, path in enumerate(index.paths)}
        self._sides = {side: _Side(**index.resume.get("sides", {}).get(side, {})) for side in SIDES}
        self._n_rows = int(index.resume.get("rows", 0))
        self._has_news = False

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
        else:
            self.index.write(self._folder)
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
        filled, numbers = self._sides[side], self._path_numbers
        table = np.zeros(len(kept), ENTRY)
        table["end"] = filled.n_tokens + np.cumsum(lengths)
        table["learned_end"] = filled.n_learned + np.cumsum(n_learned)
        table["n_bytes"] = [example.n_bytes for _, example in kept]
        table["row"] = [outcome.row for outcome, _ in kept]
        table["line"] = [outcome.source.line for outcome, _ in kept]
        table["record"] = [outcome.source.record for outcome, _ in kept]
        table["path"] = [numbers.setdefault(outcome.source.path, len(numbers)) for outcome, _ in kept]
        self.index.paths = list(numbers)
        self._files[f"{side}.tokens"].write(ids.astype(f"<u{self.index.id_bytes}").tobytes())
        self._files[f"{side}.documents"].write(table.tobytes())
        self._add_groups(side, filled.add(table))

    def write_chat(self, chat: str) -> None:
        self._files[CHATS].write(chat.encode() + b"\n")

    def write_refused(self, place: Source, reason: str) -> None:
        self._files[REFUSED].write(refused_line(place, reason).encode())

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """As `Output.end_batch`: show the store so far where there is more to see."""
        judged = [outcome for outcome in outcomes if not outcome.refused]
        seen = np.zeros(len(judged), SEEN_ENTRY)
        if judged:
            seen["keys"] = np.array([outcome.keys for outcome in judged], np.uint64)
            seen["is_held_out"] = [outcome.held_out for outcome in judged]
            seen["is_chat"] = [outcome.is_chat for outcome in judged]
        self._files[SEEN].write(seen.tobytes())
        self._n_rows += len(outcomes)
        is_training = any(not outcome.held_out for outcome in outcomes)
        if self._held_out_first and is_training and "held_out" not in self.index.whole:
            self._end_side("held_out")
        if self._is_followed and policies.n_bad:
            policies.check()
        if self._has_news and not policies.n_bad:
            self._show(policies)

    def finish(self, report: Mapping[str, Any]) -> None:
        for side in SIDES:
            if side not in self.index.whole:
                self._end_side(side)
        self._closing.close()
        (self._folder / REPORT).write_text(json.dumps(report), encoding="utf-8")
        (self._folder / SEEN).unlink()
        self.index.resume = {}
        self.index.whole.sort()
        self.index.write(self._folder)

    def _show(self, policies: RowPolicies) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())  # what the index shows must be there after a power cut too
        self.index.resume = {
            "rows": self._n_rows,
            "lengths": {name: file.tell() for name, file in self._files.items()},
            "counts": {side: policies.counts[side].as_state() for side in SIDES},
            "sides": {side: asdict(filled) for side, filled in self._sides.items()},
        }
        self.index.write(self._folder)
        self._has_news = False

    def _end_side(self, side: Side) -> None:
        filled = self._sides[side]  # its last group may not be full
        self._add_groups(side, [filled.n_documents] if filled.n_documents > filled.group_documents else [])
        self.index.whole.append(side)
        self._has_news = True

    def _add_groups(self, side: Side, ends: list[int]) -> None:
        self.index.groups[side] += ends
        self._has_news |= bool(ends)


@dataclass
class _Side:
    """The progress of one side."""

    n_documents: int = 0
    n_tokens: int = 0
    n_learned: int = 0
    group_documents: int = 0  # documents before the open group
    group_tokens: int = 0  # tokens before it

    def add(self, table: Any) -> list[int]:
        """Count new documents; return where groups end among them."""
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


T = TypeVar("T")

POLL_S = 0.05
ABANDONED_S, STARTS_S = 5.0, 300.0
"""An unfinished store without a lock for this long has lost its writer, or at the start never had one.
Before the writer of this run starts there may be rows of an earlier run."""


def get_failure_path(folder: Path) -> Path:
    """Return the path of the file in which the writer leaves its error."""
    return folder.with_name(f"{folder.name}.failed.json")


class StreamedStore(Store):
    """A store that another process writes."""

    def __init__(self, folder: Path, *, path: str, process: subprocess.Popen[bytes] | None = None) -> None:
        """Wait until the store shows something. `path` is that of the source's rows, for messages.

        `process` is the one that fills it, if this process started it.
        Raise the SftplayError of the writer.
        """
        self._final, self._path, self._process = folder, path, process
        self._was_held = False
        seen = self._wait_for(None)
        super().__init__(seen.folder, seen.index, seen.sides)
        self._show(seen)

    def chats(self) -> list[str]:
        return self._read(super().chats)

    def report(self) -> dict[str, Any]:
        return self._read(super().report)

    def _read(self, read: Callable[[], T]) -> T:
        """Read again while the folder is getting its final name."""
        for _ in range(20):
            try:
                return read()
            except FileNotFoundError:
                time.sleep(POLL_S)
                self.folder = self._final if (self._final / SEAL).exists() else self.folder
        return read()

    def refresh(self) -> None:
        """As `Store.refresh`: the writer may be further than what has been read."""
        if seen := self._open(self.index):
            self._show(seen)

    def _follow(self) -> None:
        """Wait until the index shows more, then show it too."""
        self._show(self._wait_for(self.index))
        if self.index.is_whole and not self.sides["train"].n_learned:
            raise nothing_to_learn(self, path=self._path)

    def _show(self, seen: Store) -> None:
        self.folder, self.index = seen.folder, seen.index
        for side in SIDES:
            vars(self.sides[side]).update(vars(seen.sides[side]), wait_for_more=self._follow)

    def _wait_for(self, known: Index | None) -> Store:
        """Return the store as soon as its index is another than the known one."""
        held_at = time.monotonic()
        while True:
            seen = self._open(known)
            if seen is not None:
                return seen
            failure, _ = examine_object(get_failure_path(self._final))
            if failure:
                raise error_from_json(failure)
            now, has_ended = time.monotonic(), self._process is not None and self._process.poll() is not None
            if is_locked(get_lock_path(self._final)):
                held_at, self._was_held = now, True
            elif now - held_at > (ABANDONED_S if self._was_held or has_ended else STARTS_S):
                fix = "look for its cause in the rank's log, then resume the run: what is tokenised is kept"
                what = "the process that tokenises the rows has ended before it was done"
                raise RunError(what, where=self._path, fix=fix)
            time.sleep(POLL_S)

    def _open(self, known: Index | None) -> Store | None:
        """Open the store where it shows more than the known index."""
        for folder in (self._final, unfinished_folder(self._final), self._final):  # it may be renamed between two looks
            if folder == self._final and not (folder / SEAL).exists():
                continue
            with suppress(OSError, ValueError):
                store = Store.open(folder)
                if known is None or store.index != known:
                    return store
        return None


def nothing_to_learn(store: Store, *, path: str) -> DataError:
    """Return the error about a source with a weight that teaches nothing: its share could never be reached."""
    went = where_rows_went(store.report()["sources"].get("train", {}))
    fix = "give the source rows, hold out less of it, or weight: 0"
    return DataError(f"nothing is left to learn: {went}", where=path, fix=fix)
