"""Tries rewards on gold answers and on junk before anything is trained: a reward that cannot tell them apart is named.

Junk is what a model finds when it looks for reward without solving anything: nothing, noise, another row's answer, all
answers at once, the same words again and again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sftplay.reward.calls import RewardCall, Scores
from sftplay.reward.table import judges_form

Verdict = Literal["ok", "cannot_tell", "constant", "raises"]

APART = 0.3
"""How far the mean of gold answers must lie above the mean of every kind of junk, in shares of the values' range."""

NOISE = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt"
REPEATS = 400
SEVERAL = 4
"""Answers that one junk answer gives side by side."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row on which rewards are tried: its right answer, and the columns that rewards get."""

    gold: str
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of trying one reward."""

    name: str
    verdict: Verdict
    gold_mean: float | None
    junk_mean: float | None
    """Of the kind of junk that scored best."""

    junk: dict[str, float | None] = field(default_factory=dict)
    """Kind of junk -> mean of its values that are known."""

    why: str = ""
    seconds: float = 0.0


def check_reward(call: RewardCall, cases: Sequence[Case], *, name: str) -> Finding:
    """Try a reward on the gold and junk answers of the cases."""
    began = time.monotonic()
    gold = score(call, [case.gold for case in cases], cases=cases)
    kinds = {kind: score(call, answers, cases=cases) for kind, answers in junk_answers(cases).items()}
    junk = {kind: mean_of(scores) for kind, scores in kinds.items()}
    verdict, why = _judge(gold, junk, only_form=judges_form(call.use))
    known = [mean for mean in junk.values() if mean is not None]
    return Finding(
        name, verdict, mean_of(gold), max(known, default=None), junk, why, round(time.monotonic() - began, 3)
    )


def score(call: RewardCall, answers: Sequence[str], *, cases: Sequence[Case]) -> Scores:
    """The reward's values of one answer for each case."""
    columns = {name: [case.columns[name] for case in cases] for name in cases[0].columns}
    return call(answers, **columns)


def junk_answers(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Kind of junk -> an answer for each case. Kinds for which the rows offer nothing wrong are left out."""
    golds = [case.gold for case in cases]
    others = [
        next((each for each in (*golds[n + 1 :], *golds[:n]) if each != gold), "") for n, gold in enumerate(golds)
    ]
    answers = {
        "nothing": ["" for _ in golds],
        "noise": [NOISE for _ in golds],
        "again and again": [" ".join([other or NOISE] * REPEATS) for other in others],
    }
    if all(others):
        answers["another row's answer"] = others
        several = list(dict.fromkeys(golds))[:SEVERAL]
        answers["several answers"] = [
            "\n".join(dict.fromkeys([gold, *several, other])) for gold, other in zip(golds, others, strict=True)
        ]
    return answers


def mean_of(scores: Scores) -> float | None:
    """Mean of the values that are known; None where none is."""
    known = [value for value in scores.values if value is not None]
    return sum(known) / len(known) if known else None


def _judge(gold: Scores, junk: Mapping[str, float | None], *, only_form: bool) -> tuple[Verdict, str]:
    best = mean_of(gold)
    if None in gold.values or best is None:
        return "raises", "; ".join(gold.reasons)
    known = {kind: mean for kind, mean in junk.items() if mean is not None}
    if not known:
        return "raises", "it gives no value for any junk"
    values = [*(value for value in gold.values if value is not None), *known.values()]
    spread = max(values) - min(values)
    if spread == 0:
        return "constant", f"everything gets {best:g}"
    near = {kind: mean for kind, mean in known.items() if best - mean < APART * spread}
    # An answer of the right form may be wrong: it is enough that something falls behind.
    if near and not (only_form and len(near) < len(known)):
        worst = max(near, key=lambda kind: near[kind])
        return "cannot_tell", f"{worst} gets {near[worst]:g}, right answers get {best:g}"
    return "ok", ""
