"""perplexity.json: what a run's sources were like before and after training, and what was forgotten.

It measures nothing: `sources` gives it the figures of one side at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Side = Literal["before", "after"]
SIDES: tuple[Side, Side] = ("before", "after")
ENOUGH_ROWS = 20
"""Held-out chats from which on a change of their loss is put into words."""

Figures = Mapping[str, Any]
BySource = Mapping[str, Figures]


def with_side(
    content: Figures, side: Side, *, window: int, stride: int, vocabulary: int, texts: BySource, anchors: BySource
) -> dict[str, Any]:
    """Return `content`, what perplexity.json holds so far, with the figures of one side in it.

    `vocabulary` is the words of the tokenizer; `texts` and `anchors` map sources of documents and of chats to figures.

    `sources`: for each source of documents `perplexity_before`, `perplexity_after`, the same of `loss` and
    `bits_per_byte`, then `tokens`, `documents` and `bytes`. `anchor`: for each source of chats `loss_before`,
    `loss_after`, the same of each metric, `n`, `rows`, `forgetting_percent` and what it means. `perplexity_compares`:
    false where the two models have other tokenizers; then only bits per byte compares. Figures of the other side stay
    where they were taken with the same window and stride.
    """
    how = {"window": window, "stride": stride}
    old = content if {key: content.get(key) for key in how} == how else {}
    sizes = {f"vocabulary_{name}": old.get(f"vocabulary_{name}") for name in SIDES}
    sizes[f"vocabulary_{side}"] = vocabulary
    chats = _join_sides(old.get("anchor"), side, figures=anchors)
    return {
        **how,
        **sizes,
        "perplexity_compares": len({size for size in sizes.values() if size is not None}) == 1,
        "sources": _join_sides(old.get("sources"), side, figures=texts),
        "anchor": {name: {**row, **_describe_forgetting(name, row)} for name, row in chats.items()},
    }


def comparison_table(content: Figures) -> str:
    """Return perplexity.json for a terminal."""
    lines = _block("documents", ["tokens", "perplexity", "bits_per_byte"], rows=content["sources"])
    if not content["perplexity_compares"]:
        lines.append("the two models have other tokenizers: perplexity does not compare, bits per byte does")
    lines += _block("chats", ["n", "loss", "exact_match"], rows=content["anchor"])
    lines += [row["forgetting"] for row in content["anchor"].values() if row["forgetting"]]
    return "\n".join([*lines, f"window {content['window']:,} tokens, stride {content['stride']:,}"])


def _join_sides(old: Any, side: Side, *, figures: BySource) -> dict[str, dict[str, Any]]:
    """The rows of the sources in `figures`, each with the figures of both sides."""
    known = old if isinstance(old, dict) else {}
    joined = {}
    for name, found in figures.items():
        joined[name] = row = dict[str, Any]()
        for key, value in found.items():
            if key in ("n", "rows", "tokens", "documents", "bytes"):
                row[key] = value
            else:
                earlier = known.get(name, {})
                row |= {f"{key}_{at}": value if at == side else earlier.get(f"{key}_{at}") for at in SIDES}
    return joined


def _describe_forgetting(name: str, row: Figures) -> dict[str, Any]:
    """By how many percent the loss on a chat source has risen, and what that means in words."""
    before, after = (as_finite(row.get(f"loss_{side}")) for side in SIDES)
    if before is None or after is None or not before > 0:
        return {"forgetting_percent": None, "forgetting": ""}
    rise = 100 * (after / before - 1)
    rows = int(row.get("rows", row.get("n", 0)))
    what = "nothing" if rise <= 0 else "hardly anything" if rise <= 5 else "some" if rise <= 20 else "much"
    moved = f"the loss on {name} {'rose' if rise > 0 else 'fell'} by {abs(rise):.1f} % over {rows:,} held-out row(s)"
    enough = rows >= ENOUGH_ROWS
    verdict = f"{what} of it was forgotten" if enough else f"too few to tell, {ENOUGH_ROWS} are needed"
    return {"forgetting_percent": rise, "forgetting": f"{moved}: {verdict}"}


def as_finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _block(title: str, keys: list[str], *, rows: BySource) -> list[str]:
    """A line for each row: how many, then two figures before and after."""
    if not rows:
        return []
    count, *pairs = keys
    named = "prompts" if count == "n" else count
    lines = [f"{title:24}{named:>12}" + "".join(f"{key.replace('_', ' '):>22}" for key in pairs)]
    for name, row in rows.items():
        line = f"{name[:23]:24}{row.get(count) or 0:12,}"
        for key in pairs:
            sides = [as_finite(row.get(f"{key}_{side}")) for side in SIDES]
            line += f"{' -> '.join('-' if value is None else f'{value:.4g}' for value in sides):>22}"
        lines.append(line)
    return lines
