"""The rows of a file that is to be answered: read one after another, as often as needed, never all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sftplay.data.layouts.convert import Reading, read_prompt
from sftplay.data.layouts.fields import Row
from sftplay.data.read.files import files_of
from sftplay.data.read.sources import read_rows
from sftplay.data.records import Message, Refused, Source
from sftplay.errors import DataError

BATCHES_IN_WINDOW = 64
"""Batches in a window. Rows are sorted by length inside a window, and only one window is in memory."""


@dataclass(frozen=True)
class Prompt:
    """One row: its number in the whole file, its place, its fields, and the question that they hold."""

    number: int
    source: Source
    row: Row
    messages: tuple[Message, ...]
    tools: str

    def prompt(self, renderer: Any) -> list[int]:
        """The tokens that ask it.

        Raises:
            DataError: the template refuses it, with the row's place.
        """
        try:
            ids: list[int] = renderer.prompt_ids(self.messages, self.tools)
        except DataError as error:
            raise DataError(error.what, where=str(self.source), fix=error.fix) from error
        return ids


@dataclass(frozen=True)
class PromptFile:
    """A file or folder of rows with `messages` or `prompt`; `system` goes before those that have none."""

    path: str
    system: str | None = None

    def __iter__(self) -> Iterator[Prompt]:
        """Every row, in order.

        Raises:
            DataError: one of them cannot be read or asked.
        """
        reading = Reading(system=self.system)
        number = 0
        for file in files_of(self.path):
            for source, row in read_rows(str(file)):
                if isinstance(row, Refused):
                    raise DataError(row.reason, where=str(source), fix="correct the row")
                yield Prompt(number, source, row, *read_prompt(row, source, reading=reading))
                number += 1

    def windows(self, batch_size: int) -> Iterator[list[Prompt]]:
        """All rows, in order, in windows; the rows of one window are sorted by length together."""
        rows = iter(self)
        while window := list(islice(rows, BATCHES_IN_WINDOW * batch_size)):
            yield window
