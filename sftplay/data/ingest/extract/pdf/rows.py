"""Words -> rows, and rows -> columns in reading order.

A gutter is a strip that few rows cross and that has running text on both sides. Rows that cross it (titles, wide
figures) divide the page into bands; in each band the left column is read before the right one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median

from sftplay.data.ingest.extract.pdf.words import Word

SAME_ROW = 0.45
"""Of the font's size: how far middles of words in one row may lie apart."""

GUTTER = 0.8
"""Least width of a gutter in sizes of the font. Spaces in justified text are half as wide at most."""

LEAST_ROWS, LEAST_WORDS, LEAST_FILL = 4, 3.0, 0.55
"""What each side of a gutter must have: rows, words in its usual row, share of the width that this row fills. Cells of
a table have less."""

MOST_CROSSED = 0.7
"""Share of rows that may cross a gutter."""

DEEPEST, EDGE, STEP, MOST_STEPS = 4, 0.15, 2.0, 400
"""Columns within columns; share of the width at both sides where no gutter is looked for; points between trials; trials
on a page of any width."""


@dataclass(slots=True)
class Row:
    """Words side by side, from left to right, or from right to left in scripts that are written so."""

    words: list[Word]
    top: float
    bottom: float
    x0: float
    x1: float
    size: float
    """The font's size of most of its characters."""

    middle: float
    """Of the longest word of that size."""

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


def to_rows(words: list[Word]) -> list[Row]:
    """The rows of some words, from top to bottom."""
    groups: list[list[Word]] = []
    for word in sorted(words, key=lambda word: (word.middle, word.x0)):
        for group in reversed(groups[-6:]):
            near = SAME_ROW * max(min(group[0].size, word.size), 1)
            if abs(group[0].middle - word.middle) <= near:
                group.append(word)
                break
        else:
            groups.append([word])
    return sorted((_row(group) for group in groups), key=lambda row: row.middle)


def _row(words: list[Word]) -> Row:
    words = sorted(words, key=lambda word: word.x0)
    right_to_left = sum(is_right_to_left(word.text) for word in words)
    if 2 * right_to_left > len(words):
        words.reverse()
    sizes: Counter[float] = Counter()
    for word in words:
        sizes[word.size] += len(word.text)
    size = max(sizes, key=lambda each: sizes[each])
    longest = max((word for word in words if word.size == size), key=lambda word: len(word.text))
    return Row(
        words,
        min(word.top for word in words),
        max(word.bottom for word in words),
        min(word.x0 for word in words),
        max(word.x1 for word in words),
        size,
        longest.middle,
    )


def is_right_to_left(text: str) -> bool:
    """Whether a word is Hebrew or Arabic."""
    return any("\u0590" <= sign <= "\u08ff" or "\ufb1d" <= sign <= "\ufefc" for sign in text)


def to_columns(words: list[Word], depth: int = 0) -> list[list[Row]]:
    """The words' rows by column, in the order in which they are read."""
    rows = to_rows(words)
    place = find_gutter(rows) if depth < DEEPEST else None
    if place is None:
        return [rows] if rows else []
    columns: list[list[Row]] = []
    for band, is_divided in _bands(rows, place, half=half_gutter(rows)):
        if not is_divided:
            columns.append(band)
            continue
        inside = [word for row in band for word in row.words]
        for side in ([w for w in inside if w.x1 <= place + STEP], [w for w in inside if w.x1 > place + STEP]):
            columns += to_columns(side, depth + 1)
    return columns


def find_gutter(rows: list[Row]) -> float | None:
    """The x of the gutter that divides most text; None where the rows are one column."""
    if len(rows) < LEAST_ROWS:
        return None
    left, right = min(row.x0 for row in rows), max(row.x1 for row in rows)
    half = half_gutter(rows)
    step_points = max(STEP, (right - left) / MOST_STEPS)
    first, n_steps = left + EDGE * (right - left), int((1 - 2 * EDGE) * (right - left) / step_points)
    crossed = [0] * (n_steps + 1)
    for row in rows:
        for x0, x1 in segments(row.words, 2 * half):
            for step in range(
                max(int((x0 - half - first) / step_points), 0), min(int((x1 + half - first) / step_points), n_steps)
            ):
                crossed[step] += 1
    scores = {}
    for x in (first + step * step_points for step in range(n_steps) if crossed[step] <= MOST_CROSSED * len(rows)):
        bands = _bands(rows, x, half=half)
        scores[x] = sum(_score(band, x, edges=(left, right)) for band, is_divided in bands if is_divided)
    best = max(scores.values(), default=0)
    return median(x for x in scores if scores[x] == best) if best else None


def half_gutter(rows: list[Row]) -> float:
    """Half the least width of a gutter among these rows."""
    return GUTTER * median(row.size for row in rows) / 2


def segments(words: list[Word], gap: float) -> list[tuple[float, float]]:
    """Where a row's words stand, those together that have less than the gap between them."""
    found: list[tuple[float, float]] = []
    for word in sorted(words, key=lambda word: word.x0):
        if found and word.x0 - found[-1][1] < gap:
            found[-1] = found[-1][0], max(word.x1, found[-1][1])
        else:
            found.append((word.x0, word.x1))
    return found


def _bands(rows: list[Row], x: float, *, half: float) -> list[tuple[list[Row], bool]]:
    """The rows in runs, each with whether its rows leave the strip at x free; free runs that are short are not."""
    bands: list[tuple[list[Row], bool]] = []
    for row in rows:
        is_free = all(word.x1 <= x - half or word.x0 >= x + half for word in row.words)
        if bands and bands[-1][1] == is_free:
            bands[-1][0].append(row)
        else:
            bands.append(([row], is_free))
    return [(band, is_free and _has_sides(band, x)) for band, is_free in bands]


def _has_sides(band: list[Row], x: float) -> bool:
    """Whether enough rows have words on the left of x, and enough on the right."""
    n_left = sum(any(word.x1 <= x for word in row.words) for row in band)
    n_right = sum(any(word.x1 > x for word in row.words) for row in band)
    return min(n_left, n_right) >= LEAST_ROWS


def _score(band: list[Row], x: float, *, edges: tuple[float, float]) -> int:
    """Characters on the side that has fewer; 0 where a side is no running text."""
    scores = []
    for is_left in (True, False):
        sides = [[word for word in row.words if (word.x1 <= x) is is_left] for row in band]
        sides = [side for side in sides if side]
        width = x - edges[0] if is_left else edges[1] - x
        fills = [(max(w.x1 for w in side) - min(w.x0 for w in side)) / max(width, 1) for side in sides]
        if median(map(len, sides)) < LEAST_WORDS or median(fills) < LEAST_FILL:
            return 0
        scores.append(sum(len(word.text) for side in sides for word in side))
    return min(scores)
