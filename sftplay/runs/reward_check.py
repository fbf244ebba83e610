"""Try the rewards of a config on right answers and on junk that must not pay, before anything is trained."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any, Literal

from sftplay import log
from sftplay.config.data import MODEL, RewardConfig
from sftplay.config.run import RunConfig
from sftplay.data.layouts import read_layout_options
from sftplay.data.load_problems import sound_problems
from sftplay.data.problem import Problem
from sftplay.data.prompts import read_reward_columns, to_prompt
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Refused, Source
from sftplay.environments.processes import EnvironmentSpec, open_single_turns
from sftplay.errors import DataError, RunError
from sftplay.reward.code_rewards import CodeTests, find_code, read_limits
from sftplay.reward.reward_set import PASSED, RewardSet, RewardWorker, aligned, find_secrets
from sftplay.reward.table import (
    ENVIRONMENT_REWARD,
    RewardValues,
    is_user_function,
    judges_form,
    missing_column,
    reward_problems,
)
from sftplay.reward.text_rewards import in_form

NOISE = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt"

TESTS = "tests"
"""The column that rows have whose answers are programs."""

FORGERIES = (
    "an empty program",
    "a program that ends itself",
    "a value that equals everything",
    "a program that forges its verdict",
)
"""Cheating programs that no row may pay: no mean over many rows excuses that."""

Verdict = Literal["ok", "cannot_tell", "constant", "raises"]

TRIED_ROWS = 32


@dataclass(frozen=True, slots=True)
class Case:
    """A row on which rewards are tried: its right answer, and the columns that rewards get."""

    gold: str
    columns: Mapping[str, Any]
    where: str = ""
    """The row's place."""


def junk_answers(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Return an answer for each case by kind of junk. Kinds for which the rows offer nothing wrong are left out."""
    golds = [case.gold for case in cases]
    others = [
        next((other for other in (*golds[n + 1 :], *golds[:n]) if other != gold), "") for n, gold in enumerate(golds)
    ]
    answers = {
        "nothing": ["" for _ in golds],
        "noise": [NOISE for _ in golds],
        "again and again": [" ".join([other or NOISE] * 400) for other in others],
    }
    if all(others):
        answers["another row's answer"] = others
    if all(TESTS in case.columns for case in cases):
        programs = [cheating_programs(case.columns) for case in cases]
        answers |= {kind: [f"```python\n{made[kind]}\n```" for made in programs] for kind in programs[0]}
    elif all(others):  # of several programs the one with the right name is the answer
        several = list(dict.fromkeys(golds))[:4]
        answers["several answers"] = [
            "\n".join(dict.fromkeys([gold, *several, other])) for gold, other in zip(golds, others, strict=True)
        ]
    return answers


def cheating_programs(columns: Mapping[str, Any]) -> dict[str, str]:
    """Write a program of each kind that cheats, for the columns of a row."""
    name = str(columns.get("entry_point") or "solution")
    try:
        first_test = ast.parse((columns.get(TESTS) or [""])[0])
        expected = next(
            (ast.unparse(node.comparators[0]) for node in ast.walk(first_test) if isinstance(node, ast.Compare)), "None"
        )
    except (SyntaxError, ValueError):
        expected = "None"
    function = f"def {name}(*args, **named):"
    return {
        "an empty program": "",
        "a program that ends itself": f"import os\nos._exit(0)\n{function} return None",
        "a function that leaves": f"{function} raise SystemExit(0)",
        "a value that equals everything": (
            "class Any(int):\n"
            "    def __eq__(self, other): return True\n"
            "    __ne__ = lambda self, other: False\n"
            "    __hash__ = int.__hash__\n"
            f"{function} return Any(987654321)"
        ),
        "the first test by heart": f"{function} return {expected}",
        "a program that says it passed": f"print('all tests passed')\n{function} print('all tests passed')",
        # It has the box say that every test passed: where tests share the program's process, that is believed.
        "a program that forges its verdict": (
            "import sys\n"
            "for agent in [each for name, each in sys.modules.items() if name.endswith('inside.agent')]:\n"
            "    agent.ORDERS['test'] = lambda *args, **named: {'status': '\"ok\"'}\n"
            "class Named(type):\n"
            "    def __getattr__(cls, name): return cls\n"
            f"class {name}(metaclass=Named):\n"
            "    def __init__(self, *args, **named): pass"
        ),
    }


@dataclass(frozen=True, slots=True)
class RewardCheck:
    """What came of trying one reward."""

    name: str
    verdict: Verdict
    gold_mean: float | None
    junk_mean: float | None
    """Of the kind of junk that scored best."""

    junk: dict[str, float | None] = field(default_factory=dict)
    """Kind of junk -> mean of its values that are known."""

    why: str = ""
    paid: list[str] = field(default_factory=list)
    """Places of the rows that paid a forgery as much as the right answer."""

    in_process: list[str] = field(default_factory=list)
    """Places of the rows whose tests share the program's process: a program can forge their verdict."""

    seconds: float = 0.0


def check_reward(call: RewardWorker | CodeTests, cases: Sequence[Case], *, reward: RewardConfig) -> RewardCheck:
    """Try a reward on the gold and junk answers of the cases."""
    began = time.monotonic()
    cases = [replace(case, gold=_marked(call, case.gold)) for case in cases]
    columns = {name: [case.columns[name] for case in cases] for name in cases[0].columns}
    places = [case.where or f"row {n}" for n, case in enumerate(cases, 1)]
    gold = call([case.gold for case in cases], **columns)
    asked = {} if None in gold.values else junk_answers(cases)  # it fails in any case, and may take its deadline to
    kinds = {kind: call(answers, **columns) for kind, answers in asked.items()}
    junk = {kind: _mean_known(scores) for kind, scores in kinds.items()}
    verdict, why = _judge(gold, junk, only_form=judges_form(reward))
    paid = [] if judges_form(reward) else [
        f"{place} pays {kind} {value:g}"
        for kind in FORGERIES if kind in kinds
        for place, value, right in zip(places, kinds[kind].values, gold.values, strict=True)
        if value is not None and right is not None and value >= right > 0
    ]  # fmt: skip
    if paid and verdict == "ok":
        verdict, why = "cannot_tell", "; ".join(paid[:5])
    verdicts = zip(places, gold.verdicts, strict=True) if gold.verdicts else ()
    return RewardCheck(
        reward.name,
        verdict,
        gold_mean=_mean_known(gold),
        junk_mean=max((mean for mean in junk.values() if mean is not None), default=None),
        junk=junk,
        why=why,
        paid=paid,
        in_process=[place for place, program in verdicts if program.get("mode") == "in_process"],
        seconds=round(time.monotonic() - began, 3),
    )


def _marked(call: RewardWorker | CodeTests, gold: str) -> str:
    """Return the right answer as the reward reads it: a row need not have the marks that a model is to write."""
    if call.use == "format":
        return in_form(gold, **call.options)
    if call.use == "math":
        return gold if any(mark in gold for mark in ("####", "\\boxed", "answer is")) else in_form(gold, form="boxed")
    after = str(call.options.get("after", "")) if call.use == "exact_match" else ""
    return gold if after in gold else f"{after} {gold}"


def check_rewards(
    rewards: RewardSet, cases: Sequence[Case], *, cfg: RunConfig, single_turns: Mapping[str, Any] | None = None
) -> list[RewardCheck]:
    """Try each reward of the config on the columns that all cases have; `single_turns` stand in, by name, for those
    that an environment gives. Raise DataError where a reward reads a column that the cases do not have.
    """
    shared, given = set.intersection(*(set(case.columns) for case in cases)), single_turns or {}
    calls = {**rewards.workers, **given}
    for number, reward in enumerate(cfg.rewards):
        if reward.name in given:
            continue
        if missing := missing_column(reward, shared):
            what = f"the reward {reward.name} reads the column {missing}, which not every row has"
            raise DataError(what, where=cfg.rows_path, fix=f"add the column, or remove rewards.{number}")
    cases = [replace(case, columns={name: case.columns[name] for name in sorted(shared)}) for case in cases]
    checks = [check_reward(calls[reward.name], cases, reward=reward) for reward in cfg.rewards]
    why = "not tried on right answers: one turn does not end its task"
    return [
        replace(check, verdict="ok", why=why)
        if getattr(calls[check.name], "goes_on", False) and check.verdict in ("cannot_tell", "constant")
        else check
        for check in checks
    ]


def check_before_training(
    cfg: RunConfig,
    rows: Iterable[Mapping[str, Any]],
    *,
    rewards: RewardSet,
    places: Iterable[str] = (),
    single_turns: Mapping[str, Any] | None = None,
) -> list[RewardCheck]:
    """Try the rewards that a model is about to learn from, on rows with the column `answer`; one process does it.

    `rows` are the columns of the first prompts to train on, `places` where they stand. Nothing is tried without two
    different answers, and that is said. A reward of weight 0 may be anything. That a reward for form is constant is
    only said, since the rows' own answers need not have that form. Raise RunError where a reward cannot tell right
    answers from junk; DataError where one reads a column that the rows do not have.
    """
    placed = list(islice(zip(rows, chain(places, repeat(""))), TRIED_ROWS))
    known = {ENVIRONMENT_REWARD}.union(*(row for row, _ in placed))  # a run's environment gives the first
    for reward in cfg.rewards if placed else ():
        if missing := missing_column(reward, known):
            what = f"the reward {reward.name} reads the column {missing}, which no row has"
            raise DataError(what, where=cfg.rows_path, fix=f"add the column, or remove the reward {reward.name}")
    answered = [(row, where) for row, where in placed if isinstance(row.get("answer"), str) and row["answer"].strip()]
    cases = [Case(row["answer"], row, where) for row, where in answered]
    if len({case.gold for case in cases}) < 2:
        log.say("note: the rewards are not tried: the rows hold fewer than two different answers", "reward")
        return []
    checks = check_rewards(rewards, cases, cfg=cfg, single_turns=single_turns)
    bad = []
    for check, reward in zip(checks, cfg.rewards, strict=True):
        if check.verdict == "ok" or reward.weight == 0:
            continue
        if check.verdict == "cannot_tell" and reward.use == MODEL:  # it compares answers to one prompt only
            log.say(
                f"warning: the reward model {check.name} cannot tell right answers from junk: {check.why}", "reward"
            )
        elif check.verdict == "constant" and judges_form(reward):
            log.say(f"note: the reward {check.name} cannot be tried on these rows: {check.why}", "reward")
        else:
            bad.append(check)
    if bad:
        raise make_error(bad)
    return checks


def make_error(bad: Sequence[RewardCheck]) -> RunError:
    """Make the error about rewards that are not ok."""
    what = "; ".join(f"{check.name}: {check.verdict.replace('_', ' ')} ({check.why})" for check in bad)
    fix = "mend these rewards: a model learns what is rewarded, not what was meant"
    return RunError(what, where="rewards", fix=fix)


def _mean_known(scores: RewardValues) -> float | None:
    known = [value for value in scores.values if value is not None]
    return sum(known) / len(known) if known else None


def _judge(gold: RewardValues, junk: Mapping[str, float | None], *, only_form: bool) -> tuple[Verdict, str]:
    best = _mean_known(gold)
    if None in gold.values or best is None:
        return "raises", "; ".join(gold.reasons)
    known = {kind: mean for kind, mean in junk.items() if mean is not None}
    if not known:
        return "raises", "it gives no value for any junk"
    values = [*(value for value in gold.values if value is not None), *known.values()]
    width = max(values) - min(values)
    if width == 0:
        return "constant", f"everything gets {best:g}"
    # The mean of gold answers must lie 0.3 of the values' range above the mean of every kind of junk.
    near = {kind: mean for kind, mean in known.items() if best - mean < 0.3 * width}
    # An answer of the right form may be wrong: it is enough that something falls behind.
    if near and not (only_form and len(near) < len(known)):
        worst = max(near, key=lambda kind: near[kind])
        return "cannot_tell", f"{worst} gets {near[worst]:g}, right answers get {best:g}"
    return "ok", ""


OPEN_ENVIRONMENTS = ("openenv", "verifiers")
"""Shipped environments in which code of the user's choice runs."""


def try_rewards(cfg: RunConfig) -> None:
    """Refuse rewards that cannot be asked, or that cannot tell right answers from junk, before a model is opened. Say
    first what functions of the user do not get.

    Only rewards that a model learns from must tell them apart: not those that other tasks measure, nor those that a
    placebo replaces. Raises what `RewardSet`, `check_before_training` and `check_solutions` raise.
    """
    say_withheld(cfg)
    with RewardSet(cfg) as rewards, open_single_turns(cfg) as single_turns:
        if not cfg.task.learns_from_rewards or (cfg.task.turns == 1 and cfg.grpo.placebo_reward is not None):
            return
        log.status("trying the rewards on right answers and on junk", "reward")
        found = [(columns, str(source)) for source, columns in _read_first_rows(cfg, TRIED_ROWS) if columns is not None]
        check_solutions(cfg, rewards)
        rows, places = [columns for columns, _ in found], [place for _, place in found]
        check_before_training(cfg, rows, rewards=rewards, places=places, single_turns=single_turns)


def say_withheld(cfg: RunConfig) -> None:
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
