"""Guess the language of a text with py3langid, from samples of its beginning, middle and end."""

from __future__ import annotations

from functools import cache
from typing import Any

SAMPLE_CHARS = 1000
"""Characters of each of the three samples."""

SURE = 0.7
"""Less sure guesses are ignored: headings, names and code are guessed at random, below 0.5."""


def detect_language(text: str) -> tuple[str, float]:
    """Return the ISO 639-1 code of the text's language, and the confidence, 0 to 1."""
    if len(text) > 3 * SAMPLE_CHARS:
        middle = len(text) // 2
        text = f"{text[:SAMPLE_CHARS]} {text[middle : middle + SAMPLE_CHARS]} {text[-SAMPLE_CHARS:]}"
    code, share = identifier().classify(text.lower())  # the model knows few words in capitals
    return str(code), float(share)


@cache
def identifier() -> Any:
    """Return the model, which takes a second to load."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
