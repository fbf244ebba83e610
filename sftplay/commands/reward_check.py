"""The verb `reward-check`: the rewards of a config tried on right answers and on junk, before anything is trained."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict

from sftplay import log
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError, RunError
from sftplay.launch.run_folder import find_run
from sftplay.model.start_point import resolve_names
from sftplay.runs.finished_run import prepare_environment
from sftplay.runs.inputs import load_checked


def reward_check(args: Namespace) -> int:
    """`reward-check`: each reward of the config on its rows; 5 unless every reward tells right answers from junk.

    With --run: each reward of the run on its own samples; 5 where one has another value now. With --in: the value of
    each reward for each completion of a file; 0.
    """
    if args.input:
        if args.run or args.n:
            raise ConfigError("--in goes with neither --run nor --n", where="reward-check", fix="leave those out")
        from sftplay.runs.reward_check import score_given

        rows = score_given(_expect_rewards(load_config(args.config, args.overrides), args), args.input)
        if args.json:
            print(json.dumps({"rows": rows}))
        for number, row in enumerate([] if args.json else rows, 1):
            values = {**row["rewards"], "total": row["total"]}
            said = "  ".join(f"{name} {'unknown' if x is None else format(x, 'g')}" for name, x in values.items())
            status = f"  ({row['verdict']['status']})" if row["verdict"] else ""
            log.say(f"{number:>5}  {said}{status}", "reward")
        return 0
    if args.run:
        return _recheck(args)
    cfg = _expect_rewards(load_checked(args.config, args.overrides, asks_hub=False), args)  # no model answers here
    from sftplay.environments.processes import open_single_turns
    from sftplay.reward.reward_set import RewardSet
    from sftplay.runs.reward_check import check_rewards, check_solutions, make_error, read_cases

    cases = read_cases(cfg, args.n or 32)
    with RewardSet(cfg) as rewards, open_single_turns(cfg) as single_turns:
        check_solutions(cfg, rewards)
        checks = check_rewards(rewards, cases, cfg=cfg, single_turns=single_turns)
    bad = [check for check in checks if check.verdict != "ok"]
    if args.json:
        print(json.dumps([asdict(check) for check in checks]))
        return RunError.exit_code if bad else 0
    for check in checks:
        said = "ok" if check.verdict == "ok" else check.verdict.replace("_", " ").upper()
        scores = {"right answers": check.gold_mean, **check.junk}
        means = "  ".join(f"{kind} {'-' if mean is None else format(mean, '.2f')}" for kind, mean in scores.items())
        log.say(f"{check.name:<16} {said:<12} {means}{f'  ({check.why})' if check.why else ''}", "reward")
        if check.in_process:
            places = ", ".join(check.in_process)
            log.say(f"note: these tests run in_process, where a program can forge its verdict: {places}", "reward")
    if bad:
        raise make_error(bad)
    return 0


def _expect_rewards(cfg: RunConfig, args: Namespace) -> RunConfig:
    if not cfg.rewards:
        fix = "write rewards: [{name: answer, use: exact_match}]"
        raise ConfigError("the config has no rewards", where=args.config, fix=fix)
    from sftplay.runs.reward_check import say_withheld

    say_withheld(cfg)
    return cfg


def _recheck(args: Namespace) -> int:
    given = load_config(args.config, args.overrides)
    folder = find_run(given, args.config, run=args.run)
    cfg = _expect_rewards(resolve_names(load_config(folder.resolved)), args)
    cfg = cfg.with_values({"sandbox": given.sandbox.model_dump()}, "command line")
    from sftplay.evaluate.recomputed import kept_steps, recompute

    files = kept_steps(folder.path)
    if not files:
        fix = "name a run of task_mode grpo whose grpo.samples is not 0"
        raise DataError("no completions are kept there", where=str(folder.path / "samples"), fix=fix)
    if args.n:
        files = [files[at * len(files) // args.n] for at in range(args.n)] if args.n < len(files) else files
    prepare_environment(cfg)
    from sftplay.data.load_prompts import load_prompts
    from sftplay.environments.processes import EnvironmentSpec, describe_tools
    from sftplay.model.tokenizer import load_tokenizer
    from sftplay.reward.reward_set import RewardSet

    prompts = load_prompts(cfg, load_tokenizer(cfg.model), tools=describe_tools(EnvironmentSpec.from_config(cfg)))
    with RewardSet(cfg) as rewards:
        found = recompute(files, prompts.train, columns=prompts.report["columns"], reward_set=rewards)
        executor = rewards.executor
    if args.json:
        print(json.dumps([asdict(result) for result in found]))
    else:
        for result in found:
            said = f"{result.differ:,} differ, first {result.first}" if result.differ else "all agree"
            log.say(f"{result.name:<16} {result.n:,} completions of {len(files):,} steps: {said}", "reward")
        if executor:
            log.say(f"programs ran in {executor}", "reward")
    return RunError.exit_code if any(result.differ for result in found) else 0
