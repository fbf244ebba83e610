"""Decode JSON without losing anything, and encode it in the one form that records carry.

It knows nothing of rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

BROKEN_JSON = (ValueError, RecursionError)
"""Errors that decoding raises: RecursionError for nesting deeper than the interpreter's stack."""

DEEPEST = 100
"""Most levels inside a call's arguments or a tool: deeper ones could not be handed from process to process."""


def decode_json(text: str) -> Any:
    """Return the value; a repeated key in one object is an error, since json would keep only the last."""
    return _DECODER.decode(text)


def encode_json(value: Any) -> str:
    """Return the value as text, letters kept as they are.

    Raises ValueError: JSON has no form for it: a number out of range, a character that is none, or too many levels.
    """
    level: Sequence[Any] = [value]
    for depth in range(DEEPEST + 2):  # level by level, because recursion is what this guards against
        if not level:
            break
        if depth > DEEPEST:
            raise ValueError(f"has more than {DEEPEST} levels")
        objects = [outer for outer in level if isinstance(outer, dict | list)]
        level = [inner for outer in objects for inner in (outer.values() if isinstance(outer, dict) else outer)]
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("holds something that is not valid Unicode") from error
    except TypeError as error:
        raise ValueError(f"holds something that JSON cannot: {error}") from error
    return text


def describe_json_error(error: Exception) -> str:
    """Describe what is wrong with a text that `decode_json` refused."""
    if isinstance(error, json.JSONDecodeError):
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        return f"is not JSON: {error.msg} at {place}"
    return str(error) if isinstance(error, RepeatedKeyError) else f"is not JSON that can be read: {error}"


class RepeatedKeyError(ValueError):
    """An object names a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"has the key {twice[:60]!r} twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
