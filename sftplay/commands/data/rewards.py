"""The verb `reward-check`: the rewards of a config tried on right answers and on junk, before anything is trained."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.control.inputs import load_checked
from sftplay.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from sftplay.reward.check import Case, Finding


def reward_check(args: Namespace) -> int:
    """`reward-check`: each reward of the config on its rows; 5 unless every reward tells right answers from junk."""
    cfg = load_checked(args.config, args.overrides)
    if not cfg.rewards:
        fix = "write rewards: [{name: answer, use: exact_match}]"
        raise ConfigError("the config has no rewards", where=args.config, fix=fix)
    from sftplay.reward.calls import RewardCall
    from sftplay.reward.check import check_reward

    cases = read_cases(cfg, args.n)
    findings = []
    for reward in cfg.rewards:
        with closing(RewardCall(reward.use, reward.options, deadline_s=reward.deadline)) as call:
            findings.append(check_reward(call, cases, name=reward.name))
        if not args.json:
            _show(findings[-1])
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    bad = [finding for finding in findings if finding.verdict != "ok"]
    if bad and not args.json:
        raise RunError(
            "; ".join(f"{finding.name}: {finding.verdict.replace('_', ' ')}" for finding in bad),
            where="rewards",
            fix="mend these rewards: a model learns what is rewarded, not what was meant",
        )
    return RunError.exit_code if bad else 0


def read_cases(cfg: RunConfig, n: int) -> list[Case]:
    """The first `n` rows that can be read, each with its right answer and its columns.

    Raises:
        DataError: fewer than two rows have an answer, or a reward reads a column that the rows do not have.
    """
    from sftplay.data.layouts.convert import reading_of, to_record
    from sftplay.data.read.sources import dialect_of, read_rows
    from sftplay.data.records import Chat, Refused
    from sftplay.reward.check import Case

    cases, n_left_out = [], 0
    for source, row in islice(read_rows(cfg.rows_path, dialect_of(cfg.data)), n):
        try:
            record = None if isinstance(row, Refused) else to_record(row, source, reading=reading_of(cfg.data))
        except DataError:
            record = None
        if not isinstance(record, Chat):
            n_left_out += 1
        elif isinstance(row, dict):
            cases.append(Case(record.answer, {"answer": record.answer, **row}))
    if n_left_out:
        log.say(f"note: {n_left_out:,} of the first {n} rows cannot be read, or have no answer: left out", "reward")
    if len({case.gold for case in cases}) < 2:
        what = f"the first {n} rows hold fewer than two different answers"
        raise DataError(what, where=cfg.rows_path, fix="name rows with a prompt and an answer, or raise N")
    shared = set.intersection(*(set(case.columns) for case in cases))
    _expect_columns(cfg, shared)
    return [Case(case.gold, {name: case.columns[name] for name in sorted(shared)}) for case in cases]


def _expect_columns(cfg: RunConfig, columns: set[str]) -> None:
    from sftplay.reward.table import SHIPPED

    for number, reward in enumerate(cfg.rewards):
        wanted = SHIPPED[reward.use].columns if reward.use in SHIPPED else ()
        missing = [name for name in wanted if name not in columns and name not in reward.options]
        if missing:
            raise DataError(
                f"the reward {reward.name} reads the column {missing[0]}, which not every row has",
                where=cfg.rows_path,
                fix=f"add the column, or remove rewards.{number}",
            )


def _show(finding: Finding) -> None:
    said = "ok" if finding.verdict == "ok" else finding.verdict.replace("_", " ").upper()
    means = "  ".join(
        f"{kind} {'-' if mean is None else format(mean, '.2f')}"
        for kind, mean in {"right answers": finding.gold_mean, **finding.junk}.items()
    )
    log.say(f"{finding.name:<16} {said:<12} {means}{f'  ({finding.why})' if finding.why else ''}", "reward")
