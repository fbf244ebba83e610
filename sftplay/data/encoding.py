"""The encoding of a text: by name, or guessed from its bytes."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from typing import BinaryIO

from sftplay.errors import DataError

LIKELY = ["cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r"]
LIKELY += ["shift_jis", "euc_jp", "gb18030", "big5", "euc_kr"]
SAMPLE_BYTES, SEARCHED_BYTES = 1 << 16, 1 << 24


def find_encoding(name: str) -> str:
    """Return Python's own name for an encoding of text files, or raise DataError."""
    # For names and source code, or of Windows only.
    not_of_files = ("undefined", "idna", "punycode", "mbcs", "oem", "unicode_escape", "raw_unicode_escape")
    with suppress(LookupError, ValueError, TypeError):
        found = codecs.lookup(name)
        if found._is_text_encoding and found.name.replace("-", "_") not in not_of_files:
            return "utf-8" if found.name == "utf-8-sig" else found.name
    fix = "write auto, or a name such as cp1252, shift_jis or utf-16"
    raise DataError(f"Python knows no encoding of text called {name!r}", where="data.encoding", fix=fix)


def detect_stream_encoding(stream: BinaryIO) -> str:
    """Guess the encoding of an open file by lines near its beginning that are not UTF-8; empty when nothing fits.

    For rows it is only a hint in an error. Documents are read in it, and the report says so.
    """
    part, n_read = b"", 0
    while len(part) < SAMPLE_BYTES and n_read < SEARCHED_BYTES and (line := stream.readline(SAMPLE_BYTES)):
        n_read += len(line)
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            part += line
    return detect_encoding(part)


def detect_encoding(data: bytes) -> str:
    """As `detect_stream_encoding`, for bytes at hand."""
    from charset_normalizer import from_bytes

    found = from_bytes(data[:SAMPLE_BYTES], cp_isolation=LIKELY)
    best = found.best()
    if best is None:
        return ""
    # Western files are many times more frequent than central European ones, which share many of its letters.
    western = any("cp1252" in match.could_be_from_charset and match.chaos <= best.chaos for match in found)
    return "cp1252" if western and best.encoding == "cp1250" else str(best.encoding)


def detect_wide(head: bytes) -> str:
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
