"""Holds every JSON document that a verb prints in any test to configs/verbs.schema.json.

`check_documents` puts itself around `cli.main`. Tests that start a process hand its output to `check_document`.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

from sftplay import cli

SCHEMA = Path(__file__).resolve().parents[1] / "configs" / "verbs.schema.json"
MAIN = cli.main


@cache
def validator(reference: str) -> Any:
    """Checks a document; None where jsonschema is not installed. `reference` is a path in the file: verbs/plan."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        return None
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    kind, _, name = reference.partition("/")
    assert name in schema[kind], f"{SCHEMA.name} has no {reference}"
    return Draft202012Validator({**schema[kind][name], "$defs": schema["$defs"]})


def check(content: Any, reference: str) -> None:
    """Fail where a document is not as the schema says."""
    if found := validator(reference):
        from jsonschema.exceptions import best_match

        if error := best_match(found.iter_errors(content)):
            raise AssertionError(f"{reference}, {error.json_path}: {error.message[:2000]}")


def check_document(words: Sequence[object], text: str) -> None:
    """Check what `sftplay WORDS` has printed, where it was asked for JSON and printed something."""
    known, _ = cli.split(list(map(str, words)))
    if "--json" in known and text.strip():
        content = json.loads(text)
        is_error = isinstance(content, dict) and content.keys() == {"error"}
        check(content, "$defs/error" if is_error else f"verbs/{known[0]}")


class _Tee:
    """Writes to a stream and keeps what was written."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.kept = stream, io.StringIO()

    def write(self, text: str) -> int:
        self.kept.write(text)
        count: int = self._stream.write(text)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@wraps(MAIN)
def _checked_main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "--json" not in cli.split(words)[0]:
        return MAIN(argv)
    stream = sys.stdout
    tee = sys.stdout = _Tee(stream)  # type: ignore[assignment]
    try:
        code = MAIN(argv)
    finally:
        sys.stdout = stream
    check_document(words, tee.kept.getvalue())
    return code


def check_documents() -> None:
    """Check from now on what `cli.main` prints, here and for who imports it later."""
    cli.main = _checked_main
