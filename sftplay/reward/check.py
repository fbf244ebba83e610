"""Try a reward on right answers and on junk that must not pay."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any, Literal

from sftplay import log
from sftplay.config.rewards import RewardConfig
from sftplay.config.run import RunConfig
from sftplay.errors import DataError, RunError
from sftplay.reward.calls import RewardValues, RewardWorker
from sftplay.reward.code_rewards import CodeTests
from sftplay.reward.form_rewards import in_form
from sftplay.reward.reward_set import RewardSet
from sftplay.reward.table import judges_form, missing_column

NOISE = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt"
REPEATS = 400
SEVERAL = 4
"""Answers that one junk answer gives side by side."""

TESTS = "tests"
"""The column that rows have whose answers are programs."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row on which rewards are tried: its right answer, and the columns that rewards get."""

    gold: str
    columns: Mapping[str, Any]
    where: str = ""
    """The row's place."""


def junk_answers(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Kind of junk -> an answer for each case. Kinds for which the rows offer nothing wrong are left out."""
    golds = [case.gold for case in cases]
    others = [
        next((each for each in (*golds[n + 1 :], *golds[:n]) if each != gold), "") for n, gold in enumerate(golds)
    ]
    are_programs = all(TESTS in case.columns for case in cases)
    answers = {
        "nothing": ["" for _ in golds],
        "noise": [NOISE for _ in golds],
        "again and again": [" ".join([other or NOISE] * REPEATS) for other in others],
    }
    if all(others):
        answers["another row's answer"] = others
    if all(others) and not are_programs:  # of several programs the one with the right name is the answer
        several = list(dict.fromkeys(golds))[:SEVERAL]
        answers["several answers"] = [
            "\n".join(dict.fromkeys([gold, *several, other])) for gold, other in zip(golds, others, strict=True)
        ]
    if are_programs:
        answers |= {kind: [_block(make(case.columns)) for case in cases] for kind, make in _PROGRAMS.items()}
    return answers


def _block(program: str) -> str:
    return f"```python\n{program}\n```"


def _name(columns: Mapping[str, Any]) -> str:
    return str(columns.get("entry_point") or "solution")


def _ends_itself(columns: Mapping[str, Any]) -> str:
    return f"import os\nos._exit(0)\ndef {_name(columns)}(*args, **named): return None"


def _leaves(columns: Mapping[str, Any]) -> str:
    return f"def {_name(columns)}(*args, **named): raise SystemExit(0)"


def _equals_everything(columns: Mapping[str, Any]) -> str:
    return (
        "class Any(int):\n"
        "    def __eq__(self, other): return True\n"
        "    __ne__ = lambda self, other: False\n"
        "    __hash__ = int.__hash__\n"
        f"def {_name(columns)}(*args, **named): return Any(987654321)"
    )


def _by_heart(columns: Mapping[str, Any]) -> str:
    """Gives the value that the first test expects, whatever it is asked."""
    test = (columns.get(TESTS) or [""])[0]
    return f"def {_name(columns)}(*args, **named): return {_expected(test)}"


def _expected(test: str) -> str:
    try:
        found = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Compare)]
    except (SyntaxError, ValueError):
        found = []
    return ast.unparse(found[0].comparators[0]) if found else "None"


def _claims(columns: Mapping[str, Any]) -> str:
    return f"print('all tests passed')\ndef {_name(columns)}(*args, **named): print('all tests passed')"


def _forges(columns: Mapping[str, Any]) -> str:
    """Tells the box to say that every test passed: where tests share the program's process, that is believed."""
    return (
        "import sys\n"
        "for agent in [each for name, each in sys.modules.items() if name.endswith('inside.agent')]:\n"
        "    agent.ORDERS['test'] = lambda *args, **named: {'status': '\"ok\"'}\n"
        "class Named(type):\n"
        "    def __getattr__(cls, name): return cls\n"
        f"class {_name(columns)}(metaclass=Named):\n"
        "    def __init__(self, *args, **named): pass"
    )


_PROGRAMS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "an empty program": lambda _: "",
    "a program that ends itself": _ends_itself,
    "a function that leaves": _leaves,
    "a value that equals everything": _equals_everything,
    "the first test by heart": _by_heart,
    "a program that says it passed": _claims,
    "a program that forges its verdict": _forges,
}
"""Kind of cheating program -> what writes it for the columns of a row."""

FORGERIES = (
    "an empty program",
    "a program that ends itself",
    "a value that equals everything",
    "a program that forges its verdict",
)
"""Of them those that no row may pay: no mean over many rows excuses that."""


Call = RewardWorker | CodeTests

Verdict = Literal["ok", "cannot_tell", "constant", "raises"]

TRIED_ROWS = 32

RESULT_MARKS = ("####", "\\boxed", "answer is")

MOST_NAMED = 5
"""Rows that a message names."""

APART = 0.3
"""How far the mean of gold answers must lie above the mean of every kind of junk, in shares of the values' range."""


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


def check_reward(call: Call, cases: Sequence[Case], *, reward: RewardConfig) -> RewardCheck:
    """Try a reward on the gold and junk answers of the cases."""
    began = time.monotonic()
    cases = [replace(case, gold=_marked(call, case.gold)) for case in cases]
    gold = score(call, [case.gold for case in cases], cases=cases)
    kinds = {kind: score(call, answers, cases=cases) for kind, answers in junk_answers(cases).items()}
    junk = {kind: mean_of(scores) for kind, scores in kinds.items()}
    verdict, why = _judge(gold, junk, only_form=judges_form(reward))
    paid = [] if judges_form(reward) else _paid(cases, gold, kinds=kinds)
    if paid and verdict == "ok":
        verdict, why = "cannot_tell", "; ".join(paid[:MOST_NAMED])
    known = [mean for mean in junk.values() if mean is not None]
    return RewardCheck(
        reward.name, verdict, mean_of(gold), max(known, default=None), junk, why, paid,
        _shares_process(call, cases), round(time.monotonic() - began, 3),
    )  # fmt: skip


def _paid(cases: Sequence[Case], gold: RewardValues, *, kinds: Mapping[str, RewardValues]) -> list[str]:
    """The rows on which a forgery gets what the right answer gets, each with the forgery."""
    return [
        f"{case.where or f'row {number}'} pays {kind} {value:g}"
        for kind in FORGERIES if kind in kinds
        for number, (case, value, right) in enumerate(zip(cases, kinds[kind].values, gold.values, strict=True), 1)
        if value is not None and right is not None and value >= right > 0
    ]  # fmt: skip


def _shares_process(call: Call, cases: Sequence[Case]) -> list[str]:
    """The rows whose tests are judged in the program's own process."""
    if not isinstance(call, CodeTests):
        return []
    columns = {name: [case.columns[name] for case in cases] for name in cases[0].columns}
    verdicts = call.judge([case.gold for case in cases], columns)[1]
    modes = [verdict.get("mode") for verdict in verdicts]
    return [
        case.where or f"row {n}"
        for n, (case, mode) in enumerate(zip(cases, modes, strict=True), 1)
        if mode == "in_process"
    ]


def score(call: Call, answers: Sequence[str], *, cases: Sequence[Case]) -> RewardValues:
    """The reward's values of one answer for each case."""
    columns = {name: [case.columns[name] for case in cases] for name in cases[0].columns}
    return call(answers, **columns)


def _marked(call: Call, gold: str) -> str:
    """The right answer as the reward reads it: a row need not have the marks that a model is to write."""
    if call.use == "format":
        return in_form(gold, **call.options)
    if call.use == "math":
        return gold if any(mark in gold for mark in RESULT_MARKS) else in_form(gold, form="boxed")
    after = str(call.options.get("after", "")) if call.use == "exact_match" else ""
    return gold if after in gold else f"{after} {gold}"


def check_rewards(rewards: RewardSet, cases: Sequence[Case], *, cfg: RunConfig) -> list[RewardCheck]:
    """Try each reward of the config on the columns that all cases have.

    Raises:
        DataError: a reward reads a column that the cases do not have.
    """
    shared = set.intersection(*(set(case.columns) for case in cases))
    for number, reward in enumerate(cfg.rewards):
        if missing := missing_column(reward, shared):
            what = f"the reward {reward.name} reads the column {missing}, which not every row has"
            raise DataError(what, where=cfg.rows_path, fix=f"add the column, or remove rewards.{number}")
    cases = [replace(case, columns={name: case.columns[name] for name in sorted(shared)}) for case in cases]
    return [check_reward(rewards.call_of(reward.name), cases, reward=reward) for reward in cfg.rewards]


def check_before_training(
    cfg: RunConfig, rows: Iterable[Mapping[str, Any]], *, rewards: RewardSet, places: Iterable[str] = ()
) -> list[RewardCheck]:
    """Try the rewards that a model is about to learn from, on rows with the column `answer`; one process does it.

    `rows` are the columns of the first prompts to train on, `places` where they stand; those with an answer are tried.
    Nothing is tried where there are not two different answers, and that is said. A reward of weight 0 may be what it
    likes. Of a reward for form that is constant it is only said: the rows' own answers need not have that form.

    Raises:
        RunError: a reward cannot tell right answers from junk.
        DataError: a reward reads a column that the rows do not have.
    """
    placed = islice(zip(rows, chain(places, repeat(""))), TRIED_ROWS)
    cases = [Case(row["answer"], row, where) for row, where in placed if _has_answer(row)]
    if len({case.gold for case in cases}) < 2:
        log.say("note: the rewards are not tried: the rows hold fewer than two different answers", "reward")
        return []
    checks = check_rewards(rewards, cases, cfg=cfg)
    bad = []
    for check, reward in zip(checks, cfg.rewards, strict=True):
        if check.verdict == "ok" or reward.weight == 0:
            continue
        if check.verdict == "constant" and judges_form(reward):
            log.say(f"note: the reward {check.name} cannot be tried on these rows: {check.why}", "reward")
        else:
            bad.append(check)
    if bad:
        raise refusal_of(bad)
    return checks


def refusal_of(bad: Sequence[RewardCheck]) -> RunError:
    """The error about rewards that are not ok."""
    what = "; ".join(f"{check.name}: {check.verdict.replace('_', ' ')} ({check.why})" for check in bad)
    return RunError(
        what, where="rewards", fix="mend these rewards: a model learns what is rewarded, not what was meant"
    )


def _has_answer(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("answer"), str) and bool(row["answer"].strip())


def mean_of(scores: RewardValues) -> float | None:
    """Mean of the values that are known; None where none is."""
    known = [value for value in scores.values if value is not None]
    return sum(known) / len(known) if known else None


def _judge(gold: RewardValues, junk: Mapping[str, float | None], *, only_form: bool) -> tuple[Verdict, str]:
    best = mean_of(gold)
    if None in gold.values or best is None:
        return "raises", "; ".join(gold.reasons)
    known = {kind: mean for kind, mean in junk.items() if mean is not None}
    if not known:
        return "raises", "it gives no value for any junk"
    values = [*(value for value in gold.values if value is not None), *known.values()]
    spread = max(values) - min(values)
    if spread == 0:
        return "constant", f"everything gets {best:g}"
    near = {kind: mean for kind, mean in known.items() if best - mean < APART * spread}
    # An answer of the right form may be wrong: it is enough that something falls behind.
    if near and not (only_form and len(near) < len(known)):
        worst = max(near, key=lambda kind: near[kind])
        return "cannot_tell", f"{worst} gets {near[worst]:g}, right answers get {best:g}"
    return "ok", ""
