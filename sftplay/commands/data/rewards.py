"""The verb `reward-check`: the rewards of a config tried on right answers and on junk, before anything is trained."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from sftplay import log
from sftplay.control.inputs import load_checked
from sftplay.errors import ConfigError, RunError

if TYPE_CHECKING:
    from sftplay.reward.check import Finding


def reward_check(args: Namespace) -> int:
    """`reward-check`: each reward of the config on its rows; 5 unless every reward tells right answers from junk."""
    cfg = load_checked(args.config, args.overrides, asks_hub=False)  # no model answers here
    if not cfg.rewards:
        fix = "write rewards: [{name: answer, use: exact_match}]"
        raise ConfigError("the config has no rewards", where=args.config, fix=fix)
    from sftplay.control.rewards.trial import read_cases
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


def _show(finding: Finding) -> None:
    said = "ok" if finding.verdict == "ok" else finding.verdict.replace("_", " ").upper()
    means = "  ".join(
        f"{kind} {'-' if mean is None else format(mean, '.2f')}"
        for kind, mean in {"right answers": finding.gold_mean, **finding.junk}.items()
    )
    log.say(f"{finding.name:<16} {said:<12} {means}{f'  ({finding.why})' if finding.why else ''}", "reward")
