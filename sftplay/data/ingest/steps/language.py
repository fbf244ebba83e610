"""The language a text is written in, guessed by py3langid from pieces of its beginning, middle and end."""

from __future__ import annotations

from sftplay.data.ingest.extract.document import need

PIECE = 1000
"""Characters looked at in each of three places."""


def check_installed() -> None:
    """Raise MachineError where the library is missing."""
    need("py3langid", kind="a language filter over")


def language_of(text: str) -> str:
    """Its ISO 639-1 code."""
    from py3langid import classify

    middle = len(text) // 2
    sample = text if len(text) <= 3 * PIECE else f"{text[:PIECE]} {text[middle : middle + PIECE]} {text[-PIECE:]}"
    code: str = classify(sample)[0]
    return code
