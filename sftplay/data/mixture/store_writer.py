"""Fills a store from the pass over a source's rows. Readers can follow it, and another process can take over.

Every file only grows. The index is written last, whenever a group is complete, with the lengths of all files and what
the pass knows then. A process that takes over cuts the files to these lengths and continues with the next row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sftplay.data.mixture.documents import ENTRY, GROUP_DOCUMENTS, GROUP_TOKENS
from sftplay.data.mixture.store import Index
from sftplay.data.records import IGNORE_INDEX, Source
from sftplay.data.tokenize.batch import Example, RowOutcome
from sftplay.data.tokenize.one_pass import CHATS, REFUSED, REPORT, Output, refused_line
from sftplay.data.tokenize.policies import SIDES, RowPolicies, Side
from sftplay.data.tokenize.report import RowCounts

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
        self._add_groups(side, self._sides[side].rest())
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

    def rest(self) -> list[int]:
        """Return the end of the last group, if it is not full."""
        return [self.n_documents] if self.n_documents > self.group_documents else []
