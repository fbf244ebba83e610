"""Some of the completions that a run has tried, with what each was paid and why: from its beginning, middle and end."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sftplay.report.answers import MOST_CHARACTERS, Answer
from sftplay.report.figures import rounded
from sftplay.report.history import as_number
from sftplay.report.page import cut
from sftplay.report.run_files import RunFiles, mapping
from sftplay.report.samples import Line, content_names, passes, read_samples, sampled_steps

STEPS, GROUPS, EACH = 3, 2, 3
"""Steps that are shown, prompts of each, and different completions of each prompt."""


class Tries(NamedTuple):
    """Groups of completions, and how many steps have kept theirs."""

    shown: list[Answer]
    n_steps: int


def tries_of(run: RunFiles) -> Tries | None:
    """Completions of a few steps; None for a run that has kept none, or whose are episodes."""
    steps = sampled_steps(run)
    if not steps or run.value("task_mode") == "score":
        return None
    chosen = sorted({steps[at * (len(steps) - 1) // (STEPS - 1)] for at in range(STEPS)})
    content = content_names(run)
    shown = [answer for step in chosen for answer in _groups(read_samples(run, step), step=step, content=content)]
    return Tries(shown, len(steps)) if shown else None


def _groups(lines: list[Line], *, step: int, content: list[str]) -> list[Answer]:
    """The groups of a step whose completions were paid most differently."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(cut(line.get("prompt_id"), 40), []).append(line)
    widest = sorted(groups.items(), key=lambda pair: -_spread(pair[1]))[:GROUPS]
    return [_answer(name, group, step=step, content=content) for name, group in widest]


def _spread(group: list[Line]) -> float:
    known = [value for line in group if math.isfinite(value := _advantage(line))]
    return max(known, default=0.0) - min(known, default=0.0)


def _advantage(line: Line) -> float:
    return as_number(line.get("advantage")) or 0.0


def _answer(name: str, group: list[Line], *, step: int, content: list[str]) -> Answer:
    """A prompt with the best, the middle and the worst of its completions; equal ones once."""
    different = {str(line.get("completion")): line for line in group}
    ranked = sorted(different.values(), key=_advantage, reverse=True)
    places = sorted({at * (len(ranked) - 1) // (EACH - 1) for at in range(EACH)})
    texts: list[tuple[str, bool | None, str]] = [("Prompt", None, cut(group[0].get("prompt") or "", MOST_CHARACTERS))]
    for line in (ranked[place] for place in places):
        text = cut(line.get("completion"), MOST_CHARACTERS)
        texts.append((_why(line), passes(line, content), text))
    title = f"Step {step:,}, prompt {name}: {len(group):,} completions, {len(different):,} different"
    return Answer(title, texts)


def _why(line: Line) -> str:
    """What a completion was paid, by each reward, and what became of its program."""
    rewards = [f"{cut(name, 40)} {_figure(value)}" for name, value in list(mapping(line.get("rewards")).items())[:8]]
    verdict = mapping(line.get("verdict"))
    ending = [str(verdict["status"])] if isinstance(verdict.get("status"), str) else []
    if verdict.get("total") is not None:
        ending.append(f"{_figure(verdict.get('passed'))} of {_figure(verdict.get('total'))} tests")
    said = "; ".join([", ".join(rewards), *([", ".join(ending)] if ending else [])])
    return cut(f"{said}. Advantage {_figure(line.get('advantage'))}", 300)


def _figure(value: Any) -> str:
    number = as_number(value)
    return "unknown" if number is None else rounded(number)
