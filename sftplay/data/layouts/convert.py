"""Foreign layouts of a row -> the canonical record, or a reason why not.

It looks at one row at a time and never guesses: what it cannot place it refuses with file, line and remedy. The
layouts themselves are in `columns`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sftplay.data.layouts.columns import (
    FIX_LAYOUT,
    INGESTED,
    QUESTIONS,
    SHAPES,
    SYSTEM,
    TOOLS,
    needed_text,
    optional,
    picked,
)
from sftplay.data.layouts.turns import (
    RowFields,
    check_order,
    expect_text,
    is_blank,
    listed,
    refuse,
    tie_results,
    tools_text,
)
from sftplay.data.records import Chat, Message, Record, Source, Text
from sftplay.errors import DataError

if TYPE_CHECKING:
    from sftplay.config.data import DataConfig, Layout


@dataclass(frozen=True)
class LayoutOptions:
    """The settings by which rows are understood."""

    format: Layout | Literal["auto"] = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs of our field and the file's column; a field that is not listed keeps its own name."""

    system: str | None = None  # system prompt of every chat without one


def read_layout_options(data: DataConfig) -> LayoutOptions:
    """Read from the config how rows are to be understood."""
    return LayoutOptions(format=data.format, columns=tuple(data.columns.items()), system=data.system)


def to_record(row: RowFields, source: Source, *, reading: LayoutOptions = LayoutOptions()) -> Record:
    """Convert the row to a record that obeys every rule of its kind; texts are kept to the character.

    Raises DataError: the row has no known layout or breaks a rule; `where` is file:line, `what` the reason.
    """
    try:
        row = _rename_columns(row, reading)
        shape = SHAPES[_find_layout(row, reading)]
        if shape.body is None:
            text = needed_text(row, ("text",))
            if not text or text.isspace():
                refuse("text is empty")
            return Text(text, source)
        body = shape.body(row)
        turns = tie_results(body.turns)
        if not any(turn.role == "assistant" for turn in turns):
            refuse("has no assistant turn, so there is nothing to learn")
        if turns[-1].role != "assistant":
            last = "a tool's result" if turns[-1].role == "tool" else "a user turn"
            refuse(f"ends with {last} that has no answer")
        check_order(turns)
        lead = _find_lead(row, turns, reading=reading)
        learned_from = len(lead) + body.n_given if body.n_given else 0
        tools = tools_text(optional(row, TOOLS)) if TOOLS in shape.may else ""
        columns = json.dumps(body.columns, ensure_ascii=False) if body.columns else ""
        return Chat((*lead, *turns), source, learned_from, tools, columns)
    except DataError as error:
        raise DataError(error.what, where=str(source), fix=error.fix) from None


def read_prompt(
    row: RowFields, source: Source, *, reading: LayoutOptions = LayoutOptions()
) -> tuple[tuple[Message, ...], str]:
    """Return the messages of a row that the assistant shall answer, and its tools as JSON text.

    It is read from every layout of a chat. An answer in the row is left out: the model shall give a new one.

    Raises DataError: it has no question, or breaks a rule.
    """
    first = (reading.format,) if reading.format in QUESTIONS else ()
    # A file with mapped columns has no published layout.
    shapes = [SHAPES[name] for name in (*first, *QUESTIONS) if not (SHAPES[name].is_published and reading.columns)]
    try:
        row = _rename_columns(row, reading, is_partial=True)
        shape = next((shape for shape in shapes if optional(row, shape.asked) is not None), None)
        if shape is None:
            columns = ", ".join(repr(SHAPES[name].asked[0]) for name in QUESTIONS if not SHAPES[name].is_published)
            fix = f"name the question with one of {columns}; or map its column with data.columns"
            refuse(f"has no question; its keys are {listed(row)}", fix)
        turns = tie_results(shape.ask(row) if shape.ask else (Message("user", needed_text(row, shape.asked)),))
        check_order(turns)
        if len(turns) > 1 and turns[-1].role == "assistant":
            turns = turns[:-1]
        if not turns or turns[-1].role in ("assistant", "system"):
            refuse("does not end with a turn that can be answered", "end it with a user turn or a tool's result")
        return (*_find_lead(row, turns, reading=reading), *turns), tools_text(optional(row, TOOLS))
    except DataError as error:
        raise DataError(error.what, where=str(source), fix=error.fix) from None


def read_beginning(row: RowFields, *, reading: LayoutOptions = LayoutOptions()) -> str:
    """Return the text of a row that is plain text, which a model goes on writing; empty for every other row."""
    view = _rename_columns(row, reading, is_partial=True)
    is_asked = any(optional(view, SHAPES[layout].asked) is not None for layout in QUESTIONS)
    text = None if is_asked and reading.format != "text" else optional(view, ("text",))
    return text if isinstance(text, str) else ""


def unused_columns(row: RowFields, reading: LayoutOptions = LayoutOptions()) -> tuple[str, ...]:
    """The row's columns that its layout does not read, by the file's names; empty ones are not counted.

    Nor are those that `ingest` writes next to a text to record where it is from.
    """
    try:
        view = _rename_columns(row, reading)
        shape = SHAPES[_find_layout(view, reading)]
    except DataError:
        return ()
    names = dict(reading.columns)
    read = {names.get(name, name) for group in (*shape.needs, *shape.may) if (name := picked(view, group))}
    if shape.body is None and row.keys() >= INGESTED:
        read |= INGESTED
    unused = [name for name, value in row.items() if name not in read and value is not None and value != ""]
    return tuple(name.encode("utf-8", "backslashreplace").decode() for name in unused)


def detect_layout(names: Iterable[str], mapped: Iterable[str] = ()) -> Layout | None:
    """Return the first layout that has all it needs among the names and reads every field in `mapped`, or None."""
    present, asked = set(names), set(mapped)
    for layout, shape in SHAPES.items():
        if all(not present.isdisjoint(group) for group in shape.needs) and asked <= shape.fields:
            return layout
    return None


def _find_layout(row: RowFields, reading: LayoutOptions) -> Layout:
    mapped = [field for field, _ in reading.columns]
    if reading.format != "auto":
        if idle := set(mapped) - SHAPES[reading.format].fields:
            what = f"data.columns maps {listed(sorted(idle))}, which the layout {reading.format} does not read"
            refuse(what, "map the fields of that layout, or set data.format to the one that is meant")
        return reading.format
    # In a table of mixed layouts the columns of the others are null.
    used = [name for name, value in row.items() if value is not None]
    found = detect_layout(used, mapped) or detect_layout(row, mapped)
    if found is None:
        with_these = f" and reads {listed(mapped)}, as data.columns asks" if mapped else ""
        refuse(f"no known layout has the keys {listed(row)}{with_these}", FIX_LAYOUT)
    return found


def _rename_columns(row: RowFields, reading: LayoutOptions, *, is_partial: bool = False) -> RowFields:
    """Return the row under our names; with `is_partial`, mapped columns may be missing."""
    if not reading.columns:
        return row
    given = {column: field for field, column in reading.columns}
    if len(given) < len(reading.columns):
        refuse("data.columns gives one column to two fields", "keep each column in one of the two")
    missing = [column for column in given if column not in row]
    if missing and not is_partial:
        what = f"has no column {missing[0]!r}, to which data.columns maps {given[missing[0]]!r}"
        refuse(f"{what}; its keys are {listed(row)}", "correct data.columns, or the row")
    ours = set(given.values())
    kept = {name: value for name, value in row.items() if name not in ours and name not in given}
    return kept | {field: row[column] for column, field in given.items() if column in row}


def _find_lead(row: RowFields, turns: tuple[Message, ...], *, reading: LayoutOptions) -> tuple[Message, ...]:
    """Return the system turn that goes before these turns, if there is to be one."""
    in_column = optional(row, SYSTEM)
    has_turn = bool(turns) and turns[0].role == "system"
    if not is_blank(in_column):
        text = expect_text(in_column, "system")
        if has_turn and turns[0].content != text:
            refuse("has a system prompt in its column 'system' and another one in its first turn")
        return () if has_turn else (Message("system", text),)
    return () if has_turn or not reading.system else (Message("system", reading.system),)
