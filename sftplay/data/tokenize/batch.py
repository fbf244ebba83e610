"""Process one batch of raw rows: parse, convert, render, cut. Nothing is decided across rows.

It may run in several processes (`workers`): all input and output can be pickled, and neither transformers nor torch is
imported.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sftplay.data.layouts.convert import LayoutOptions, to_record, unused_columns
from sftplay.data.order import is_held_out
from sftplay.data.problems.problem import published_test_id
from sftplay.data.read.json_rows import JsonRow, parsed
from sftplay.data.records import IGNORE_INDEX, Chat, Record, Refused, Source, Text, compute_keys
from sftplay.data.render.labels import Rendered
from sftplay.data.render.render import Renderer
from sftplay.errors import DataError

TooLong = Literal["truncate", "drop", "error"]

CUT_AWAY = "no_trainable_token_after_cut"
"""Why a row is dropped if only its prompt is left after the cut."""

FIX_TYPE = "give the source type: cpt, or remove the row"

KEY_BYTES = 8
"""Bytes of each digest. The chance that two of ten million different records share them is 3 in a million."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A raw row and its place."""

    row: int
    """Number in its source in reading order, from 0; refused rows count, blank lines do not."""

    source: Source
    raw: bytes | str | JsonRow | Refused


@dataclass(slots=True)
class Example:
    """One training example that fits."""

    ids: bytes
    labels: bytes
    """Both as int32. Documents that are kept whole have no labels here: all is learned."""

    n_labels: int
    """Tokens that are learned."""

    is_cut: bool
    ends_learned: bool
    """The last learned token ends a turn."""

    n_bytes: int = 0
    """Bytes of the text it spells, as UTF-8; 0 for a chat."""


@dataclass(slots=True)
class RowOutcome:
    """The outcome of one raw row."""

    row: int
    source: Source
    refused: str = ""
    """Why it cannot be read or rendered."""

    fix: str = ""
    """The remedy, where it is known."""

    held_out: bool = False
    is_chat: bool = True
    keys: tuple[int, int, int] = (0, 0, 0)
    """Short digests of its content, of the content's normal form, of the prompt's normal form."""

    examples: list[Example] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each example before cutting; also of examples that are not kept."""

    learnable: int = 0
    """Tokens of all its examples that would be learned if nothing was cut."""

    dropped: str = ""
    """Why an example of it was left out."""

    chat: str = ""
    """The chat as json, where it is held out."""

    n_bytes: int = 0
    """Bytes of a plain text, as UTF-8."""

    n_escaped: int = 0
    has_system: str = ""
    """The text of its system turn; empty where there is none."""

    unused: tuple[str, ...] = ()
    """Columns that its layout does not read."""

    tested: str = ""
    """Its id, where it is one of the published problems by which models are tested."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The settings for single rows."""

    reading: LayoutOptions
    max_tokens: int | None
    """Longest example; None where nothing is too long."""

    too_long: TooLong
    only_held_out: bool = False
    """Rows to train on are read, to find their side, but not rendered."""

    only_chats: bool = False
    """Plain texts are refused."""


class RowProcessor:
    """Turn batches of raw rows into outcomes, in order."""

    def __init__(self, renderer: Renderer, options: RowOptions) -> None:
        self._renderer, self._options = renderer, options
        self._ends = set(renderer.end_token_ids)

    def process(self, rows: Sequence[RawRow], share: float) -> list[RowOutcome]:
        """One outcome for each row; `share` of all prompts is held out (0 none, 1 all)."""
        outcomes, waiting, records = [], [], []
        for row in rows:
            outcome = RowOutcome(row.row, row.source, held_out=share == 1.0)
            outcomes.append(outcome)
            record = self._record(row, outcome)
            if record is not None:
                self._describe(record, outcome, share=share)
                if outcome.held_out or not self._options.only_held_out:
                    waiting.append(outcome)
                    records.append(record)
        groups: list[list[Rendered]] = [[] for _ in records]
        for example in self._renderer.render(records, self._options.max_tokens):
            groups[example.record_index].append(example)
        for outcome, group in zip(waiting, groups, strict=True):
            self._fill(outcome, group)
        return outcomes

    def _record(self, raw_row: RawRow, outcome: RowOutcome) -> Record | None:
        row = parsed(raw_row.raw)
        if isinstance(row, Refused):
            outcome.refused = row.reason
            return None
        try:
            record = to_record(row, raw_row.source, reading=self._options.reading)
        except DataError as error:
            outcome.refused, outcome.fix = error.what, error.fix
            return None
        if self._options.only_chats and isinstance(record, Text):
            outcome.refused, outcome.fix = "is a plain text, and its source has type: chat", FIX_TYPE
            return None
        outcome.unused = unused_columns(row, self._options.reading)
        outcome.tested = published_test_id(row)
        return record

    def _describe(self, record: Record, outcome: RowOutcome, *, share: float) -> None:
        keys = compute_keys(record)
        outcome.keys = hash64(keys.content), hash64(keys.normal), hash64(keys.prompt)
        outcome.held_out = is_held_out(keys, share)
        outcome.is_chat = isinstance(record, Chat)
        if isinstance(record, Chat):
            first = record.messages[0]
            outcome.has_system = first.content if first.role == "system" else ""
            outcome.chat = json.dumps(record.as_json()) if outcome.held_out else ""
        else:
            outcome.n_bytes = len(record.text.encode("utf-8", "surrogatepass"))

    def _fill(self, outcome: RowOutcome, group: list[Rendered]) -> None:
        problem = next((example.problem for example in group if example.problem), "")
        if problem:
            outcome.refused = problem
            return
        for example in group:
            outcome.n_escaped += example.n_escaped
            outcome.lengths.append(len(example.input_ids))
            outcome.learnable += _n_learned(example.labels)
            fitted = self._fitted(example)
            if isinstance(fitted, Example):
                fitted.n_bytes = outcome.n_bytes
                outcome.examples.append(fitted)
            else:
                outcome.dropped = fitted

    def _fitted(self, example: Rendered) -> Example | str:
        """The example as far as it fits, or why it is left out."""
        limit = self._options.max_tokens
        is_long = limit is not None and len(example.input_ids) > limit
        if is_long and self._options.too_long != "truncate":
            return "too_long"
        ids, labels = example.input_ids, example.labels
        if is_long:
            ids, labels = ids[:limit], labels[:limit]
        n_labels = _n_learned(labels)
        if not n_labels:
            return CUT_AWAY if is_long else "no_trainable_token"
        last = next(label for label in reversed(labels) if label != IGNORE_INDEX)
        kept = b"" if limit is None else array("i", labels).tobytes()
        return Example(array("i", ids).tobytes(), kept, n_labels, is_long, last in self._ends)


def _n_learned(labels: Sequence[int]) -> int:
    return len(labels) - labels.count(IGNORE_INDEX)


def hash64(key: bytes) -> int:
    """A record's key as a number that takes little memory."""
    return int.from_bytes(key[:KEY_BYTES], "big")
