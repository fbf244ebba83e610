"""One pass over the files: rows in, token rows on disk, every record counted.

Only a few batches of records are in memory at a time. `batch` and `policies` decide what becomes of a row; this file
moves rows between reader, processes and disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from sftplay import log
from sftplay.config.schema.run import DataConfig
from sftplay.data.encode.render import Renderer
from sftplay.data.layouts.convert import reading_of, to_record
from sftplay.data.prepare.batch import CUT_AWAY, Example, RawRow, RowOptions, RowOutcome, short
from sftplay.data.prepare.output import Output
from sftplay.data.prepare.policies import SIDES, RowPolicies, Side
from sftplay.data.prepare.report import total
from sftplay.data.prepare.workers import Work, n_workers, process_all
from sftplay.data.read.count import count_rows
from sftplay.data.read.files import other_files
from sftplay.data.read.sources import dialect_of, read_raw, read_rows
from sftplay.data.records import Refused, keys_of
from sftplay.errors import DataError
from sftplay.units import format_seconds

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
    """Makes token rows of the rows of files, and judges and counts each of them."""

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
        self._renderer, self._max_tokens, self._dialect = renderer, max_tokens, dialect_of(data)
        self._options = RowOptions(reading_of(data), max_tokens, data.too_long, only_held_out, only_chats)
        self._policies = RowPolicies(data, max_tokens)
        self._began = self._said = time.monotonic()
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
        self._began = self._said = time.monotonic()
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
                    short(keys_of(to_record(row, source, reading=self._options.reading)).normal), source
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
        """One line for each source of which more is cut than a few rows."""
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
        if now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            log.progress(n_read, self._n_rows, what="rows", text=self._rate(n_read, now), tag="data")

    def _rate(self, n_read: int, now: float) -> str:
        return f"{n_read / max(now - self._began, 1e-3):,.0f} rows/s"


def _size(value: Any) -> int:
    """About how many characters a raw row has."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8
