"""What episodes say in figures: how often each turn is right, and what the second turn did to the first."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from sftplay.data.prompts.questions import Question
from sftplay.reward.math_rewards import reference_answer
from sftplay.tasks.score.episodes.hint_leak import states_answer, states_program

LONGEST_LEAK = 100
"""Characters of a reference that a hint could state; a longer one is a whole solution."""

COPIES = 0.9
"""Share of the wrong first answers that turn 2 repeats, from which on it copies. Right ones are to be repeated.

The same share of the changed answers that the hint states: then turn 2 follows the hint.
"""


def turn_figures(right_first: Sequence[bool], right_second: Sequence[bool]) -> dict[str, float | None]:
    """Accuracies of both turns, and what changed, as shares of all problems; None where there is none.

    `i2c` (incorrect to correct) less `c2i` is `delta`, and `fix_rate` and `break_rate` are conditional on turn 1.
    """
    pairs, n = list(zip(right_first, right_second, strict=True)), len(right_first)
    if not n:
        return dict.fromkeys(("acc_t1", "acc_t2", "delta", "i2c", "c2i", "fix_rate", "break_rate"))
    n_first, n_second = sum(right_first), sum(right_second)
    fixed = sum(second and not first for first, second in pairs)
    broken = sum(first and not second for first, second in pairs)
    return {
        "acc_t1": n_first / n,
        "acc_t2": n_second / n,
        "delta": (n_second - n_first) / n,
        "i2c": fixed / n,
        "c2i": broken / n,
        "fix_rate": fixed / (n - n_first) if n > n_first else None,
        "break_rate": broken / n_first if n_first else None,
    }


def edit_ratio(before: Sequence[int], after: Sequence[int]) -> float:
    """Levenshtein's distance of two sequences of tokens, over the length of the longer one.

    >>> edit_ratio([1, 2, 3, 4], [1, 3, 4])
    0.25
    """
    longer = max(len(before), len(after))
    if not longer:
        return 0.0
    target, places = np.asarray(list(after)), np.arange(len(after) + 1)
    row = places.copy()
    for n, token in enumerate(before, 1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (target != token).astype(int))
        # An insertion costs one more than its left neighbour.
        row = np.minimum.accumulate(np.concatenate([[n], changed]) - places) + places
    return float(row[-1]) / longer


def reference_of(question: Question) -> str:
    """The right answer of a problem as a hint could state it; empty where it has none."""
    answer = question.columns.get("answer")
    return "" if answer is None else reference_answer(str(answer))


def is_leaked(question: Question, hint: str) -> bool:
    """Whether a hint states the right answer, in whatever form; of a program: the function that is asked for."""
    if name := question.columns.get("entry_point"):
        return states_program(str(name), hint, reference=str(question.columns.get("answer") or ""))
    reference = reference_of(question)
    if not reference or len(reference) > LONGEST_LEAK:
        return False
    return states_answer(reference, hint, problem=question.question)


def gives_the_hints_answer(hint: str, answer: str) -> bool:
    """Whether a hint is the answer itself: the whole text, the last number in a box, or what stands behind `####`.

    >>> gives_the_hints_answer("The answer is \\\\boxed{4}.", "4"), states_answer("Look at step 2.", "2")
    (True, False)
    """
    return bool(hint.strip()) and reference_answer(hint) == reference_answer(answer)


def action_figures(firsts: Sequence[Sequence[int]], seconds: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far second answers are from first ones."""
    pairs = list(zip(firsts, seconds, strict=True))
    return {
        "edit_ratio": fmean(edit_ratio(first, second) for first, second in pairs),
        "frac_identical": fmean(list(first) == list(second) for first, second in pairs),
    }


def diagnosis(figures: dict[str, float | None]) -> str:
    """What the second turn does, in words; from the figures of an evaluation."""
    delta, i2c, c2i = (figures[key] or 0.0 for key in ("delta", "i2c", "c2i"))
    if (figures["repeats"] or 0.0) >= COPIES:
        return "turn 2 copies the first answer: no self-correction"
    if delta > 0 and i2c >= 5 * c2i and delta >= 0.05:
        if (figures["changes_to_hint"] or 0.0) >= COPIES:
            return "turn 2 follows the hint: it is the answer"
        return "turn 2 corrects the first answer"
    if (figures["acc_t1"] or 0.0) >= COPIES and delta < 0.05:
        return "the first answer is right already: little is left to correct"
    if delta <= 0:
        return "turn 2 is no better than turn 1: no self-correction"
    return "turn 2 changes answers, for the better and for the worse"
