"""The verb `reward-check`: the rewards of a config tried on right answers and on junk, before anything is trained."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.control.inputs import load_checked
from sftplay.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from sftplay.data.records import Source
    from sftplay.reward.check import Finding
    from sftplay.reward.junk import Case


def reward_check(args: Namespace) -> int:
    """`reward-check`: each reward of the config on its rows; 5 unless every reward tells right answers from junk."""
    cfg = load_checked(args.config, args.overrides)
    if not cfg.rewards:
        fix = "write rewards: [{name: answer, use: exact_match}]"
        raise ConfigError("the config has no rewards", where=args.config, fix=fix)
    from sftplay.reward.check import check_rewards, refusal_of
    from sftplay.reward.reward_set import RewardSet

    cases = read_cases(cfg, args.n)
    with RewardSet(cfg) as rewards:
        findings = check_rewards(rewards, cfg, cases)
    bad = [finding for finding in findings if finding.verdict != "ok"]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return RunError.exit_code if bad else 0
    for finding in findings:
        _show(finding)
    if bad:
        raise refusal_of(bad)
    return 0


def read_cases(cfg: RunConfig, n: int) -> list[Case]:
    """The first `n` rows that can be read, each with its right answer and its columns.

    Raises:
        DataError: fewer than two rows have an answer.
    """
    from sftplay.data.read.sources import dialect_of, read_rows
    from sftplay.data.records import Refused
    from sftplay.reward.junk import Case

    cases, n_left_out = [], 0
    for source, row in islice(read_rows(cfg.rows_path, dialect_of(cfg.data)), n):
        try:
            answer, columns = ("", {}) if isinstance(row, Refused) else _answer_of(row, source, cfg=cfg)
        except DataError:
            answer, columns = "", {}
        if answer:
            cases.append(Case(answer, {"answer": answer, **columns}))
        else:
            n_left_out += 1
    if n_left_out:
        log.say(f"note: {n_left_out:,} of the first {n} rows cannot be read, or have no answer: left out", "reward")
    if len({case.gold for case in cases}) < 2:
        what = f"the first {n} rows hold fewer than two different answers"
        raise DataError(what, where=cfg.rows_path, fix="name rows with a prompt and an answer, or raise N")
    return cases


def _answer_of(row: Mapping[str, Any], source: Source, *, cfg: RunConfig) -> tuple[str, Mapping[str, Any]]:
    """The right answer of a row and what rewards read of it; the answer is empty where there is none."""
    from sftplay.data.layouts.convert import read_prompt, reading_of, to_record
    from sftplay.data.records import Chat

    reading = reading_of(cfg.data)
    try:
        record = to_record(row, source, reading=reading)
    except DataError:
        read_prompt(row, source, reading=reading)  # a prompt may have its answer in a column
        answer = row.get("answer")
        return (answer if isinstance(answer, str) else "", row)
    if not isinstance(record, Chat):
        return "", row
    return record.answer, json.loads(record.columns) if record.columns else row


def _show(finding: Finding) -> None:
    said = "ok" if finding.verdict == "ok" else finding.verdict.replace("_", " ").upper()
    means = "  ".join(
        f"{kind} {'-' if mean is None else format(mean, '.2f')}"
        for kind, mean in {"right answers": finding.gold_mean, **finding.junk}.items()
    )
    log.say(f"{finding.name:<16} {said:<12} {means}{f'  ({finding.why})' if finding.why else ''}", "reward")
