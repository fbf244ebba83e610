"""Plain data crosses between processes and stays what it was; what is not plain does not cross."""

from __future__ import annotations

import json
from collections import Counter, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as some

from sftplay.sandbox.inside.plain import NotPlain, decode, encode, is_same, is_true

atoms = (
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text()
    | some.binary()
    | some.complex_numbers()
)
hashable = some.recursive(atoms, lambda inner: some.tuples(inner) | some.frozensets(inner, max_size=3), max_leaves=4)
values = some.recursive(
    atoms | some.sets(hashable, max_size=3),
    lambda inner: (
        some.lists(inner, max_size=4) | some.tuples(inner, inner) | some.dictionaries(hashable, inner, max_size=3)
    ),
    max_leaves=12,
)


def structure_of(value: object) -> object:
    return json.loads(encode(value))


def written(value: object) -> str:
    """As repr, with the items of a set sorted: their order follows the address of a nan."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({sorted(map(written, value))})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({[written(item) for item in value]})"
    if isinstance(value, dict):
        return str([(written(key), written(item)) for key, item in value.items()])
    return repr(value)


@given(values)
def test_a_value_comes_back_as_it_went(value):
    came = decode(structure_of(value))
    assert written(came) == written(value) or came == value


@given(values, values)
def test_a_structure_is_compared_as_python_compares_the_values(one, other):
    alone = decode(structure_of(one))  # nan equals itself in a list of Python's, because it is the same object
    assert is_same(structure_of(one), other) == (alone == other)


@given(values)
def test_the_truth_of_a_structure_is_that_of_its_value(value):
    assert is_true(structure_of(value)) == bool(value)


Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "equal"),
    [(Counter("aab"), {"a": 2, "b": 1}), (Point(1, 2), (1, 2)), (Colour.RED, 3), (7**2_500, 7**2_500)],
)
def test_a_subclass_is_taken_for_the_plain_value_that_it_holds(value, equal):
    assert value == equal
    assert is_same(structure_of(value), equal)


EXACT = [
    Fraction(1, 2), Fraction(-3), Fraction(0), Decimal("0.5"), Decimal("2"), Decimal("0"), Decimal("NaN"),
    date(2020, 1, 2), datetime(2020, 1, 2, 3, 4, tzinfo=UTC), time(3, 4), timedelta(days=1), timedelta(0),
    {1: 2}.keys(), {}.keys(), {1: 2}.items(), {1: 2}.values(), deque([1, 2]),
    [Fraction(1, 2)], {Decimal(2): 1}, {Fraction(1, 2)},
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=repr)
@pytest.mark.parametrize(
    "expected", [0.5, 0, 2, -3, [1, 2], {1}, {(1, 2)}, set(), [2], [0.5], {2: 1}, {0.5}, "2", None]
)
def test_values_of_python_s_own_classes_are_compared_as_its_assert_compares_them(value, expected):
    assert is_same(structure_of(value), expected) == (value == expected)
    assert is_true(structure_of(value)) == bool(value)


@pytest.mark.parametrize("value", [each for each in EXACT if each == each], ids=repr)
def test_values_of_python_s_own_classes_cross(value):
    crossed = decode(structure_of(value))
    assert type(crossed) is type(value)
    assert crossed == value or list(crossed) == list(value)  # the values of a dict equal only themselves


FORGED = [
    [], ["l"], ["x"], ["x", "zz"], ["b", 3], ["c", "a"], ["d", 1], ["d", [1]], ["s", ["l"]], [["l"]], [{}], {"a": 1},
    ["?"], ["r", "a"], ["d", [["d"], 1]], ["nonsense", 1], ["q", "1", "0"], ["q", "1" * 900_000, "3"], ["n", "sNaN"],
    ["n", "x"], ["D", "date", "x"], ["D", "os", "x"], ["q"], ["D", "timedelta", 10**20], ["k", ["l"]], ["e", 1],
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
def test_no_forged_structure_equals_anything_or_raises(forged):
    for expected in ([], (), {}, {1: 2}, {1}, 0, 0.5, 1, None, "", b"", 0j, [1], "x"):
        assert is_same(forged, expected) == (forged == ["l"] and expected == [])
    assert is_true(forged) in (True, False)


def test_a_value_that_is_too_deep_or_has_no_end_does_not_cross():
    deep: list[object] = []
    deep.append(deep)
    with pytest.raises(NotPlain):
        encode(deep)
    with pytest.raises(NotPlain):
        encode(iter(int, 1))


def test_an_object_goes_back_to_its_process_as_itself_and_an_iterator_as_its_items():
    kept: dict[int, object] = {}

    def keep(value: object) -> int:
        kept[id(value)] = value
        return id(value)

    thing = object()
    crossed = decode(json.loads(encode([thing, iter("ab")], keep)))
    back = decode(json.loads(encode(crossed)), kept)
    assert back[0] is thing
    assert list(back[1]) == ["a", "b"]
