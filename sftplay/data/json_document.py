"""Rows of JSON as text: lines in other encodings than UTF-8, and documents, read a block at a time."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterator
from typing import TextIO

from sftplay.data.files import BOM, BROKEN_JSON, LONGEST, TOO_LONG, Charset, listed
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError


def text_lines(charset: Charset) -> Iterator[tuple[Source, str | Refused]]:
    """Yield every line that is not blank, as text in the file's encoding, not parsed yet."""
    path, number = str(charset.file), 0
    with charset.open(newline="\n") as stream:
        while line := stream.readline(LONGEST):
            number += 1
            if len(line) == LONGEST and not line.endswith("\n"):
                while not line.endswith("\n") and (line := stream.readline(LONGEST)):
                    pass
                yield Source(path, number), Refused(TOO_LONG.format(LONGEST))
            elif not line.isspace() and line.strip(f"{BOM} \r\n\t"):
                yield Source(path, number), charset.refused() if charset.refuses(line) else line


BLOCK = 1 << 16
MOST_OF_OBJECT = 1 << 30
"""Most characters of a document that is an object: it is held as a whole before its rows are known."""

DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\r\n]*")
FIX = "correct the file there; jsonl, one row a line, survives a broken row"


def document_rows(charset: Charset) -> Iterator[tuple[Source, str | Refused]]:
    """Yield every row of the document: the line at which it begins, and in an array its number from 1.
    Raise DataError where it is not JSON as a whole.
    """
    with charset.open(newline="") as stream:
        text = _Text(charset, stream)
        text.skip(BOM)
        first = text.next_character()
        if first == "[":
            yield from _array_rows(text)
            text.expect_end()
        elif first:
            yield from _object_rows(text)


class _Text:
    """A document and a place in it. It holds the unread rest of one block or of one row."""

    def __init__(self, charset: Charset, stream: TextIO, *, line: int = 1) -> None:
        """`line` is that of the document's first character."""
        self.charset, self._stream = charset, stream
        self._held, self._at = "", 0
        self._line, self._counted = line, 0  # the line of the character at _counted
        self.most = LONGEST

    def next_character(self) -> str:
        """Return the next character that is not white space; empty at the end. The place is then before it."""
        while True:
            found = SPACE.match(self._held, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._grow():
                return ""

    def skip(self, character: str) -> None:
        if self.next_character() == character:
            self._at += 1

    @property
    def line(self) -> int:
        """The line of the next character."""
        self._line += self._held.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def next_value(self) -> str:
        """Return the text of the next JSON value; the place is then after it."""
        self.next_character()
        while True:
            try:
                _, end = DECODER.raw_decode(self._held, self._at)
            except BROKEN_JSON as error:
                if isinstance(error, json.JSONDecodeError) and self._grow():
                    continue
                flaw = f": {error.msg}" if isinstance(error, json.JSONDecodeError) else f" that can be read: {error}"
                raise self.broken(f"is not JSON{flaw}", getattr(error, "pos", self._at)) from error
            if end == len(self._held) and self._grow():  # a number might go on
                continue
            value, self._at = self._held[self._at : end], end
            return value

    def expect_end(self) -> None:
        """Refuse what follows the document."""
        if self.next_character():
            raise self.broken("has text after the end of the JSON document")

    def broken(self, what: str, at: int | None = None) -> DataError:
        """Return the error about a character, by default the next one."""
        line = self.line + (0 if at is None else self._held.count("\n", self._at, at))
        return DataError(what, where=f"{self.charset.file}:{line}", fix=FIX)

    def _grow(self) -> bool:
        """Read more, at least as much as is held: all attempts to decode one value together then take linear time."""
        kept = self._held[self._at :]
        if len(kept) > self.most:
            raise self.broken(f"has a value of more than {self.most:,} characters, or one that never ends")
        more = self._stream.read(max(BLOCK, len(kept)))
        if more:
            self._line, self._counted = self.line, 0
            self._held, self._at = kept + more, 0
        return bool(more)


def _array_rows(text: _Text) -> Iterator[tuple[Source, str | Refused]]:
    """Yield the elements of the array that begins here; the place is then after it."""
    path, number = str(text.charset.file), 0
    text.skip("[")
    more = text.next_character() != "]"
    while more:
        number += 1
        text.next_character()
        source = Source(path, text.line, number)
        value = text.next_value()
        yield source, text.charset.refused() if text.charset.refuses(value) else value
        more = text.next_character() == ","
        if more:
            text.skip(",")
    if text.next_character() != "]":
        raise text.broken(f"row {number} is followed by neither a comma nor a closing bracket")
    text.skip("]")


def _object_rows(text: _Text) -> Iterator[tuple[Source, str | Refused]]:
    """Yield the rows of the one list in the object that begins here; the object itself where it is a row.
    Raise DataError where several lists hold rows.
    """
    from sftplay.data.layouts import detect_layout  # imports the config, which rows of text do without

    charset, names, lists = text.charset, [], []
    text.most = MOST_OF_OBJECT
    text.next_character()
    first = text.line
    whole = text.next_value()
    text.expect_end()
    members = _Text(charset, io.StringIO(whole, newline=""), line=first)
    members.most = MOST_OF_OBJECT
    if members.next_character() == "{":
        members.skip("{")
        while members.next_character() != "}":
            names.append(json.loads(members.next_value()))
            members.skip(":")
            members.next_character()
            line, value = members.line, members.next_value()
            lists += [(names[-1], value, line)] if value.startswith("[") else []
            members.skip(",")
    has_rows = detect_layout(names) is None
    if has_rows and len(lists) > 1:
        firsts = [row for _, rows, _ in lists for row in json.loads(rows)[:1] if isinstance(row, dict)]
        has_rows = any(detect_layout(row) for row in firsts)
    if has_rows and len(lists) > 1:
        path, names = str(charset.file), [name for name, *_ in lists]
        opened = "__import__('gzip').open" if path.endswith(".gz") else "open"
        code = (
            f"import json, sys; path = sys.argv[1]; rows = json.load({opened}(path, 'rb')); "
            f"[json.dump(rows[k], open(f'{{path}}.{{k}}.json', 'w')) for k in rows if isinstance(rows[k], list)]"
        )
        fix = f'split it, for data.train_path and data.val_path: python3 -c "{code}" {shlex.quote(path)}'
        raise DataError(f"is one object with several lists of rows: {listed(names)}", where=f"{path}:{first}", fix=fix)
    if has_rows and lists:
        _, rows, line = lists[0]
        yield from _array_rows(_Text(charset, io.StringIO(rows, newline=""), line=line))
    else:
        yield Source(str(charset.file), first), charset.refused() if charset.refuses(whole) else whole
