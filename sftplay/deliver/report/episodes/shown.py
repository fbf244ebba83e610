"""Some held-out problems with both answers and the hint, as they were before the run and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sftplay.deliver.report.drawing.page import cut
from sftplay.deliver.report.drawing.table import Table
from sftplay.deliver.report.read.run_files import RunFiles, answer_rows

EACH = 3
"""Problems shown of each kind."""

MOST_CHARACTERS = 500
MOST_LINES = 4_096

KINDS = ((False, True), (True, False), (False, False), (True, True))
"""Whether each answer is right after the run; those that turn 2 has changed come first."""


def episodes_table(run: RunFiles, steps: Sequence[int]) -> Table:
    """Episodes of the first and of the last of these measurements, those of a problem below each other."""
    head = ["Problem", "Step", "First answer", "Hint", "Second answer"]
    if not steps:
        return Table(head=head, rows=[])
    ends = sorted({steps[0], steps[-1]})
    by_step = {step: _episodes(run, step) for step in ends}
    last = by_step[ends[-1]]
    chosen = [n for kind in KINDS for n in [n for n, each in enumerate(last) if _correct(each) == kind][:EACH]]
    rows = [
        [
            cut(last[n].get("problem"), MOST_CHARACTERS) if step == ends[0] else "",
            f"{step:,}",
            *_texts(by_step[step][n]),
        ]
        for n in chosen
        for step in ends
        if n < len(by_step[step])
    ]
    caption = f"Held-out episodes, up to {EACH} of each kind; all are in eval/step-N.jsonl"
    return Table(head=head, rows=rows, kinds=" n", caption=caption, stacks=True)


def _episodes(run: RunFiles, step: int) -> list[dict[str, Any]]:
    rows = answer_rows(run.folder, f"step-{step}")
    return [row for _, row in zip(range(MOST_LINES), rows, strict=False)]


def _correct(episode: dict[str, Any]) -> tuple[bool | None, bool | None]:
    given = episode.get("correct")
    first, second = given if isinstance(given, list) and len(given) == 2 else (None, None)
    return first if isinstance(first, bool) else None, second if isinstance(second, bool) else None


def _texts(episode: dict[str, Any]) -> list[str]:
    """First answer, hint, second answer; a mark before each answer says whether it is right."""
    first, second = _correct(episode)
    texts = [cut(episode.get(name) or "", MOST_CHARACTERS) for name in ("first", "hint", "second")]
    marks = {True: "✓ ", False: "✗ ", None: ""}
    return [marks[first] + texts[0], texts[1], marks[second] + texts[2]]
