"""One pass over the sources: every record counted, tokenized in processes, and kept on disk as Arrow."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from sftplay import log
from sftplay.config.data import DataConfig
from sftplay.data.layouts.convert import read_layout_options, to_record
from sftplay.data.read.count import count_rows
from sftplay.data.read.files import other_files
from sftplay.data.read.sources import read_dialect, read_raw, read_rows
from sftplay.data.records import Refused, Source, compute_keys
from sftplay.data.render.render import Renderer
from sftplay.data.tokenize.batch import CUT_AWAY, Example, RawRow, RowOptions, RowOutcome, hash64
from sftplay.data.tokenize.policies import SIDES, RowPolicies, Side
from sftplay.data.tokenize.report import total
from sftplay.data.tokenize.workers import Work, n_workers, process_all
from sftplay.errors import DataError
from sftplay.units import format_seconds

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("labels", pa.list_(pa.int64())), ("row", pa.int64())])
PLACES = pa.schema([("path", pa.string()), ("line", pa.int64()), ("record", pa.int64())])
"""The second stream of each row stream: where its examples came from."""


class RowWriter:
    """Write examples and, in a second file, their places; close both at the end of a `with`."""

    def __init__(self, rows: Path, places: Path) -> None:
        self._rows = pa.ipc.new_stream(str(rows), SCHEMA)
        self._places = pa.ipc.new_stream(str(places), PLACES)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self._rows.close()
        self._places.close()

    def write(self, examples: Sequence[Example], rows: Sequence[int], *, places: Sequence[Source]) -> None:
        """Append the examples; `rows` and `places` are those of their records."""
        if not examples:
            return
        columns = [_column([example.ids for example in examples]), _column([example.labels for example in examples])]
        self._rows.write_batch(pa.record_batch([*columns, pa.array(rows, pa.int64())], schema=SCHEMA))
        paths = pa.array([place.path for place in places])
        numbers = [pa.array([getattr(place, name) for place in places], pa.int64()) for name in ("line", "record")]
        self._places.write_batch(pa.record_batch([paths, *numbers], schema=PLACES))


def _column(lists: Sequence[bytes]) -> pa.ListArray:
    """A column of int64 lists from int32 bytes."""
    flat = np.frombuffer(b"".join(lists), np.int32).astype(np.int64)
    ends = np.cumsum([0, *(len(ids) // 4 for ids in lists)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))


CHATS, REFUSED, REPORT = "held_out_chats.jsonl", "refused_rows.jsonl", "report.json"


class Output(Protocol):
    """The receiver of what a pass keeps, batch by batch."""

    def begin(self, policies: RowPolicies) -> int:
        """Return how many rows an earlier pass has done, and restore `policies` to that point."""

    def write(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> None:
        """Take the kept examples of a batch, each with the outcome of its row."""

    def write_chat(self, chat: str) -> None:
        """Take a held-out chat, as JSON."""

    def write_refused(self, place: Source, reason: str) -> None:
        """Take the place of a row that cannot be used, and why."""

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """All of a batch has been taken; these were its rows."""

    def finish(self, report: dict[str, Any]) -> None:
        """All rows are done."""


class RowFiles:
    """Files of a folder: the rows of each side and their places as Arrow streams, the rest as JSON."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, ExitStack()
        self._writers = {
            side: self._files.enter_context(RowWriter(folder / f"{side}.arrow", folder / f"{side}_places.arrow"))
            for side in SIDES
        }
        self._chats = self._files.enter_context((folder / CHATS).open("w", encoding="utf-8"))
        self._refused = self._files.enter_context((folder / REFUSED).open("w", encoding="utf-8"))

    def __enter__(self) -> RowFiles:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def begin(self, _: RowPolicies) -> int:
        """As `Output.begin`: a pass that was broken off is done again from the start."""
        return 0

    def write(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> None:
        """As `Output.write`."""
        outcomes = [outcome for outcome, _ in kept]
        rows, places = [outcome.row for outcome in outcomes], [outcome.source for outcome in outcomes]
        self._writers[side].write([example for _, example in kept], rows, places=places)

    def write_chat(self, chat: str) -> None:
        """As `Output.write_chat`."""
        self._chats.write(chat + "\n")

    def write_refused(self, place: Source, reason: str) -> None:
        """As `Output.write_refused`."""
        self._refused.write(refused_line(place, reason))

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """As `Output.end_batch`: nothing to do, since the files are read only when they are whole."""

    def finish(self, report: dict[str, Any]) -> None:
        """As `Output.finish`."""
        (self._folder / REPORT).write_text(json.dumps(report), encoding="utf-8")


def refused_line(place: Source, reason: str) -> str:
    """The line of a row that cannot be used, in REFUSED."""
    return json.dumps({"path": place.path, "line": place.line, "record": place.record, "reason": reason}) + "\n"


BATCH_ROWS, BATCH_CHARACTERS = 256, 1 << 19
SECONDS_BETWEEN_LINES = 1.0

KEPT_WHOLE = 0.99
"""Share of the rows that is not cut where cutting is worth no word."""


@dataclass(frozen=True)
class Input:
    """A file or folder and the share of its prompts that is held out: 0 for none, 1 for all."""

    path: str
    share: float


class Preparation:
    """Make token rows of the rows of files, and judge and count each of them."""

    def __init__(
        self,
        data: DataConfig,
        renderer: Renderer,
        *,
        max_tokens: int | None,
        only_held_out: bool = False,
        only_chats: bool = False,
    ) -> None:
        """With `max_tokens` None nothing is cut; the rows are then plain texts.

        With `only_held_out` rows to train on are neither rendered nor judged nor counted.
        """
        self._renderer, self._max_tokens, self._dialect = renderer, max_tokens, read_dialect(data)
        self._options = RowOptions(read_layout_options(data), max_tokens, data.too_long, only_held_out, only_chats)
        self._policies = RowPolicies(data, max_tokens)
        self._began = self._shown_at = time.monotonic()
        self._n_rows: int | None = None

    def run(self, inputs: Sequence[Input], output: Output, *, guarded: Sequence[str] = ()) -> None:
        """Read `inputs`, training rows first, and hand everything to `output`.

        Rows of the files `guarded` must not be trained on, nor those that `inputs` hold out.

        Raises:
            DataError: a file cannot be read; or a bad, too long or leaked row, where the config says error: then the
                first five are named with file, line and reason, and all are counted. Or no end of turn is learned.
        """
        for path in guarded:
            self._guard(path)
        self._began = self._shown_at = time.monotonic()
        self._n_rows = count_rows([given.path for given in inputs])
        n_read = n_done = output.begin(self._policies)
        for given in inputs:
            if n_done and given.share == 1.0:  # its rows are not read again
                self._guard(given.path)
        processes = n_workers([given.path for given in inputs])
        # Held-out rows go first: a training row must be compared with all of them.
        batches = self._batches(list(reversed(inputs)), n_done)
        processed = process_all(batches, self._renderer, options=self._options, processes=processes)
        with closing(processed):  # whatever happens here, its processes end now
            for outcomes in processed:
                n_read += len(outcomes)
                self._take(outcomes, output)
                output.end_batch(outcomes, self._policies)
                self._show_progress(n_read)
        now = time.monotonic()
        rate = self._rate(n_read - n_done, now)
        log.say(f"{n_read - n_done:,} rows read in {format_seconds(now - self._began)}, {rate}", "data")
        self._policies.check()
        self._check_ends(inputs[0].path)
        output.finish(self._report(inputs))

    def _guard(self, path: str) -> None:
        for source, row in read_rows(path, self._dialect):
            if isinstance(row, Refused):
                continue
            try:
                self._policies.guard(
                    hash64(compute_keys(to_record(row, source, reading=self._options.reading)).normal), source
                )
            except DataError:  # this row is counted when the file itself is measured on
                continue

    def _batches(self, inputs: Sequence[Input], n_done: int) -> Iterator[Work]:
        """All batches of rows behind the first `n_done`."""
        for given in inputs:
            batch: list[RawRow] = []
            size = 0
            for row, (source, raw) in enumerate(read_raw(given.path, self._dialect)):
                if n_done:
                    n_done -= 1
                    continue
                batch.append(RawRow(row, source, raw))
                size += _size(raw)
                if len(batch) == BATCH_ROWS or size > BATCH_CHARACTERS:
                    yield batch, given.share
                    batch, size = [], 0
            if batch:
                yield batch, given.share

    def _take(self, outcomes: Sequence[RowOutcome], output: Output) -> None:
        """Hand on what the policies keep of one batch."""
        kept: dict[Side, list[tuple[RowOutcome, Example]]] = {side: [] for side in SIDES}
        for outcome in outcomes:
            side: Side = "held_out" if outcome.held_out else "train"
            if side == "train" and self._options.only_held_out:
                continue
            examples = self._policies.keep(outcome, side)
            kept[side] += [(outcome, example) for example in examples]
            if outcome.refused:
                output.write_refused(outcome.source, outcome.refused)
            elif examples and outcome.chat:
                output.write_chat(outcome.chat)
        for side, pairs in kept.items():
            output.write(side, pairs)

    def _check_ends(self, path: str) -> None:
        """A model that never learns to end its turn would never stop."""
        counts = self._policies.counts["train"]
        if counts.chat_examples and not counts.ends_learned:
            raise DataError(
                f"the end-of-turn token is in the loss of none of {counts.chat_examples:,} examples: all are cut at"
                f" {self._max_tokens:,} tokens, the longest has {counts.longest:,}",
                where=path,
                fix=f"write model.max_seq_len: {counts.length_that_keeps(KEPT_WHOLE)}, which keeps 99 % of the rows"
                " whole, or leave longer rows out with data.too_long: drop",
            )

    def _report(self, inputs: Sequence[Input]) -> dict[str, Any]:
        paths = {"train": inputs[0].path, "held_out": inputs[-1].path}
        counts = self._policies.counts
        used = [side for side in SIDES if counts[side].read]
        return {
            **total(counts.values()).as_json(),
            "mask_method": self._renderer.method,
            "template_hash": self._renderer.template_hash,
            "max_seq_len": self._max_tokens,
            "sources": {side: {"path": paths[side], **counts[side].as_json()} for side in used},
            "warnings": self._warnings(inputs),
            "notes": self._notes(inputs),
        }

    def _warnings(self, inputs: Sequence[Input]) -> list[str]:
        """Return one line for each source with more than a few cut rows."""
        paths: dict[Side, str] = {"train": inputs[0].path, "held_out": inputs[-1].path}
        found = []
        for side, path in paths.items():
            counts = self._policies.counts[side]
            n_cut = counts.cut + counts.dropped[CUT_AWAY]
            if n_cut > (1 - KEPT_WHOLE) * counts.read:
                found.append(
                    f"{path}: {n_cut:,} of {counts.read:,} rows are cut at {self._max_tokens:,} tokens, which loses"
                    f" {counts.lost_share:.0%} of what they teach; the longest has {counts.longest:,};"
                    f" model.max_seq_len: {counts.length_that_keeps(KEPT_WHOLE)} keeps 99 % of them whole"
                )
        return found

    def _notes(self, inputs: Sequence[Input]) -> list[str]:
        notes = []
        share = inputs[-1].share
        if share and not self._policies.counts["held_out"].examples:
            has_chats = self._policies.counts["train"].chat_examples > 0
            few = f"too few {'prompts' if has_chats else 'texts'} for a share of {share:g}"
            if has_chats and self._policies.n_prompts < 2:
                few = "there is only one prompt"
            notes.append(f"nothing is held out: {few}; raise data.split or give data.val_path")
        for given in inputs:
            if others := other_files(given.path):
                named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
                notes.append(f"{given.path}: files of other kinds are left alone: {named}")
        return notes

    def _show_progress(self, n_read: int) -> None:
        now = time.monotonic()
        if now - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = now
            log.progress(n_read, self._n_rows, what="rows", text=self._rate(n_read, now), tag="data")

    def _rate(self, n_read: int, now: float) -> str:
        return f"{n_read / max(now - self._began, 1e-3):,.0f} rows/s"


def _size(value: Any) -> int:
    """Return about how many characters a raw row has."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8
