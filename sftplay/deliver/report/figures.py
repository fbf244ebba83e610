"""Figures and texts as the report shows them: rounded for people, and safe inside HTML.

Nothing that a file of the run holds reaches a page but through `escaped`.
"""

from __future__ import annotations

import html
import math
import re
from typing import Any

from sftplay.deliver.report.history import as_number
from sftplay.units import format_bytes, format_seconds

SHARES = ("exact_match", "rouge_l", "chrf", "accuracy", "mfu")
LESS_IS_BETTER = ("loss", "held_out_loss", "perplexity", "bits_per_byte")
PERCENT = "\u00a0%"
"""Kept together with its figure."""

NAMES = {
    "n": "prompts answered",
    "held_out_loss": "held-out loss",
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
    "tokens_per_s": "tokens per second",
    "grad_norm": "gradient norm",
    "model_tflops_per_s": "TFLOP/s of the model",
    "mfu": "share of the peak (MFU)",
    "peak_rss_bytes": "peak memory",
    "peak_bytes": "peak memory",
    "allocated_bytes": "allocated memory",
    "reserved_bytes": "reserved memory",
}

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters no HTML text may hold, or that turn the direction of what follows; half surrogates are no UTF-8."""


def escaped(value: object, limit: int | None = None) -> str:
    """The value as HTML text, in an attribute too; of a long one the beginning, and how long it is.

    Control characters, also those that turn the writing direction, are shown as escapes.
    """
    text = value if isinstance(value, str) else str(value)
    cut = ""
    if limit is not None and len(text) > limit:
        text, cut = text[:limit], f" … ({len(text):,} characters in all)"
    return html.escape(_STEERING.sub(_as_escape, text), quote=True) + cut


def _as_escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def name_of(key: str) -> str:
    """What a figure is called, in words."""
    return NAMES.get(key, key.replace("_", " "))


def capitalized(text: str) -> str:
    """The text with a capital in front."""
    return text[:1].upper() + text[1:]


def format_figure(key: str, value: object) -> str:
    """The value of the figure `key` with its unit; a dash for none."""
    number = as_number(value)
    if number is None:
        return "–"
    if not math.isfinite(number):
        return "not finite"
    if is_share(key) and -1 <= number <= 1:
        return f"{math.floor(1000 * number + 0.5) / 10:.1f}{PERCENT}"
    if key.endswith("_bytes"):
        return format_bytes(number)
    if key.endswith("_seconds"):
        return format_seconds(number)
    return rounded(number)


def is_share(key: str) -> bool:
    """True for figures between 0 and 1 that people read in percent."""
    return key in SHARES or key.endswith("_share") or key.startswith("pass@")


def rounded(number: float) -> str:
    """Four figures, thousands parted by commas, very small and very large ones with an exponent."""
    size = abs(number)
    if not math.isfinite(number):
        return "not finite"
    if number == int(number) and size < 1e9:
        return f"{int(number):,}"
    if size >= 1e9 or size < 1e-3:
        return f"{number:.3g}"
    return f"{number:,.0f}" if size >= 1000 else f"{number:.4g}"


def change(key: str, before: object, after: object) -> str:
    """The difference, signed and in the figure's unit; empty when one of the two is no finite number."""
    old, new = as_number(before), as_number(after)
    if old is None or new is None or not math.isfinite(old) or not math.isfinite(new):
        return ""
    difference = new - old
    sign = "+" if difference > 0 else "−" if difference < 0 else "±"
    text = format_figure(key, abs(difference))
    return f"{sign}{text.removesuffix(PERCENT)} points" if text.endswith(PERCENT) else f"{sign}{text}"


def is_better(key: str, before: object, after: object) -> bool | None:
    """Whether the figure went the right way; None where that is not known or nothing moved."""
    old, new = as_number(before), as_number(after)
    is_less = any(key == name or key.startswith(f"{name}_") for name in LESS_IS_BETTER)
    if old is None or new is None or old == new or not (is_less or is_share(key)):
        return None
    return (new < old) == is_less


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share among `count` (Wilson, JASA 1927)."""
    z = 1.959964
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    below = 1 + z * z / count
    return (middle - half) / below, (middle + half) / below


def facts(rows: list[tuple[str, Any]]) -> str:
    """Names with their values, as a list of definitions; rows with nothing to say are left out."""
    shown_rows = [(name, value) for name, value in rows if value not in (None, "", [], {})]
    inner = "".join(f"<div><dt>{escaped(n)}</dt><dd>{escaped(v, 2000)}</dd></div>" for n, v in shown_rows)
    return f'<dl class="facts">{inner}</dl>' if inner else ""


def table(head: list[str], rows: list[list[str]], *, caption: str = "", kinds: str = "", stacks: bool = False) -> str:
    """A table of cells that are HTML already; `kinds` has a letter a column, `n` for figures, else text.

    Where the page is too narrow it scrolls inside itself, or with `stacks` has its cells below each other.
    """
    marks = [' class="n"' if kind == "n" else "" for kind in kinds.ljust(len(head))]
    top = "".join(f'<th scope="col"{mark}>{cell}</th>' for mark, cell in zip(marks, head, strict=True))
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks[1:], rest, strict=True))
        body += f'<tr><th scope="row"{marks[0]}>{first}</th>{cells}</tr>'
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    look = "wide stack" if stacks else "wide"
    return f'<div class="{look}"><table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
