"""The language a text is written in, guessed by py3langid from pieces of its beginning, middle and end."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from sftplay.errors import MachineError

SAMPLE_CHARS = 1000
"""Characters looked at in each of three places."""

SURE = 0.7
"""Of a guess that is less sure nothing follows: headings, names and code are guessed at random, below 0.5."""


def check_installed() -> None:
    """Raise MachineError where the library is missing."""
    if find_spec("py3langid") is None:
        fix = "make install EXTRAS=ingest, or leave out --language"
        raise MachineError("--language needs py3langid, which is not installed", where="ingest", fix=fix)


def detect_language(text: str) -> tuple[str, float]:
    """Its ISO 639-1 code, and how sure that is, 0 to 1."""
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
    """The model, which takes a second to load."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
