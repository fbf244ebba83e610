"""The language a text is written in, guessed by py3langid from pieces of its beginning, middle and end."""

from __future__ import annotations

from importlib.util import find_spec

from sftplay.errors import MachineError

PIECE = 1000
"""Characters looked at in each of three places."""


def check_installed() -> None:
    """Raise MachineError where the library is missing."""
    if find_spec("py3langid") is None:
        fix = "make install EXTRAS=ingest, or leave out --language"
        raise MachineError("--language needs py3langid, which is not installed", where="ingest", fix=fix)


def language_of(text: str) -> str:
    """Its ISO 639-1 code."""
    from py3langid import classify

    middle = len(text) // 2
    sample = text if len(text) <= 3 * PIECE else f"{text[:PIECE]} {text[middle : middle + PIECE]} {text[-PIECE:]}"
    code: str = classify(sample)[0]
    return code
