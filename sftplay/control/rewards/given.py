"""What each reward of a config pays given completions: the way to try a reward before a run."""

from __future__ import annotations

from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.data.read.sources import dialect_of, read_rows
from sftplay.data.records import Refused
from sftplay.errors import DataError
from sftplay.reward.reward_set import RewardSet, aligned
from sftplay.reward.table import judges_form, missing_column, reward_problems

COMPLETION = "completion"


def score_given(cfg: RunConfig, path: str) -> list[dict[str, Any]]:
    """A line for each row of the file, in its order: `rewards` by name, `total`, and the `verdict` on its program.

    A row has a `completion` and the columns that the rewards read. A value is None where the reward knows none; so is
    the total where that reward judges the content, or where none is known.

    Raises:
        ConfigError: a name or an option of a reward is wrong.
        DataError: a row cannot be read, has no completion, or lacks a column that a reward reads.
    """
    for problem in reward_problems(cfg):
        raise problem
    rows: list[dict[str, Any]] = []
    for source, row in read_rows(path, dialect_of(cfg.data)):
        if isinstance(row, Refused):
            raise DataError(f"cannot be read: {row.reason}", where=str(source), fix="mend the row, or leave it out")
        if not isinstance(row.get(COMPLETION), str):
            what = f"completion is {row.get(COMPLETION)!r:.60}, which is no text"
            raise DataError(what, where=str(source), fix='write {"completion": "...", "answer": "..."}')
        for reward in cfg.rewards:
            if name := missing_column(reward, [key for key, value in row.items() if value is not None]):
                what = f"the reward {reward.name} reads the column {name}, which is not there"
                raise DataError(what, where=str(source), fix=f"add {name} to the row")
        rows.append(dict(row))
    if not rows:
        raise DataError("has no rows", where=path, fix='write rows of {"completion": "...", "answer": "..."}')
    names = sorted({name for row in rows for name in row} - {COMPLETION})
    with RewardSet(cfg) as rewards:
        scored = rewards.score([row[COMPLETION] for row in rows], aligned(rows, names))
    found = []
    for at, verdict in enumerate(scored.verdicts):
        values = {name: scores.values[at] for name, scores in scored.by_name.items()}
        found.append({"rewards": values, "total": _total(cfg, values), "verdict": verdict})
    return found


def _total(cfg: RunConfig, values: dict[str, float | None]) -> float | None:
    """The weighted sum of what is known; None where a reward for content that is learned from is unknown."""
    known = []
    for reward in cfg.rewards:
        value = values[reward.name]
        if value is not None and reward.weight:
            known.append(value * reward.weight)
        elif reward.weight and not judges_form(reward):
            return None
    return sum(known) if known else None
