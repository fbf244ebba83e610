"""What became of a figure: its change, whether that is the better one, and how sure a share is."""

from __future__ import annotations

import math

from sftplay.report.figures import PERCENT, as_number, format_figure, is_share

LESS_IS_BETTER = ("loss", "held_out_loss", "perplexity", "bits_per_byte", "c2i", "break_rate")


def change(key: str, before: object, *, after: object) -> str:
    """Return the difference, signed and in the figure's unit; empty where one of the two is no finite number."""
    old, new = as_number(before), as_number(after)
    if old is None or new is None or not math.isfinite(old) or not math.isfinite(new):
        return ""
    difference = new - old
    sign = "+" if difference > 0 else "−" if difference < 0 else "±"
    text = format_figure(key, abs(difference))
    return f"{sign}{text.removesuffix(PERCENT)} points" if text.endswith(PERCENT) else f"{sign}{text}"


def is_better(key: str, before: object, *, after: object) -> bool | None:
    """Return whether the figure went the right way; None where that is not known or nothing moved."""
    old, new = as_number(before), as_number(after)
    is_less = any(key == name or key.startswith(f"{name}_") for name in LESS_IS_BETTER)
    if old is None or new is None or old == new or not (is_less or is_share(key)):
        return None
    return (new < old) == is_less


def compare(key: str, before: object, *, after: object) -> list[str]:
    """Return the figure before and after, and its change with a verdict."""
    verdict = {True: " better", False: " worse", None: ""}[is_better(key, before, after=after)]
    return [format_figure(key, before), format_figure(key, after), change(key, before, after=after) + verdict]


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share among `count` (Wilson, JASA 1927)."""
    z = 1.959964
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    below = 1 + z * z / count
    return (middle - half) / below, (middle + half) / below
