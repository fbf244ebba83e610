"""Try the rewards of a config on right answers and on junk, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.layouts.convert import read_layout_options
from sftplay.data.problems.load import sound_problems
from sftplay.data.problems.problem import Problem
from sftplay.data.prompts.prompt import read_reward_columns, to_prompt
from sftplay.data.read.sources import read_dialect, read_rows
from sftplay.data.records import Refused, Source
from sftplay.errors import DataError
from sftplay.reward.check import TRIED_ROWS, Case, check_before_training
from sftplay.reward.code_answer import find_code
from sftplay.reward.code_rewards import read_limits
from sftplay.reward.reward_set import RewardSet, aligned
from sftplay.reward.table import judges_form, missing_column, reward_problems

SOLVED_ROWS = 1_000
"""Rows whose own solutions are run; a solution takes some milliseconds, and the verdicts are kept."""

Row = tuple[Source, dict[str, Any] | None]
"""A row's place, and what rewards read of it; None for one that cannot be read."""


def try_rewards(cfg: RunConfig) -> None:
    """Refuse rewards that cannot be asked, or that cannot tell right answers from junk, before a model is opened.

    Only rewards that a model learns from must tell them apart: not those that other tasks measure, nor those that a
    control replaces. Raises what `RewardSet`, `check_before_training` and `check_solutions` raise.
    """
    with RewardSet(cfg) as rewards:
        if not cfg.task.learns_from_rewards or (cfg.task.turns == 1 and cfg.grpo.placebo_reward is not None):
            return
        log.status("trying the rewards on right answers and on junk", "reward")
        found = [(str(source), columns) for source, columns in _first_rows(cfg, TRIED_ROWS) if columns is not None]
        check_solutions(cfg, rewards)
        rows, places = [columns for _, columns in found], [place for place, _ in found]
        check_before_training(cfg, rows, rewards=rewards, places=places)


def check_solutions(cfg: RunConfig, rewards: RewardSet) -> None:
    """Say which rows' own solutions do not pass their tests: no answer to them can. Nothing is run without code_tests.

    Raises:
        DataError: a row's test or setup is no Python; or no solution passes.
        RunError: the sandbox failed.
    """
    if rewards.sandbox is None:
        return
    problems = [problem for source, row in _first_rows(cfg, SOLVED_ROWS) if row and (problem := _problem(row, source))]
    if problems:
        limits, outcome = read_limits(cfg.sandbox), "is solved by no answer"
        sound_problems(problems, rewards.sandbox, limits=limits, outcome=outcome)


def _problem(row: dict[str, Any], source: Source) -> Problem | None:
    """The row's tests with its own solution; None where it lacks either. It is known by its place."""
    tests, name = row.get("tests"), str(row.get("entry_point") or "")
    code = find_code(str(row.get("answer") or ""), name).code
    if not code or not isinstance(tests, Sequence) or isinstance(tests, str):
        return None
    return Problem(str(source), "", tuple(map(str, tests)), name, code, str(row.get("setup") or ""))


def read_cases(cfg: RunConfig, n: int) -> list[Case]:
    """The first `n` rows that can be read, each with its right answer and its columns.

    Raises:
        DataError: fewer than two rows have an answer.
    """
    rows = _first_rows(cfg, n)
    cases = [Case(row["answer"], row, str(at)) for at, row in rows if row and isinstance(row.get("answer"), str)]
    n_left_out = len(rows) - len(cases)
    if n_left_out:
        log.say(f"note: {n_left_out:,} of the first {n} rows cannot be read, or have no answer: left out", "reward")
    if len({case.gold for case in cases}) < 2:
        what = f"the first {n} rows hold fewer than two different answers"
        raise DataError(what, where=cfg.rows_path, fix="name rows with a prompt and an answer, or raise N")
    return cases


def _first_rows(cfg: RunConfig, n: int) -> list[Row]:
    reading, rows = read_layout_options(cfg.data), []
    for number, (source, row) in enumerate(islice(read_rows(cfg.rows_path, read_dialect(cfg.data)), n)):
        columns = None
        if not isinstance(row, Refused):
            with suppress(DataError):
                prompt = to_prompt(row, source, number=number, reading=reading)
                columns = read_reward_columns(prompt.row, source, reading=reading)
        rows.append((source, columns))
    return rows


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
    for source, row in read_rows(path, read_dialect(cfg.data)):
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
