"""Read the rows of a file to answer: one after another, as often as needed, never all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sftplay.data.cache import content_digest, file_digest
from sftplay.data.files import BOM, Charset, RowFields, list_files
from sftplay.data.json_document import text_lines
from sftplay.data.layouts import LayoutOptions
from sftplay.data.prompts import Prompt, to_prompt
from sftplay.data.read import Dialect, read_rows
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError

TEXT = ".txt"
OF_A_TRAINING = re.compile(r", or leave such rows out with .*|; or map its column with .*")
"""Remedies that need other settings than those of the run: every row is answered, as the run reads rows."""

BATCHES_IN_WINDOW = 64
"""Batches in a window. Rows are sorted by length inside a window, and only one window is in memory."""


@dataclass(frozen=True)
class PromptFile:
    """A file or folder of rows in any layout that training reads, or a text file with a question in each line."""

    path: str
    reading: LayoutOptions = field(default_factory=LayoutOptions)
    dialect: Dialect = field(default_factory=Dialect)

    def __iter__(self) -> Iterator[Prompt]:
        """Yield every row, in order. Raise DataError where one of them cannot be read or asked."""
        for number, (source, row) in enumerate(self._rows()):
            if isinstance(row, Refused):
                raise DataError(row.reason, where=str(source), fix="correct the row")
            try:
                prompt = to_prompt(row, source, number=number, reading=self.reading)
            except DataError as error:
                raise DataError(error.what, where=error.where, fix=OF_A_TRAINING.sub("", error.fix)) from None
            yield prompt

    def _rows(self) -> Iterator[tuple[Source, RowFields | Refused]]:
        if not self._is_text:
            for file in list_files(self.path):
                yield from read_rows(str(file), self.dialect)
            return
        for source, line in text_lines(Charset(Path(self.path), self.dialect.encoding)):
            yield source, line if isinstance(line, Refused) else {"prompt": line.removeprefix(BOM).strip("\r\n")}

    @property
    def _is_text(self) -> bool:
        return self.path.lower().endswith(TEXT) and Path(self.path).is_file()

    def digest(self) -> str:
        """Return the hex digest of the rows' bytes."""
        return file_digest(Path(self.path)).hex() if self._is_text else content_digest(self.path)

    def windows(self, batch_size: int) -> Iterator[list[Prompt]]:
        """Yield all rows, in order, in windows; the rows of one window are sorted by length together."""
        rows = iter(self)
        while window := list(islice(rows, BATCHES_IN_WINDOW * batch_size)):
            yield window
