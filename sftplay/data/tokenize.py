"""One pass over the sources in processes: every record counted, tokenized and kept on disk as Arrow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from sftplay import log
from sftplay.config.data import DataConfig
from sftplay.data.files import find_suffix, list_files, other_files
from sftplay.data.layouts import read_layout_options, to_record
from sftplay.data.pool import work_through
from sftplay.data.read import is_hub_name, read_dialect, read_raw, read_rows
from sftplay.data.records import Refused, Source
from sftplay.data.render.render import Recipe, Renderer
from sftplay.data.row_outcomes import (
    CUT_AWAY,
    FIX_CUT,
    SIDES,
    Example,
    RawRow,
    RowOptions,
    RowOutcome,
    RowPolicies,
    RowProcessor,
    Side,
    compute_keys,
    is_held_out,
    total,
)
from sftplay.errors import DataError, MachineError
from sftplay.machine.gpu import usable_cores
from sftplay.units import format_seconds, plural


def count_rows(paths: Sequence[str]) -> int | None:
    """Return about how many rows the files have; None if only parsing can count them."""
    try:
        counts = [_count(file) for path in paths for file in list_files(path)]
    except (DataError, OSError):  # a data set of the hub, or what reading will refuse
        return None
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count(file: Path) -> int | None:
    kind = find_suffix(file)
    if kind == ".parquet":
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except (pyarrow.ArrowException, ValueError):
            return None
    if kind not in (".jsonl", ".ndjson"):
        return None
    ends, last = 0, b"\n"
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            ends, last = ends + block.count(b"\n"), block
    return ends + (not last.endswith(b"\n"))


WORTH_WORKERS_BYTES = 4 << 20  # below this size, starting processes takes longer than the work
MOST_WORKERS = 6  # more workers would only wait for the one process that reads and writes
UNPACKED = {".gz": 5, ".parquet": 4}  # approximate size of the rows relative to a file of that kind
Work = tuple[list[RawRow], float]  # a batch and the share of its prompts that is held out
_processor: list[RowProcessor] = []  # the processor of a started process; empty in every other process


def n_workers(paths: Sequence[str]) -> int:
    """Return how many processes are worth starting for these inputs; 1 means only the caller."""
    if any(is_hub_name(path) for path in paths):
        return min(usable_cores(), MOST_WORKERS)
    files = [file for path in paths for file in list_files(path)]
    n_bytes = sum(file.stat().st_size * UNPACKED.get(file.suffix.lower(), 1) for file in files)
    return 1 if n_bytes < WORTH_WORKERS_BYTES else min(usable_cores(), MOST_WORKERS)


def process_all(
    batches: Iterable[Work],
    renderer: Renderer,
    *,
    options: RowOptions,
    processes: int,
    processor: type[RowProcessor] = RowProcessor,
) -> Generator[list[RowOutcome]]:
    """Yield the outcomes of each batch, in order; batches are read only a little ahead. Close it to end its processes.
    Raise MachineError where one of the processes was killed.
    """
    if processes == 1:
        only = processor(renderer, options)
        yield from (only.process(rows, share) for rows, share in batches)
        return
    fix = "free memory, or prepare the data on a larger machine with `make process`"
    yield from work_through(
        batches,
        _process,
        processes=processes,
        killed=MachineError("a process that tokenises was killed from outside", where="data", fix=fix),
        initializer=_begin,
        initargs=(renderer.recipe(), options, processor),
    )


def _begin(recipe: Recipe, options: RowOptions, processor: type[RowProcessor]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the cores are shared out already
    _processor.append(processor(Renderer.from_recipe(recipe), options))


def _process(work: Work) -> list[RowOutcome]:
    rows, share = work
    return _processor[0].process(rows, share)


SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("labels", pa.list_(pa.int64())), ("row", pa.int64())])
# The second stream of each row stream: where its examples came from.
PLACES = pa.schema([("path", pa.string()), ("line", pa.int64()), ("record", pa.int64())])

CHATS, REFUSED, REPORT = "held_out_chats.jsonl", "refused_rows.jsonl", "report.json"


class Output(Protocol):
    """The receiver of what a pass keeps, batch by batch."""

    def begin(self, policies: RowPolicies) -> int:
        """Return how many rows an earlier pass has done, and restore `policies` to that point; 0 to do all again."""
        return 0

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


def token_lists(rows: Sequence[bytes]) -> pa.Array:
    """Return rows of int32 as a column of token ids."""
    flat = np.frombuffer(b"".join(rows), np.int32).astype(np.int64)
    ends = np.cumsum([0, *(len(ids) // 4 for ids in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))


class RowFiles(Output):
    """Files of a folder: the rows of each side and their places as Arrow streams, the rest as JSON."""

    schemas: Mapping[str, pa.Schema] = {"": SCHEMA, "_places": PLACES}
    """End of a stream's name, after that of its side -> its columns."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, ExitStack()
        self._streams = {
            side + name: self._files.enter_context(pa.ipc.new_stream(str(folder / f"{side}{name}.arrow"), schema))
            for side in SIDES
            for name, schema in self.schemas.items()
        }
        self._chats = self._files.enter_context((folder / CHATS).open("w", encoding="utf-8"))
        self._refused = self._files.enter_context((folder / REFUSED).open("w", encoding="utf-8"))

    def __enter__(self) -> RowFiles:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def write(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> None:
        if not kept:
            return
        columns: dict[str, Any] = {
            "input_ids": token_lists([example.ids for _, example in kept]),
            "labels": token_lists([example.labels for _, example in kept]),
            "row": [outcome.row for outcome, _ in kept],
            **self.more_columns(side, kept),
        }
        places = [outcome.source for outcome, _ in kept]
        columns |= {name: [getattr(place, name) for place in places] for name in PLACES.names}
        for name, schema in self.schemas.items():
            self._streams[side + name].write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))

    def more_columns(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> dict[str, Any]:
        """Return what another task's schemas have besides."""
        return {}

    def write_chat(self, chat: str) -> None:
        self._chats.write(chat + "\n")

    def write_refused(self, place: Source, reason: str) -> None:
        self._refused.write(refused_line(place, reason))

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """Do nothing: the files are read only when they are whole."""

    def finish(self, report: dict[str, Any]) -> None:
        (self._folder / REPORT).write_text(json.dumps(report), encoding="utf-8")


def refused_line(place: Source, reason: str) -> str:
    """Format the line of a row that cannot be used, for REFUSED."""
    return json.dumps({"path": place.path, "line": place.line, "record": place.record, "reason": reason}) + "\n"


BATCH_ROWS, BATCH_CHARACTERS = 256, 1 << 19
SECONDS_BETWEEN_LINES = 1.0

KEPT_WHOLE = 0.99  # share of the rows that is not cut where cutting is worth no word


@dataclass(frozen=True)
class Input:
    """A file or folder and the share of its prompts that is held out: 0 for none, 1 for all."""

    path: str
    share: float


class Preparation:
    """Make token rows of the rows of files, and judge and count each of them."""

    processor: type[RowProcessor] = RowProcessor
    """What makes outcomes of rows; a task with rows of another shape has its own."""

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

    def run(self, inputs: Sequence[Input], output: Output, *, guarded: Sequence[Input] = ()) -> None:
        """Read `inputs`, training rows first, and hand everything to `output`.

        What `guarded` and `inputs` hold out must not be trained on.
        Raise DataError where a file cannot be read; or a bad, too long or leaked row, where the config says error: then
        the first five are named with file, line and reason, and all are counted. Or no end of turn is learned.
        """
        for given in guarded:
            self._guard(given)
        began = shown_at = time.monotonic()
        paths = [given.path for given in inputs]
        n_rows = count_rows(paths)
        n_read = n_done = output.begin(self._policies)
        for given in inputs:
            if n_done and given.share == 1.0:  # its rows are not read again
                self._guard(given)

        def format_rate(n_rows: int, now: float) -> str:
            return f"{n_rows / max(now - began, 1e-3):,.0f} rows/s"

        # Held-out rows go first: a training row must be compared with all of them.
        batches = self._batches(list(reversed(inputs)), n_done)
        processed = process_all(
            batches, self._renderer, options=self._options, processes=n_workers(paths), processor=self.processor
        )
        with closing(processed):  # whatever happens here, its processes end now
            for outcomes in processed:
                n_read += len(outcomes)
                self._take(outcomes, output)
                output.end_batch(outcomes, self._policies)
                now = time.monotonic()
                if now - shown_at >= SECONDS_BETWEEN_LINES:
                    shown_at = now
                    log.progress(n_read, n_rows, what="rows", text=format_rate(n_read, now), tag="data")
        now, n_new = time.monotonic(), n_read - n_done
        log.say(f"{plural(n_new, 'row')} read in {format_seconds(now - began)}, {format_rate(n_new, now)}", "data")
        self._policies.check()
        counts = self._policies.counts["train"]
        if counts.chat_examples and not counts.ends_learned:  # such a model would never stop
            what = f"the end-of-turn token is in the loss of none of {counts.chat_examples:,} examples: all are cut at"
            what += f" {self._max_tokens:,} tokens; 99 % have up to {counts.length_that_keeps(KEPT_WHOLE):,}"
            raise DataError(what, where=paths[0], fix=FIX_CUT)
        output.finish(self._report(inputs))

    def _guard(self, given: Input) -> None:
        for source, row in read_rows(given.path, self._dialect):
            if not isinstance(row, Refused):
                with suppress(DataError):  # this row is counted when the file itself is measured on
                    keys = compute_keys(to_record(row, source, reading=self._options.reading))
                    if is_held_out(keys, given.share):
                        self._policies.guard(keys.normal, source)

    def _batches(self, inputs: Sequence[Input], n_done: int) -> Iterator[Work]:
        """Yield all batches of rows behind the first `n_done`."""
        for given in inputs:
            batch: list[RawRow] = []
            size = 0
            for row, (source, raw) in enumerate(read_raw(given.path, self._dialect)):
                if n_done:
                    n_done -= 1
                    continue
                batch.append((row, source, raw))
                size += _measure(raw)
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

    def _report(self, inputs: Sequence[Input]) -> dict[str, Any]:
        paths: dict[Side, str] = {"train": inputs[0].path, "held_out": inputs[-1].path}
        counts, warnings = self._policies.counts, []
        for side, path in paths.items():
            found = counts[side]
            n_cut = found.cut + found.dropped[CUT_AWAY]
            if n_cut > (1 - KEPT_WHOLE) * found.read and found.lost_share:
                lost = f"{found.lost_share:.0%}" if found.lost_share >= 0.005 else "less than 1%"
                warnings.append(
                    f"{path}: {n_cut:,} of {found.read:,} rows are cut at {self._max_tokens:,} tokens, which loses"
                    f" {lost} of what they teach; the longest has {found.longest:,};"
                    f" model.max_seq_len: {found.length_that_keeps(KEPT_WHOLE)} keeps 99 % of them whole"
                )
        return {
            **total(counts.values()).as_json(),
            "mask_method": self._renderer.method,
            "template_hash": self._renderer.template_hash,
            "max_seq_len": self._max_tokens,
            "sources": {side: {"path": paths[side], **counts[side].as_json()} for side in SIDES if counts[side].read},
            "warnings": warnings,
            "notes": self._notes(inputs),
        }

    def _notes(self, inputs: Sequence[Input]) -> list[str]:
        notes = []
        share = inputs[-1].share
        if share and not self._policies.counts["held_out"].examples:
            has_chats = self._policies.counts["train"].chat_examples > 0
            few = f"too few {'prompts' if has_chats else 'texts'} for a share of {share:g}"
            if has_chats and len(self._policies.answers) < 2:
                few = "there is only one prompt"
            notes.append(f"nothing is held out: {few}; raise data.split or give data.val_path")
        for given in inputs:
            if others := other_files(given.path):
                named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
                notes.append(f"{given.path}: files of other kinds are left alone: {named}")
        return notes


def _measure(value: Any) -> int:
    """Return about how many characters a raw row has."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_measure, value.values()))
    return sum(map(_measure, value)) if isinstance(value, list) else 8
