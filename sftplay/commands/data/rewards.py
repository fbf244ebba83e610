"""The verb `reward-check`: the rewards of a config tried on right answers and on junk, before anything is trained."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.control.inputs import load_checked
from sftplay.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from sftplay.reward.check import Finding
    from sftplay.reward.junk import Case


def reward_check(args: Namespace) -> int:
    """`reward-check`: each reward of the config on its rows; 5 unless every reward tells right answers from junk."""
    cfg = load_checked(args.config, args.overrides, asks_hub=False)  # no model answers here
    if not cfg.rewards:
        fix = "write rewards: [{name: answer, use: exact_match}]"
        raise ConfigError("the config has no rewards", where=args.config, fix=fix)
    from sftplay.reward.check import check_rewards, refusal_of
    from sftplay.reward.reward_set import RewardSet

    cases = read_cases(cfg, args.n)
    with RewardSet(cfg) as rewards:
        findings = check_rewards(rewards, cases, cfg=cfg)
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
    from sftplay.data.layouts.convert import reading_of
    from sftplay.data.prompts.prompt import columns_of, to_prompt
    from sftplay.data.read.sources import dialect_of, read_rows
    from sftplay.data.records import Refused
    from sftplay.reward.junk import Case

    cases, n_left_out, reading = [], 0, reading_of(cfg.data)
    for number, (source, row) in enumerate(islice(read_rows(cfg.rows_path, dialect_of(cfg.data)), n)):
        answer, columns = None, {}
        if not isinstance(row, Refused):
            with suppress(DataError):
                prompt = to_prompt(row, source, number=number, reading=reading)
                columns = columns_of(prompt.row, source, reading=reading)
                answer = columns.get("answer")
        if isinstance(answer, str):
            cases.append(Case(answer, columns))
        else:
            n_left_out += 1
    if n_left_out:
        log.say(f"note: {n_left_out:,} of the first {n} rows cannot be read, or have no answer: left out", "reward")
    if len({case.gold for case in cases}) < 2:
        what = f"the first {n} rows hold fewer than two different answers"
        raise DataError(what, where=cfg.rows_path, fix="name rows with a prompt and an answer, or raise N")
    return cases


def _show(finding: Finding) -> None:
    said = "ok" if finding.verdict == "ok" else finding.verdict.replace("_", " ").upper()
    means = "  ".join(
        f"{kind} {'-' if mean is None else format(mean, '.2f')}"
        for kind, mean in {"right answers": finding.gold_mean, **finding.junk}.items()
    )
    log.say(f"{finding.name:<16} {said:<12} {means}{f'  ({finding.why})' if finding.why else ''}", "reward")
