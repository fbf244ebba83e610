"""One row as a prompt: its question, and the columns that rewards read by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sftplay.config.data import Layout
from sftplay.data.files import RowFields, listed, refuse
from sftplay.data.layouts import (
    DEFAULT_OPTIONS,
    SHAPES,
    LayoutOptions,
    check_order,
    find_lead,
    needed_text,
    optional,
    read_tools,
    rename_columns,
    tie_results,
    to_record,
)
from sftplay.data.records import Chat, Message, Source, Text
from sftplay.errors import DataError

ANSWER = "answer"  # the column of the right answer: that of the row, else the last assistant turn of the row


@dataclass(frozen=True)
class Prompt:
    """One row: its number in the whole file, its place, its fields, and the question that they hold."""

    number: int
    source: Source
    row: RowFields
    messages: tuple[Message, ...]
    tools: str
    beginning: str = ""  # A plain text that the model goes on writing; then there are no messages

    def prompt(self, renderer: Any) -> list[int]:
        """Return the tokens of the prompt; raise DataError, with the row's place, where the template refuses it."""
        try:
            if self.beginning:
                return list(renderer.beginning_ids(self.beginning))
            return list(renderer.prompt_ids(self.messages, self.tools))
        except DataError as error:
            raise DataError(error.what, where=str(self.source), fix=error.fix) from error

    @property
    def question(self) -> str:
        """The text of the last turn."""
        return self.beginning or self.messages[-1].content

    def extra_content(self, system: str | None) -> str:
        """Describe what the row has in addition to `question`; `system` is the system prompt of all rows."""
        earlier = [turn for turn in self.messages[:-1] if (turn.role, turn.content) != ("system", system)]
        if any(turn.role == "system" for turn in earlier):
            return "a system prompt of its own"
        if earlier:
            return f"{len(earlier)} turns before its last one" if len(earlier) > 1 else "a turn before its last one"
        return "tools" if self.tools else ""

    @property
    def unanswered(self) -> Chat | Text:
        """The question as a record: two prompts are equal if these have equal content."""
        if self.beginning:
            return Text(self.beginning, self.source)
        return Chat((*self.messages, Message("assistant", "")), self.source, tools=self.tools)


QUESTIONS: tuple[Layout, ...] = (
    *("mbpp", "humaneval", "messages", "sharegpt"),
    *("prompt_completion", "alpaca", "system_user_assistant", "question_answer"),
)
"""In the order in which a row's keys are searched for a question: an answer column does not identify a layout."""


def read_prompt(
    row: RowFields, source: Source, *, reading: LayoutOptions = DEFAULT_OPTIONS
) -> tuple[tuple[Message, ...], str]:
    """Return the messages of a row that the assistant shall answer, and its tools as JSON text.

    It is read from every layout of a chat. An answer in the row is left out: the model shall give a new one.
    Raise DataError where it has no question, or breaks a rule.
    """
    first = (reading.format,) if reading.format in QUESTIONS else ()
    # A file with mapped columns has no published layout.
    shapes = [SHAPES[name] for name in (*first, *QUESTIONS) if not (SHAPES[name].is_published and reading.columns)]
    try:
        row = rename_columns(row, reading, is_partial=True)
        shape = next((shape for shape in shapes if optional(row, shape.needs[0]) is not None), None)
        if shape is None:
            columns = ", ".join(repr(SHAPES[name].needs[0][0]) for name in QUESTIONS if not SHAPES[name].is_published)
            fix = f"name the question with one of {columns}; or map its column with data.columns"
            refuse(f"has no question; its keys are {listed(row)}", fix)
        turns = tie_results(shape.ask(row) if shape.ask else (Message("user", needed_text(row, shape.needs[0])),))
        check_order(turns)
        if len(turns) > 1 and turns[-1].role == "assistant":
            turns = turns[:-1]
        if not turns or turns[-1].role in ("assistant", "system"):
            refuse("does not end with a turn that can be answered", "end it with a user turn or a tool's result")
        return (*find_lead(row, turns, reading=reading), *turns), read_tools(row)
    except DataError as error:
        raise DataError(error.what, where=str(source), fix=error.fix) from None


def read_beginning(row: RowFields, *, reading: LayoutOptions = DEFAULT_OPTIONS) -> str:
    """Return the text of a row that is plain text, which a model goes on writing; empty for every other row."""
    view = rename_columns(row, reading, is_partial=True)
    is_asked = any(optional(view, SHAPES[layout].needs[0]) is not None for layout in QUESTIONS)
    text = None if is_asked and reading.format != "text" else optional(view, ("text",))
    return text if isinstance(text, str) else ""


def to_prompt(row: RowFields, source: Source, *, number: int, reading: LayoutOptions) -> Prompt:
    """Read the question of a row of any layout that training reads, and of one that has `prompt` alone.
    Raise DataError where it has no question, or breaks a rule.
    """
    if text := read_beginning(row, reading=reading):
        return Prompt(number, source, row, (), "", text)
    return Prompt(number, source, row, *read_prompt(row, source, reading=reading))


def read_reward_columns(row: RowFields, source: Source, *, reading: LayoutOptions) -> dict[str, Any]:
    """Return what rewards read of a row: its columns, by the names of the file and of `data.columns`, and `answer`.

    A published problem also has its tests, see `data.problems`.
    """
    columns: dict[str, Any] = {**row, **{field: row[column] for field, column in reading.columns if column in row}}
    try:
        record = to_record(row, source, reading=reading)
    except DataError:  # a prompt need not have an answer
        return columns
    if isinstance(record, Chat):
        columns[ANSWER] = record.answer if columns.get(ANSWER) is None else columns[ANSWER]
        columns |= json.loads(record.columns) if record.columns else {}
    return columns
