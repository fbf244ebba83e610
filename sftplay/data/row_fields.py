"""Checks of the values of a row, and JSON in which no object names a key twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from sftplay.errors import DataError

BROKEN_JSON = (ValueError, RecursionError)
"""Errors that decoding raises: RecursionError for nesting deeper than the interpreter's stack."""


def decode_json(text: str) -> Any:
    """Return the value; a repeated key in one object is an error, since json would keep only the last."""
    return _DECODER.decode(text)


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


RowFields = Mapping[str, Any]

FIX_ROW = "correct the row, or leave such rows out with data.on_bad_row: skip"


def refuse(what: str, fix: str = FIX_ROW) -> NoReturn:
    """Raise the DataError that `convert` completes with file and line."""
    raise DataError(what, fix=fix)


def describe_type(value: object) -> str:
    """Name a json value's type in words, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def listed(names: Iterable[object]) -> str:
    """Quote up to eight of the names."""
    keys = [repr(key)[:40] for key in names]
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "(none)"


def expect_text(value: object, name: str) -> str:
    """Return `value` if it is a text of valid characters."""
    if not isinstance(value, str):
        refuse(f"{name} is {describe_type(value)}, not a text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            refuse(f"{name} holds something at character {error.start + 1} that is not valid Unicode")
    return value


def expect_list(value: object, name: str, *, of: str) -> Sequence[Any]:
    """Return `value` if it is a list, or the list in its JSON text: a csv cell can hold a list only as text."""
    if isinstance(value, str):
        value = parse_json(value, name, due=f"a list of {of}")
    if not isinstance(value, list | tuple):
        refuse(f"{name} is {describe_type(value)}, not a list of {of}")
    return value


def parse_json(text: str, name: str, *, due: str) -> Any:
    """Return the value of a JSON text; `due` names what the error expects there."""
    try:
        return decode_json(text)
    except BROKEN_JSON as error:
        refuse(f"{name} is a text that is not JSON, where {due} is due: it {describe_json_error(error)}")


def is_blank(value: object) -> bool:
    """Return True for an empty value of an optional column: null, an empty text or an empty list."""
    return value is None or value in ("", [], {}) or (isinstance(value, str) and value.isspace())
