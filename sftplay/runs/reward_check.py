"""Try the rewards of a config on right answers and on junk, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.layouts import read_layout_options
from sftplay.data.load_problems import sound_problems
from sftplay.data.problem import Problem
from sftplay.data.prompts import read_reward_columns, to_prompt
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Refused, Source
from sftplay.environments.processes import EnvironmentSpec, open_single_turns
from sftplay.errors import DataError
from sftplay.reward.check import TRIED_ROWS, Case, check_before_training
from sftplay.reward.code_rewards import find_code, read_limits
from sftplay.reward.reward_set import PASSED, RewardSet, aligned, find_secrets
from sftplay.reward.table import is_user_function, judges_form, missing_column, reward_problems

OPEN_ENVIRONMENTS = ("openenv", "verifiers")
"""Shipped environments in which code of the user's choice runs."""


def try_rewards(cfg: RunConfig) -> None:
    """Refuse rewards that cannot be asked, or that cannot tell right answers from junk, before a model is opened. Say
    first what functions of the user do not get.

    Only rewards that a model learns from must tell them apart: not those that other tasks measure, nor those that a
    placebo replaces. Raises what `RewardSet`, `check_before_training` and `check_solutions` raise.
    """
    _say_withheld(cfg)
    with RewardSet(cfg) as rewards, open_single_turns(cfg) as single_turns:
        if not cfg.task.learns_from_rewards or (cfg.task.turns == 1 and cfg.grpo.placebo_reward is not None):
            return
        log.status("trying the rewards on right answers and on junk", "reward")
        found = [(columns, str(source)) for source, columns in _read_first_rows(cfg, TRIED_ROWS) if columns is not None]
        check_solutions(cfg, rewards)
        rows, places = [columns for columns, _ in found], [place for _, place in found]
        check_before_training(cfg, rows, rewards=rewards, places=places, single_turns=single_turns)


def _say_withheld(cfg: RunConfig) -> None:
    """Name the variables that the user's rewards, tools and environments would look for in vain."""
    spec = EnvironmentSpec.from_config(cfg)
    uses = [reward.use for reward in cfg.rewards] + ([spec.environment or "", *spec.tools] if spec else [])
    names = [name for name in find_secrets() if not name.startswith("SFTPLAY_")]
    if names and any(is_user_function(use) or use in OPEN_ENVIRONMENTS for use in uses):
        said = "note: rewards, tools and environments of yours do not get the secrets"
        log.say(f"{said} {', '.join(names)}: export {PASSED}{names[0]}=... to pass that one on", "reward")


def check_solutions(cfg: RunConfig, rewards: RewardSet) -> None:
    """Say which rows' own solutions do not pass their tests: no answer to them can. Nothing is run without code_tests.
    Raise DataError where a row's test or setup is no Python, or no solution passes, and RunError where the sandbox
    failed.
    """
    if rewards.sandbox is None:
        return
    problems = []
    for source, row in _read_first_rows(cfg, 1_000):  # a solution takes some milliseconds, and the verdicts are kept
        tests, name = (row or {}).get("tests"), str((row or {}).get("entry_point") or "")
        code = find_code(str((row or {}).get("answer") or ""), name).code
        if row and code and isinstance(tests, Sequence) and not isinstance(tests, str):
            setup = str(row.get("setup") or "")
            problems.append(Problem(str(source), "", tuple(map(str, tests)), name, code, setup))
    if problems:
        limits, outcome = read_limits(cfg.sandbox), "is solved by no answer"
        sound_problems(problems, rewards.sandbox, limits=limits, outcome=outcome)


def read_cases(cfg: RunConfig, n: int) -> list[Case]:
    """Return the first `n` rows that can be read, each with its right answer and its columns. Raise DataError where
    fewer than two rows have an answer.
    """
    rows = _read_first_rows(cfg, n)
    cases = [Case(row["answer"], row, str(at)) for at, row in rows if row and isinstance(row.get("answer"), str)]
    if n_left_out := len(rows) - len(cases):
        log.say(f"note: {n_left_out:,} of the first {n} rows cannot be read, or have no answer: left out", "reward")
    if len({case.gold for case in cases}) < 2:
        what = f"the first {n} rows hold fewer than two different answers"
        raise DataError(what, where=cfg.rows_path, fix="name rows with a prompt and an answer, or raise N")
    return cases


def _read_first_rows(cfg: RunConfig, n: int) -> list[tuple[Source, dict[str, Any] | None]]:
    """The places of rows and what rewards read of them; None for one that cannot be read."""
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
    """Return a line for each row of the file, in its order: `rewards` by name, `total`, `verdict` on its program.

    A row has a `completion` and the columns that the rewards read. A value is None where the reward knows none; so is
    the total where that reward judges the content, or where none is known. Raise ConfigError where a name or an option
    of a reward is wrong, and DataError where a row cannot be read, has no completion, or lacks a column that a reward
    reads.
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
    lines = []
    weighted = [reward for reward in cfg.rewards if reward.weight]
    for at, verdict in enumerate(scored.verdicts):
        values = {name: scores.values[at] for name, scores in scored.by_name.items()}
        known = [value * reward.weight for reward in weighted if (value := values[reward.name]) is not None]
        lacks = any(values[reward.name] is None and not judges_form(reward) for reward in weighted)
        total = sum(known) if known and not lacks else None
        lines.append({"rewards": values, "total": total, "verdict": verdict})
    return lines
