"""Held-out losses that a run has measured while it trained, from the content of eval/step-N.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sftplay.deliver.report.read.history import MOST_SOURCES, Point, as_number


def by_step(evals: dict[str, dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The measurements while training, each with its step."""
    for name, figures in evals.items():
        step = name.removeprefix("step-")
        if name.startswith("step-") and step.isdecimal() and len(step) < 16:
            yield float(step), figures


def compared(evals: dict[str, dict[str, Any]]) -> dict[str, str]:
    """before and after -> names of the measurements that stand for them.

    A run that learns from rewards measures itself at its first and at its last step.
    """
    steps = sorted(step for step, figures in by_step(evals) if "reward" in figures)
    if len(steps) < 2 or steps[0] != 0 or {"before", "after"} & set(evals):
        return {}
    return {"before": "step-0", "after": f"step-{steps[-1]:.0f}"}


def held_out_sources(evals: dict[str, dict[str, Any]]) -> dict[str, list[Point]]:
    """(step, held-out loss) of each source of a mixture."""
    points: dict[str, list[Point]] = {}
    for step, figures in sorted(by_step(evals), key=lambda pair: pair[0]):
        sources = figures.get("sources")
        for name, each in list(sources.items())[:MOST_SOURCES] if isinstance(sources, dict) else ():
            loss = as_number(each.get("loss")) if isinstance(each, dict) else None
            if loss is not None:
                points.setdefault(name, []).append((step, loss))
    return points
