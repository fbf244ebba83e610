"""Repairs the characters of a block of text: wrong decoding, Unicode form, control characters, white space.

Every step can be left out, and every step counts what it changed. Words are never changed, nor is code indented anew.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection
from importlib.util import find_spec

from sftplay.data.ingest.extract.document import Block
from sftplay.errors import MachineError

UNWANTED = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u2060\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
"""Control characters, soft hyphens and others that show nothing. Joiners and marks of direction stay: some scripts need
them."""

SUSPECT = re.compile("[\x80-\u045f\u2010-\u25ff\ufb01\ufb02]{2}|[\xc2\xc3\xce\xd0\xd1\xe2] ")
"""What a wrong decoding leaves at least: two characters of a single-byte encoding, the second perhaps a space by now.
The real check takes far longer."""

LINE_ENDS = re.compile("\r\n?|[\x0c\x1c-\x1e\x85\u2028\u2029]")
SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
EMPTY_LINES = re.compile(r"\n{3,}")


def check_installed(steps: Collection[str]) -> None:
    """Raise MachineError where a step's library is missing."""
    if "encoding" in steps and find_spec("ftfy") is None:
        fix = "make install EXTRAS=ingest, or leave that step out with --without=encoding"
        raise MachineError("the step `encoding` needs ftfy, which is not installed", where="ingest", fix=fix)


class Cleaner:
    """Cleans blocks; counts the blocks that each step changed."""

    def __init__(self, steps: Collection[str]) -> None:
        self._steps = [getattr(self, f"_{step}") for step in steps]
        self._names = list(steps)
        self.changed: Counter[str] = Counter()
        """Step -> blocks."""

    def clean(self, block: Block) -> str:
        """The block's text after all steps."""
        text = block.text
        for name, step in zip(self._names, self._steps, strict=True):
            new = step(text, block.kind)
            if new != text:
                self.changed[name] += 1
                text = new
        return text

    def _encoding(self, text: str, _kind: str) -> str:
        """Undo a wrong decoding, such as `Ã©` for `é`, where the text shows it."""
        if text.isascii() or not SUSPECT.search(text):
            return text
        from ftfy import fix_encoding
        from ftfy.badness import is_bad

        return str(fix_encoding(text)) if is_bad(text) else text

    def _unicode(self, text: str, _kind: str) -> str:
        """Composed characters (NFC), so that the same word has the same code points everywhere."""
        return text if text.isascii() else unicodedata.normalize("NFC", text)

    def _control(self, text: str, _kind: str) -> str:
        if text.replace("\n", "").isprintable():
            return text
        return UNWANTED.sub("", LINE_ENDS.sub("\n", text))

    def _spaces(self, text: str, kind: str) -> str:
        """One kind of space, none at the ends of lines; outside code and tables no runs of them either."""
        if not (text.isascii() or text.replace("\n", "").isprintable()):
            text = SPACES.sub(" ", text)
        if kind in ("code", "table"):
            return "\n".join(map(str.rstrip, text.split("\n"))).strip("\n")
        if "  " in text or "\t" in text or " \n" in text or text.endswith(" "):
            text = "\n".join(map(_even, text.split("\n")))
        return (EMPTY_LINES.sub("\n\n", text) if "\n\n\n" in text else text).strip("\n")


def _even(line: str) -> str:
    """The line with one space between words, none at its end, and its indentation."""
    return line[: len(line) - len(line.lstrip())] + " ".join(line.split())
