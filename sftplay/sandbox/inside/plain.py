"""Plain data as a JSON structure, so that two processes exchange values and neither runs code of the other.

None, bool, int, float and str are themselves. Every other value is a list that begins with a tag:
`["l", ...]` list, `["t", ...]` tuple, `["s", ...]` set, `["f", ...]` frozenset, `["d", [key, value], ...]` dict,
`["b", hex]` bytes, `["a", hex]` bytearray, `["c", real, imag]` complex, `["x", hex]` an int of many digits,
`["q", top, bottom]` Fraction, `["n", text]` Decimal, `["D", type, ...]` a date or time, `["e", ...]` deque,
`["k", ...]`, `["v", ...]`, `["m", ...]` the keys, values and items of a dict, `["i", ...]` what an iterator yields,
`["r", start, stop, step]` range, `["?", is_true, type, number]` anything else, and `["h", number]` such an object on
its way back to the process that it came from.

An object of a subclass (a Counter, a named tuple) is taken for the plain value that it holds. Its own methods, `__eq__`
among them, stay behind. It knows nothing of processes.
"""

from __future__ import annotations

from _json import encode_basestring_ascii as quoted  # the module json imports much more
from collections.abc import Callable, Mapping
from typing import Any

MOST_DEPTH = 100
"""Of lists in lists. Deeper values are refused, so that no reader of them runs out of stack."""

MOST_ITEMS = 100_000
"""Of an iterator; one without an end is refused there."""

VIEWS = {type({}.keys()): "k", type({}.values()): "v", type({}.items()): "m"}
DATES = ("date", "datetime", "time", "timedelta")

NO_VALUE = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)
"""What reading a structure raises that no `encode` wrote."""


class NotPlain(Exception):
    """The value is too deep or too long to leave the process."""


def encode(value: Any, keep: Callable[[Any], int] = lambda value: 0, *, depth: int = 0) -> str:
    """Return the JSON text of a value. `keep` gets each object and iterator in it, and numbers it to be handed back.
    Raise NotPlain where it is nested deeper than MOST_DEPTH, or an iterator does not end.
    """
    if depth > MOST_DEPTH:
        raise NotPlain(f"nested deeper than {MOST_DEPTH}")
    if value is None or value is True or value is False:
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, str):
        return quoted(str.__str__(value))
    if isinstance(value, int):
        return _int(int.__int__(value))
    return _float(float.__float__(value)) if isinstance(value, float) else _compound(value, keep, depth=depth + 1)


def _int(value: int) -> str:
    # A long int goes as hexadecimal: Python refuses decimal texts of over 4,300 digits.
    return str(value) if value.bit_length() <= 8_000 else f'["x","{value:x}"]'


def _float(value: float) -> str:
    if value != value:
        return "NaN"
    return repr(value) if value - value == 0 else "Infinity" if value > 0 else "-Infinity"


def _compound(value: Any, keep: Callable[[Any], int], *, depth: int) -> str:
    kinds: tuple[tuple[Any, str], ...] = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f"))
    for kind, tag in kinds:
        if isinstance(value, kind):
            return _tagged(tag, [encode(item, keep, depth=depth) for item in kind.__iter__(value)])
    if isinstance(value, dict):
        pairs = [[encode(part, keep, depth=depth) for part in pair] for pair in dict.items(value)]
        return _tagged("d", [f"[{key},{item}]" for key, item in pairs])
    if isinstance(value, (bytes, bytearray)):
        return f'["{"b" if isinstance(value, bytes) else "a"}","{memoryview(value).hex()}"]'
    if isinstance(value, complex):
        value = complex.__complex__(value)
        return f'["c",{_float(value.real)},{_float(value.imag)}]'
    if type(value) is range:
        return _tagged("r", [_int(value.start), _int(value.stop), _int(value.step)])
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:  # a number of an array equals a plain one
        return encode(value.item(), keep, depth=depth)
    if type(value) is Opaque:
        return f'["h",{value.number}]'
    if type(value) is Yielded:
        return _tagged("i", [encode(item, keep, depth=depth) for item in value.rest[::-1]])
    # A few classes of Python's own, which need no import.
    if type(value) in VIEWS:
        return _tagged(VIEWS[type(value)], [encode(item, keep, depth=depth) for item in value])
    module, name = type(value).__module__, type(value).__name__
    if (module, name) == ("fractions", "Fraction"):
        return f'["q","{int(value.numerator):x}","{int(value.denominator):x}"]'
    if (module, name) == ("decimal", "Decimal"):
        return f'["n",{quoted(str(value))}]'
    if (module, name) == ("datetime", "timedelta"):
        return f'["D","timedelta",{int(value.days)},{int(value.seconds)},{int(value.microseconds)}]'
    if module == "datetime" and name in DATES:
        return f'["D","{name}",{quoted(value.isoformat())}]'
    if (module, name) == ("collections", "deque"):
        return _tagged("e", [encode(item, keep, depth=depth) for item in value])
    number = keep(value)
    if hasattr(value, "__next__"):
        items = []
        for item in value:
            items.append(encode(item, keep, depth=depth))
            if len(items) > MOST_ITEMS:
                raise NotPlain(f"an iterator yields more than {MOST_ITEMS:,} items")
        return _tagged("i", items)
    return f'["?",{"true" if value else "false"},{quoted(type(value).__name__)},{number}]'


def _tagged(tag: str, items: list[str]) -> str:
    return f'["{tag}"{"".join("," + item for item in items)}]'


class Opaque:
    """Stands for a value that is not plain. It is true or false as that value was, and equal to nothing.

    By its number the process that it came from finds the object again.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, is_true: bool, kind: str, *, number: int = 0) -> None:
        self.is_true, self.kind, self.number = is_true, kind, number

    def __bool__(self) -> bool:
        return self.is_true

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<an object of type {self.kind}>"


class Yielded:
    """An iterator of another process, read to its end. To encode it takes nothing out of it."""

    def __init__(self, items: list[Any]) -> None:
        self.rest = items[::-1]

    def __iter__(self) -> Yielded:
        return self

    def __next__(self) -> Any:
        if not self.rest:
            raise StopIteration
        return self.rest.pop()


def decode(structure: Any, kept: Mapping[int, Any] = {}) -> Any:
    """Return the value of a structure; the reverse of `encode` for plain data. `kept` has objects that are handed back.
    Raise TypeError, ValueError or KeyError where no `encode` wrote it.
    """
    if not isinstance(structure, list):
        return structure
    tag, items = structure[0], structure[1:]
    if tag == "d":
        return {decode(key, kept): decode(value, kept) for key, value in items}
    kinds: dict[str, Callable[[list[Any]], Any]] = {
        "l": list, "t": tuple, "s": set, "f": frozenset, "i": Yielded, "k": lambda items: dict.fromkeys(items).keys(),
        "v": lambda items: dict(enumerate(items)).values(), "m": lambda items: dict(items).items(),
    }  # fmt: skip
    if tag in kinds:
        return kinds[tag]([decode(item, kept) for item in items])
    if tag == "e":
        from collections import deque

        return deque([decode(item, kept) for item in items])
    return kept[items[0]] if tag == "h" else _decode_atom(tag, items)


def _decode_atom(tag: str, items: list[Any]) -> Any:
    if tag == "x":
        return int(items[0], 16)
    if tag in "ba":
        content = bytes.fromhex(items[0])
        return content if tag == "b" else bytearray(content)
    if tag == "c":
        return complex(items[0], items[1])
    if tag == "r":
        return range(*items)
    if tag in ("q", "n", "D") and any(isinstance(item, str) and len(item) > 20_000 for item in items):
        raise ValueError("too many digits")  # a longer Fraction or Decimal takes too long to compare
    if tag == "q":
        from fractions import Fraction

        return Fraction(int(items[0], 16), int(items[1], 16))
    if tag == "n":
        from decimal import Decimal

        return Decimal(items[0])
    if tag == "D":
        import datetime

        kind = getattr(datetime, DATES[DATES.index(items[0])])
        return kind(*items[1:]) if items[0] == "timedelta" else kind.fromisoformat(items[1])
    if tag == "?":
        return Opaque(items[0] is True, str(items[1]), number=items[2] if type(items[2]) is int else 0)
    raise ValueError(f"no tag is called {tag!r}")


def is_same(structure: Any, expected: Any) -> bool:
    """True when the structure's value equals `expected`, plain data of our own, as Python's `==` has it.

    It builds nothing that is larger than `expected`: an answer of many keys with one hash costs no time.
    """
    if not isinstance(structure, list):
        return type(expected) in (type(None), bool, int, float, complex, str) and bool(structure == expected)
    tag, items = (structure[0], structure[1:]) if structure else ("", [])
    try:
        if isinstance(expected, (list, tuple)):
            is_kind = tag == ("l" if isinstance(expected, list) else "t") and len(items) == len(expected)
            return is_kind and all(map(is_same, items, expected))
        if isinstance(expected, (set, frozenset)):
            return tag in ("s", "f", "k", "m") and len(items) == len(expected) and set(map(decode, items)) == expected
        if isinstance(expected, dict):
            if tag != "d" or len(items) != len(expected):
                return False
            found = {decode(key): value for key, value in items}
            pairs = expected.items()
            return len(found) == len(pairs) and all(key in found and is_same(found[key], value) for key, value in pairs)
        is_atom = isinstance(tag, str) and tag in ("x", "b", "a", "c", "q", "n", "D")
        return is_atom and bool(_decode_atom(tag, items) == expected)
    except NO_VALUE:
        return False


def is_true(structure: Any) -> bool:
    """Return the truth of a structure's value, as `assert value` has it."""
    if not isinstance(structure, list) or not structure:
        return bool(structure)
    tag, items = structure[0], structure[1:]
    if tag == "?":
        return bool(items) and items[0] is True
    if tag in ("x", "i"):
        return True
    try:
        if tag in ("b", "a", "c"):
            return any(items)
        return bool(decode(structure) if tag in ("r", "q", "n", "D") else items)
    except NO_VALUE:
        return False
