"""Bytes of a text file -> characters, in the encoding that is named, marked or plain to see.

For rows a single-byte encoding is never guessed, because a wrong guess gives wrong letters without an error. Rows that
are not UTF-8 are refused, and the reason names a likely encoding.
"""

from __future__ import annotations

import codecs
import io
import re
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from sftplay.data.read.files import FOREIGN, open_bytes
from sftplay.data.records import Refused
from sftplay.errors import DataError

MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BOM = "\ufeff"

UNDECODABLE = "\udcff"  # stands for bytes that are no character; no decoder gives it for anything else
LIKELY = ["cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r"]
LIKELY += ["shift_jis", "euc_jp", "gb18030", "big5", "euc_kr"]
SAMPLE_BYTES, SEARCHED_BYTES = 1 << 16, 1 << 24


class Charset:
    """The encoding of one file, and the refusal of rows that are not in it."""

    def __init__(self, file: Path, named: str = "auto") -> None:
        """Find the encoding: a byte order mark proves it; else the one named; else UTF-16 shows by its NULs, or UTF-8.

        Raises DataError: there is no encoding of that name, or the file is no text at all.
        """
        self.file, self._is_named, self._reason = file, named != "auto", ""
        known = _find_encoding(named) if self._is_named else ""
        with open_bytes(file) as stream:
            head = stream.read(4096)
        for magic, kind, fix in FOREIGN:
            if head.startswith(magic):
                raise DataError(f"is {kind} by its first bytes", where=str(file), fix=fix)
        marked = next((name for mark, name in MARKS if head.startswith(mark)), "")
        self.name = marked or known or _detect_wide(head) or "utf-8"

    @property
    def is_utf8(self) -> bool:
        """Lines may be handed on as bytes."""
        return self.name == "utf-8"

    def open(self, newline: str | None) -> TextIO:
        """Open the file as text; bytes that are no character become UNDECODABLE. The caller closes it."""

        def mark(error: UnicodeError) -> tuple[str, int]:
            if not isinstance(error, UnicodeDecodeError):
                raise error
            return UNDECODABLE, error.end

        codecs.register_error("sftplay.undecodable", mark)
        return io.TextIOWrapper(open_bytes(self.file), self.name, errors="sftplay.undecodable", newline=newline)

    def refused(self) -> Refused:
        """Return the refusal of a row with bytes that are no character."""
        if not self._reason:
            likely = detect_file_encoding(self.file) if self.is_utf8 and not self._is_named else ""
            advice = f"the file looks like {likely}: set data.encoding: {likely}" if likely else "see data.encoding"
            self._reason = f"holds bytes that are not {self.name.upper()}" + ("" if self._is_named else f"; {advice}")
        return Refused(self._reason)

    def refuses(self, text: str) -> bool:
        """Return whether the row's text holds such bytes."""
        return not text.isascii() and UNDECODABLE in text


def _find_encoding(name: str) -> str:
    """Return Python's own name for an encoding of text files, or raise DataError."""
    # For names and source code, or of Windows only.
    not_of_files = ("undefined", "idna", "punycode", "mbcs", "oem", "unicode_escape", "raw_unicode_escape")
    with suppress(LookupError, ValueError, TypeError):
        found = codecs.lookup(name)
        if found._is_text_encoding and found.name.replace("-", "_") not in not_of_files:
            return "utf-8" if found.name == "utf-8-sig" else found.name
    fix = "write auto, or a name such as cp1252, shift_jis or utf-16"
    raise DataError(f"Python knows no encoding of text called {name!r}", where="data.encoding", fix=fix)


def detect_file_encoding(file: Path) -> str:
    """Guess the encoding of a file by lines near its beginning that are not UTF-8; empty when nothing fits.

    For rows it is only a hint in an error. Documents are read in it, and the report says so.
    """
    part, n_read = b"", 0
    with open_bytes(file) as stream:
        while len(part) < SAMPLE_BYTES and n_read < SEARCHED_BYTES and (line := stream.readline(SAMPLE_BYTES)):
            n_read += len(line)
            part += b"" if is_utf8(line) else line
    return detect_encoding(part)


def detect_encoding(data: bytes) -> str:
    """As `detect_file_encoding`, for bytes at hand."""
    from charset_normalizer import from_bytes

    found = from_bytes(data[:SAMPLE_BYTES], cp_isolation=LIKELY)
    best = found.best()
    if best is None:
        return ""
    # Western files are many times more frequent than central European ones, which share many of its letters.
    western = any("cp1252" in match.could_be_from_charset and match.chaos <= best.chaos for match in found)
    return "cp1252" if western and best.encoding == "cp1250" else str(best.encoding)


def is_utf8(line: bytes) -> bool:
    """Return whether the bytes are UTF-8."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _detect_wide(head: bytes) -> str:
    """Return UTF-32 or UTF-16 without a mark: where letters of keys and brackets have their NULs."""
    n = len(head) // 4
    zeros = [head[place : 4 * n : 4].count(0) for place in range(4)]
    for name, (empty, mostly, full) in (("utf-32-le", (3, 2, 0)), ("utf-32-be", (0, 1, 3))):
        if n and zeros[empty] == n and 2 * zeros[mostly] > n > 2 * zeros[full]:
            return name
    even, odd = head[::2].count(0), head[1::2].count(0)
    # Two ASCII characters in UTF-16, as documents and headers begin.
    if re.match(rb"(?:[\t-~]\0){2}", head):
        return "utf-16-le"
    if re.match(rb"(?:\0[\t-~]){2}", head):
        return "utf-16-be"
    is_wide = max(even, odd) > len(head) // 64 and max(even, odd) >= 4 * min(even, odd)
    return ("utf-16-le" if odd > even else "utf-16-be") if is_wide else ""
