"""Looks at the rows of a data file: their layout, the columns they are read from, what cannot be read.

It opens no tokenizer. Columns that no layout knows are found by their names, and never without saying so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.data.layouts.convert import Reading, layout_of, reading_of, to_record
from sftplay.data.layouts.fields import listed
from sftplay.data.read.sources import dialect_of, read_rows
from sftplay.data.records import Record, Refused, Source
from sftplay.errors import DataError

SURVEYED_ROWS = 5_000
"""Rows from the beginning that are looked at."""

QUESTIONS = ("question", "query", "prompt", "instruction", "input", "problem", "puzzle", "task", "request", "source")
ANSWERS = ("answer", "response", "completion", "output", "canonical_solution", "solution", "code", "target", "label",
           "summary", "reply")  # fmt: skip
TEXTS = ("content", "document", "article", "body", "passage")
"""Names of columns in files that no layout knows, the likeliest first."""

MOST_REFUSED = 0.5
"""From this share of unreadable rows on, the file is not what it was taken for."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the first rows of a file are."""

    layouts: tuple[str, ...]
    """The layouts of its rows, the most frequent first."""

    columns: Mapping[str, str]
    """Field -> column, where the names were guessed; empty where a layout knows them."""

    records: Sequence[Record]
    refused: tuple[str, ...]
    """Place and reason of each row that cannot be read."""

    is_all: bool
    """No rows follow those that were looked at."""


def survey_rows(cfg: RunConfig) -> Survey:
    """The survey of `data.train_path`, read as the section `data` says.

    Raises:
        DataError: the file cannot be read, has no rows, or most of its rows have no layout that could be told.
    """
    path = cfg.rows_path
    rows = list(islice(read_rows(path, dialect_of(cfg.data)), SURVEYED_ROWS + 1))
    surveyed = rows[:SURVEYED_ROWS]
    if not surveyed:
        raise DataError("has no rows", where=path, fix="name a file with at least one row")
    reading, columns = reading_of(cfg.data), {}
    if reading.format == "auto" and not reading.columns and _is_unknown(surveyed):
        columns = _guess_columns([row for _, row in surveyed if not isinstance(row, Refused)], path)
        reading = replace(reading, columns=tuple(columns.items()))
    records, refused, layouts = _read(surveyed, reading)
    if len(refused) > MOST_REFUSED * len(surveyed):
        reasons = "".join(f"\n  {reason}" for reason in refused[:3])
        what = f"{len(refused):,} of its first {len(surveyed):,} rows cannot be read{reasons}"
        fix = "name its layout with data.format=..., its columns with data.columns.question=... or the like"
        raise DataError(what, where=path, fix=fix)
    return Survey(
        layouts=tuple(layout for layout, _ in layouts.most_common()),
        columns=columns,
        records=records,
        refused=tuple(refused),
        is_all=len(rows) == len(surveyed),
    )


def _is_unknown(rows: Sequence[tuple[Source, Any]]) -> bool:
    """True where the rows are objects and no layout knows the columns of most of them."""
    objects = [row for _, row in rows if not isinstance(row, Refused)]
    known = sum(layout_of(row) is not None for row in objects)
    return bool(objects) and 2 * known < len(objects)


def _guess_columns(rows: Sequence[Mapping[str, Any]], path: str) -> dict[str, str]:
    """A question's and an answer's column, or one of texts, by their names.

    Raises:
        DataError: no two columns have such names.
    """
    filled = Counter(name for row in rows for name, value in row.items() if isinstance(value, str) and value.strip())
    texts = {name for name, count in filled.items() if 2 * count > len(rows)}
    question, answer = (next((name for name in names if name in texts), None) for names in (QUESTIONS, ANSWERS))
    if question and answer:
        return {"question": question, "answer": answer}
    text = next((name for name in TEXTS if name in texts), None)
    if text and not question and not answer:
        return {"text": text}
    names = list(dict.fromkeys(name for row in rows[:SURVEYED_ROWS] for name in row))
    example = sorted(texts) if len(texts) == 2 else ["ASKED", "ANSWERED"]
    fix = f"say which is which: data.columns.question={example[0]} data.columns.answer={example[1]}"
    raise DataError(f"no layout is known for its columns {listed(names)}", where=path, fix=fix)


def _read(rows: Sequence[tuple[Source, Any]], reading: Reading) -> tuple[list[Record], list[str], Counter[str]]:
    records: list[Record] = []
    refused: list[str] = []
    layouts: Counter[str] = Counter()
    for source, row in rows:
        if isinstance(row, Refused):
            refused.append(f"{source} {row.reason}")
            continue
        try:
            records.append(to_record(row, source, reading=reading))
        except DataError as error:
            refused.append(f"{source} {error.what}")
            continue
        layouts[_layout(row, reading)] += 1
    return records, refused, layouts


def _layout(row: Mapping[str, Any], reading: Reading) -> str:
    if reading.format != "auto":
        return reading.format
    given = {column: field for field, column in reading.columns}
    names = [given.get(name, name) for name, value in row.items() if value is not None]
    return layout_of(names, given.values()) or "none"
