"""The rows of a file that is to be answered: read one after another, as often as needed, never all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sftplay.data.layouts.convert import Reading, read_beginning, read_prompt
from sftplay.data.layouts.fields import Row
from sftplay.data.read.encodings import BOM, Charset
from sftplay.data.read.files import files_of
from sftplay.data.read.jsonl import text_lines
from sftplay.data.read.sources import Dialect, content_digest, file_digest, read_rows
from sftplay.data.records import Message, Refused, Source
from sftplay.errors import DataError

TEXT = ".txt"
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
    beginning: str = ""
    """A plain text that the model goes on writing; then there are no messages."""

    def prompt(self, renderer: Any) -> list[int]:
        """The tokens that ask it.

        Raises:
            DataError: the template refuses it, with the row's place.
        """
        try:
            ids: list[int]
            if self.beginning:
                ids = renderer.beginning_ids(self.beginning)
            else:
                ids = renderer.prompt_ids(self.messages, self.tools)
        except DataError as error:
            raise DataError(error.what, where=str(self.source), fix=error.fix) from error
        return ids


@dataclass(frozen=True)
class PromptFile:
    """A file or folder of rows in any layout that training reads, or a text file with a question in each line."""

    path: str
    reading: Reading = field(default_factory=Reading)
    dialect: Dialect = field(default_factory=Dialect)

    def __iter__(self) -> Iterator[Prompt]:
        """Every row, in order.

        Raises:
            DataError: one of them cannot be read or asked.
        """
        for number, (source, row) in enumerate(self._rows()):
            if isinstance(row, Refused):
                raise DataError(row.reason, where=str(source), fix="correct the row")
            if text := read_beginning(row, reading=self.reading):
                yield Prompt(number, source, row, (), "", text)
            else:
                yield Prompt(number, source, row, *read_prompt(row, source, reading=self.reading))

    def _rows(self) -> Iterator[tuple[Source, Row | Refused]]:
        if not self._is_text:
            for file in files_of(self.path):
                yield from read_rows(str(file), self.dialect)
            return
        for source, line in text_lines(Charset(Path(self.path), self.dialect.encoding)):
            yield source, line if isinstance(line, Refused) else {"prompt": line.removeprefix(BOM).strip("\r\n")}

    @property
    def _is_text(self) -> bool:
        return self.path.lower().endswith(TEXT) and Path(self.path).is_file()

    def digest(self) -> str:
        """Hex digest of the rows' bytes."""
        return file_digest(Path(self.path)).hex() if self._is_text else content_digest(self.path)

    def windows(self, batch_size: int) -> Iterator[list[Prompt]]:
        """All rows, in order, in windows; the rows of one window are sorted by length together."""
        rows = iter(self)
        while window := list(islice(rows, BATCHES_IN_WINDOW * batch_size)):
            yield window
