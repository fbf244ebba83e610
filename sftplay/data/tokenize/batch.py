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
from sftplay.data.read.json_rows import UnparsedRow, parsed
from sftplay.data.records import IGNORE_INDEX, Chat, Record, Refused, Source, Text, compute_keys
from sftplay.data.render.labels import Rendered
from sftplay.data.render.render import Renderer
from sftplay.errors import DataError

TooLong = Literal["truncate", "drop", "error"]

CUT_AWAY = "no_trainable_token_after_cut"  # why a row is dropped if only its prompt is left after the cut


RawRow = tuple[int, Source, UnparsedRow]
"""Number, place and bytes of a row. Numbers count the rows of a source in reading order, from 0, refused ones too."""


@dataclass(slots=True)
class Example:
    """One training example that fits."""

    ids: bytes
    labels: bytes  # Both as int32. Documents that are kept whole have no labels here: all is learned.
    n_labels: int  # tokens that are learned
    is_cut: bool
    ends_learned: bool  # the last learned token ends a turn
    n_bytes: int = 0  # bytes of the text it spells, as UTF-8; 0 for a chat


@dataclass(slots=True)
class RowOutcome:
    """The outcome of one raw row."""

    row: int
    source: Source
    refused: str = ""  # why it cannot be read or rendered
    fix: str = ""  # the remedy, where it is known
    held_out: bool = False
    is_chat: bool = True
    keys: tuple[int, int, int] = (0, 0, 0)
    """Short digests of its content, of the content's normal form, of the prompt's normal form."""

    examples: list[Example] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each example before cutting; also of examples that are not kept."""

    learnable: int = 0  # tokens of all its examples that would be learned if nothing was cut
    dropped: str = ""  # why an example of it was left out
    chat: str = ""  # the chat as json, where it is held out
    n_bytes: int = 0  # bytes of a plain text, as UTF-8
    n_escaped: int = 0
    system: str = ""  # the text of its system turn; empty where there is none
    unused: tuple[str, ...] = ()  # columns that its layout does not read
    tested: str = ""  # its id, where it is one of the published problems by which models are tested


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The settings for single rows."""

    reading: LayoutOptions
    max_tokens: int | None  # longest example; None where nothing is too long
    too_long: TooLong
    only_held_out: bool = False  # rows to train on are read, to find their side, but not rendered
    only_chats: bool = False  # plain texts are refused


class RowProcessor:
    """Turn batches of raw rows into outcomes, in order."""

    def __init__(self, renderer: Renderer, options: RowOptions) -> None:
        self._renderer, self._options = renderer, options
        self._ends = set(renderer.end_token_ids)

    def process(self, rows: Sequence[RawRow], share: float) -> list[RowOutcome]:
        """Return one outcome for each row; `share` of all prompts is held out (0 none, 1 all)."""
        outcomes, waiting, records = [], [], []
        for row, source, raw in rows:
            outcome = RowOutcome(row, source, held_out=share == 1.0)
            outcomes.append(outcome)
            record = self._read(raw, outcome, share=share)
            if record is not None and (outcome.held_out or not self._options.only_held_out):
                waiting.append(outcome)
                records.append(record)
        groups: list[list[Rendered]] = [[] for _ in records]
        for example in self._renderer.render(records, self._options.max_tokens):
            groups[example.record_index].append(example)
        for outcome, group in zip(waiting, groups, strict=True):
            outcome.refused = next((example.problem for example in group if example.problem), "")
            for example in [] if outcome.refused else group:
                outcome.n_escaped += example.n_escaped
                outcome.lengths.append(len(example.input_ids))
                outcome.learnable += _count_learned(example.labels)
                fitted = self._cut(example)
                if isinstance(fitted, Example):
                    fitted.n_bytes = outcome.n_bytes
                    outcome.examples.append(fitted)
                else:
                    outcome.dropped = fitted
        return outcomes

    def _read(self, raw: UnparsedRow, outcome: RowOutcome, *, share: float) -> Record | None:
        """Return the record of a raw row, and note in its outcome what it is, or why there is none."""
        row, options = parsed(raw), self._options
        if isinstance(row, Refused):
            outcome.refused = row.reason
            return None
        try:
            record = to_record(row, outcome.source, reading=options.reading)
        except DataError as error:
            outcome.refused, outcome.fix = error.what, error.fix
            return None
        if options.only_chats and isinstance(record, Text):
            outcome.refused = "is a plain text, and its source has type: chat"
            outcome.fix = "give the source type: cpt, or remove the row"
            return None
        outcome.unused, outcome.tested = unused_columns(row, options.reading), published_test_id(row)
        keys = compute_keys(record)
        outcome.keys = hash64(keys.content), hash64(keys.normal), hash64(keys.prompt)
        outcome.held_out = is_held_out(keys, share)
        outcome.is_chat = isinstance(record, Chat)
        if isinstance(record, Chat):
            first = record.messages[0]
            outcome.system = first.content if first.role == "system" else ""
            outcome.chat = json.dumps(record.as_json()) if outcome.held_out else ""
        else:
            outcome.n_bytes = len(record.text.encode("utf-8", "surrogatepass"))
        return record

    def _cut(self, example: Rendered) -> Example | str:
        """Return the example as far as it fits, or why it is left out."""
        limit = self._options.max_tokens
        is_long = limit is not None and len(example.input_ids) > limit
        if is_long and self._options.too_long != "truncate":
            return "too_long"
        ids, labels = example.input_ids[:limit], example.labels[:limit]
        n_labels = _count_learned(labels)
        if not n_labels:
            return CUT_AWAY if is_long else "no_trainable_token"
        last = next(label for label in reversed(labels) if label != IGNORE_INDEX)
        kept = b"" if limit is None else array("i", labels).tobytes()
        return Example(array("i", ids).tobytes(), kept, n_labels, is_long, last in self._ends)


def _count_learned(labels: Sequence[int]) -> int:
    return len(labels) - labels.count(IGNORE_INDEX)


def hash64(key: bytes) -> int:
    """Return a record's key as a number that takes little memory.

    The chance that two of ten million different records share its eight bytes is 3 in a million.
    """
    return int.from_bytes(key[:8], "big")
