"""Values of a row, taken by name. A value of the wrong kind is refused with the reason.

Refusals are raised here without the place of the row; `convert` adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from sftplay.data.json_text import BROKEN_JSON, decode_json, flaw_of
from sftplay.errors import DataError

Row = Mapping[str, Any]

FIX_ROW = "correct the row, or leave such rows out with data.on_bad_row: skip"


def refuse(what: str, fix: str = FIX_ROW) -> NoReturn:
    """Raise the DataError that `convert` completes with file and line."""
    raise DataError(what, fix=fix)


def kind_of(value: object) -> str:
    """A json value's type in words, for messages."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def listed(names: Iterable[object]) -> str:
    """Up to eight of the names, quoted."""
    keys = [repr(key)[:40] for key in names]
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "(none)"


def text_of(value: object, name: str) -> str:
    """`value` if it is a text of valid characters."""
    if not isinstance(value, str):
        refuse(f"{name} is {kind_of(value)}, not a text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            refuse(f"{name} holds something at character {error.start + 1} that is not valid Unicode")
    return value


def list_of(value: object, name: str, *, of: str) -> Sequence[Any]:
    """`value` if it is a list, or the list whose JSON text it is: a csv cell can hold a list only as text."""
    if isinstance(value, str):
        value = json_of(value, name, due=f"a list of {of}")
    if not isinstance(value, list | tuple):
        refuse(f"{name} is {kind_of(value)}, not a list of {of}")
    return value


def json_of(text: str, name: str, *, due: str) -> Any:
    """The value of a JSON text; `due` is what the refusal says should stand there."""
    try:
        return decode_json(text)
    except BROKEN_JSON as error:
        refuse(f"{name} is a text that is not JSON, where {due} is due: it {flaw_of(error)}")


def is_blank(value: object) -> bool:
    """True for what stands for nothing in an optional column: null, an empty text or an empty list."""
    return value is None or value in ("", [], {}) or (isinstance(value, str) and value.isspace())
