"""One pass over the files: rows in, token rows on disk, every record counted.

Only a few hundred records are in memory at a time. It knows neither the cache nor the tokenizer's origin; policies
(`on_bad_row`, `too_long`) are applied here and nowhere else.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from sftplay import log
from sftplay.config.schema import DataConfig
from sftplay.data.formats import to_chat
from sftplay.data.labels import IGNORE, Rendered
from sftplay.data.order import is_held_out
from sftplay.data.records import Chat, Refused, Source, content_key, prompt_key
from sftplay.data.render import Renderer
from sftplay.data.sources import read_rows
from sftplay.data.tally import Tally, total
from sftplay.errors import DataError

Side = Literal["train", "held_out"]
SIDES: tuple[Side, Side] = ("train", "held_out")

BATCH_RECORDS = 512
SECONDS_BETWEEN_LINES = 1.0
NAMED_ROWS = 5
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("labels", pa.list_(pa.int64())), ("row", pa.int64())])

CHATS, REFUSED, REPORT = "held_out_chats.jsonl", "refused_rows.jsonl", "report.json"


@dataclass(frozen=True)
class Input:
    """A file and the share of its prompts that is held out: 0 for none, 1 for all."""

    path: str
    share: float


@dataclass(frozen=True, slots=True)
class _Record:
    row: int
    """Place in its file in reading order, from 0; refused rows count, blank lines do not."""

    side: Side
    chat: Chat


class Preparation:
    """Fills a folder with `train.arrow`, `held_out.arrow`, the held-out chats, the refused rows and the report."""

    def __init__(self, data: DataConfig, renderer: Renderer, max_tokens: int) -> None:
        self._data, self._renderer, self._max_tokens = data, renderer, max_tokens
        self._ends = set(renderer.end_token_ids)
        self._tallies: dict[Side, Tally] = {side: Tally() for side in SIDES}
        self._seen: set[bytes] = set()
        self._prompts: set[bytes] = set()
        self._bad: list[str] = []
        self._n_bad = 0
        self._said = time.monotonic()

    def run(self, inputs: Sequence[Input], folder: Path) -> None:
        """Read `inputs` to their end and write everything into `folder`.

        Raises:
            DataError: a file cannot be read; or a bad or too long row, where the config says error: then the first
                five are named with file, line and reason, and all are counted.
        """
        with ExitStack() as files:
            self._open(folder, files)
            pending: list[list[_Record]] = []
            for examples in self._renderer.render_all(self._chats(inputs, pending)):
                self._take(pending.pop(0), examples)
        if self._n_bad:
            raise self._bad_rows()
        (folder / REPORT).write_text(json.dumps(self._report(inputs)), encoding="utf-8")

    def _open(self, folder: Path, files: ExitStack) -> None:
        self._arrow = {
            side: files.enter_context(pa.ipc.new_stream(str(folder / f"{side}.arrow"), SCHEMA)) for side in SIDES
        }
        self._chats_file = files.enter_context((folder / CHATS).open("w", encoding="utf-8"))
        self._refused_file = files.enter_context((folder / REFUSED).open("w", encoding="utf-8"))

    def _chats(self, inputs: Sequence[Input], pending: list[list[_Record]]) -> Iterator[list[Chat]]:
        """Batches to render; the records each came from wait in `pending`, in the same order."""
        batch: list[_Record] = []
        for given in inputs:
            for record in self._records(given):
                batch.append(record)
                if len(batch) == BATCH_RECORDS:
                    pending.append(batch)
                    yield [each.chat for each in batch]
                    batch = []
        pending.append(batch)
        yield [each.chat for each in batch]

    def _records(self, given: Input) -> Iterator[_Record]:
        """The readable records of one file."""
        bad_side: Side = "held_out" if given.share == 1.0 else "train"
        for row, (source, value) in enumerate(read_rows(given.path)):
            self._show_progress(given.path, row)
            chat = self._chat(source, value, bad_side)
            if chat is None:
                continue
            side: Side = "held_out" if is_held_out(chat, given.share) else "train"
            key = content_key(chat)
            self._tallies[side].duplicates += key in self._seen
            self._seen.add(key)
            if len(self._prompts) < 2:
                self._prompts.add(prompt_key(chat))
            yield _Record(row, side, chat)

    def _chat(self, source: Source, value: dict[str, Any] | Refused, side: Side) -> Chat | None:
        if isinstance(value, Refused):
            self._refuse(source, value.reason, side)
            return None
        try:
            return to_chat(value, source, self._data.format)
        except DataError as error:
            self._refuse(source, error.what, side)
            return None

    def _refuse(self, source: Source, reason: str, side: Side) -> None:
        self._tallies[side].refused += 1
        line = {"path": source.path, "line": source.line, "reason": reason}
        self._refused_file.write(json.dumps(line) + "\n")
        if self._data.on_bad_row == "error":
            self._note_bad(f"{source} {reason}")

    def _note_bad(self, line: str) -> None:
        self._n_bad += 1
        if len(self._bad) < NAMED_ROWS:
            self._bad.append(line)

    def _take(self, records: list[_Record], examples: list[Rendered]) -> None:
        """Apply the policies to one batch, count it and write what is left."""
        grouped: list[list[Rendered]] = [[] for _ in records]
        for example in examples:
            grouped[example.of].append(example)
        rows: dict[Side, list[tuple[Rendered, int]]] = {side: [] for side in SIDES}
        for record, group in zip(records, grouped, strict=True):
            kept = self._kept(record, group)
            rows[record.side] += [(example, record.row) for example in kept]
            if kept and record.side == "held_out":
                self._chats_file.write(json.dumps(record.chat.as_json()) + "\n")
        for side, pairs in rows.items():
            if pairs:
                fitting = [example for example, _ in pairs]
                columns = [_column([each.input_ids for each in fitting]), _column([each.labels for each in fitting])]
                self._arrow[side].write_batch(pa.record_batch([*columns, [row for _, row in pairs]], schema=SCHEMA))

    def _kept(self, record: _Record, group: list[Rendered]) -> list[Rendered]:
        """What of a record is trained on; its fate is counted once."""
        tally = self._tallies[record.side]
        if group[0].problem:
            self._refuse(record.chat.source, group[0].problem, record.side)
            return []
        for example in group:
            tally.add_length(len(example.input_ids))
        kept, reason = self._fitted(record, group)
        if not kept:
            tally.dropped[reason] += 1
            return []
        is_whole = len(kept) == len(group) and all(new is old for new, old in zip(kept, group))
        tally.kept += is_whole
        tally.cut += not is_whole
        tally.split += len(group) > 1
        for example in kept:
            self._count(tally, example)
        return kept

    def _fitted(self, record: _Record, group: list[Rendered]) -> tuple[list[Rendered], str]:
        """The examples that fit and have something to learn, and why the last of the others went."""
        kept, reason = [], ""
        for example in group:
            length = len(example.input_ids)
            fitted = self._cut(example) if length > self._max_tokens else example
            if length > self._max_tokens and self._data.too_long == "error":
                self._note_bad(f"{record.chat.source} has {length:,} tokens; max_seq_len is {self._max_tokens:,}")
            if fitted is not example and self._data.too_long != "truncate":
                reason = "too_long"
            elif fitted.labels.count(IGNORE) < len(fitted.labels):
                kept.append(fitted)
            else:
                reason = "no_trainable_token" if fitted is example else "no_trainable_token_after_cut"
        return kept, reason

    def _cut(self, example: Rendered) -> Rendered:
        return Rendered(example.input_ids[: self._max_tokens], example.labels[: self._max_tokens], example.of)

    def _count(self, tally: Tally, example: Rendered) -> None:
        tally.examples += 1
        tally.tokens += len(example.input_ids)
        tally.trainable_tokens += len(example.labels) - example.labels.count(IGNORE)
        tally.ends_learned += next(label for label in reversed(example.labels) if label != IGNORE) in self._ends

    def _bad_rows(self) -> DataError:
        n_more = self._n_bad - len(self._bad)
        shown = "\n  ".join(self._bad) + (f"\n  and {n_more:,} more" if n_more else "")
        return DataError(
            f"{self._n_bad:,} {'row' if self._n_bad == 1 else 'rows'} cannot be trained on\n  {shown}",
            where="data",
            fix="correct them, or leave them out with data.on_bad_row: skip; for length data.too_long: truncate",
        )

    def _report(self, inputs: Sequence[Input]) -> dict[str, Any]:
        paths = {"train": inputs[0].path, "held_out": inputs[-1].path}
        used = [side for side in SIDES if self._tallies[side].read]
        return {
            **total(self._tallies.values()).as_json(),
            "mask_method": self._renderer.method,
            "template_hash": self._renderer.template_hash,
            "max_seq_len": self._max_tokens,
            "sources": {side: {"path": paths[side], **self._tallies[side].as_json()} for side in used},
            "notes": self._notes(inputs),
        }

    def _notes(self, inputs: Sequence[Input]) -> list[str]:
        share = inputs[-1].share
        notes = []
        if share and not self._tallies["held_out"].examples:
            few = "there is only one prompt" if len(self._prompts) < 2 else f"too few prompts for a share of {share:g}"
            notes.append(f"nothing is held out: {few}; raise data.split or give data.val_path")
        return notes

    def _show_progress(self, path: str, row: int) -> None:
        if time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            log.status(f"{path}: {row:,} rows read", tag="data")


def _column(lists: Sequence[Sequence[int]]) -> pa.ListArray:
    """A column of int64 lists; pyarrow's own conversion of nested lists takes ten times as long."""
    flat = array("q", chain.from_iterable(lists))
    values = pa.Int64Array.from_buffers(pa.int64(), len(flat), [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(pa.array([0, *accumulate(map(len, lists))], pa.int32()), values)
