"""Guess the language of a text with py3langid, from samples of its beginning, middle and end."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from sftplay.errors import MachineError

SAMPLE_CHARS = 1000
"""Characters of each of the three samples."""

SURE = 0.7
"""Less sure guesses are ignored: headings, names and code are guessed at random, below 0.5."""


def check_installed() -> None:
    """Raise MachineError where the library is missing."""
    if find_spec("py3langid") is None:
        fix = "make install EXTRAS=ingest, or leave out --language"
        raise MachineError("--language needs py3langid, which is not installed", where="ingest", fix=fix)


def detect_language(text: str) -> tuple[str, float]:
    """Return the ISO 639-1 code of the text's language, and the confidence, 0 to 1."""
    middle = len(text) // 2
    sample = (
        text
        if len(text) <= 3 * SAMPLE_CHARS
        else f"{text[:SAMPLE_CHARS]} {text[middle : middle + SAMPLE_CHARS]} {text[-SAMPLE_CHARS:]}"
    )
    code, share = identifier().classify(sample.lower())  # the model knows few words in capitals
    return str(code), float(share)


@cache
def identifier() -> Any:
    """Return the model, which takes a second to load."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
