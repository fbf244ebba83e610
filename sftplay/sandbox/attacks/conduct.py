"""All attacks on one executor, one after the other, and what came of them as a list."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sftplay.sandbox.attacks import cheat, crash, exhaust, files, forge, network, outlast, rights
from sftplay.sandbox.attacks.attack import Attack, Targets, boxed_processes, targets, used_cpu_s
from sftplay.sandbox.boxes.bootstrap import Executor
from sftplay.sandbox.boxes.box import START_S
from sftplay.sandbox.boxes.job import Job, Limits, Verdict
from sftplay.sandbox.boxes.judge import judge

GROUPS = {
    "files": files.ATTACKS,
    "network": network.ATTACKS,
    "rights": rights.ATTACKS,
    "use up": exhaust.ATTACKS,
    "outlast": outlast.ATTACKS,
    "cheat": cheat.ATTACKS,
    "forge": forge.ATTACKS,
    "crash": crash.ATTACKS,
}

ATTACKS = tuple(attack for attacks in GROUPS.values() for attack in attacks)

GOOD = Job(
    code="def f(x):\n    return x + 1", tests=("assert f(2) == 3",), limits=Limits(timeout_s=60, test_timeout_s=60)
)
"""A program that must still be judged well, after each attack; a busy machine may be slow with it."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one attack."""

    attack: Attack
    verdict: Verdict
    problems: tuple[str, ...]
    """Empty where the box held."""


def conduct(executor: Executor, *, chosen: Iterable[Attack] = ATTACKS, note: Callable[[Row], None]) -> list[Row]:
    """Try the attacks on an executor in turn; all on the same targets, as far as those stand."""
    rows: list[Row] = []
    judge(GOOD, lambda: executor.open(GOOD.limits), executor=executor.name)
    known = boxed_processes()  # of an executor that keeps a process which waits
    waiting = list(chosen)
    while waiting:
        with targets() as reached:
            while waiting and not (rows and reached.losses()):
                rows.append(try_attack(waiting.pop(0), executor=executor, reached=reached, known=known))
                note(rows[-1])
    return rows


def try_attack(attack: Attack, *, executor: Executor, reached: Targets, known: frozenset[str] = frozenset()) -> Row:
    """Run one attack, see what it has done and left, and check that an honest program still passes.

    `known` are processes that were there before.
    """
    code, limits = reached.names() + attack.code, Limits(**attack.limits)  # it is told what to reach for
    job = Job(code=code, tests=attack.tests, setup=attack.setup, limits=limits)
    verdict = judge(job, lambda: executor.open(job.limits), executor=executor.name)
    problems = reached.losses()
    if verdict.passed >= verdict.total:
        problems.append("it passed")
    if verdict.status not in attack.statuses:
        problems.append(f"status {verdict.status}: {verdict.stderr[-200:]}")
    # A machine may add to a job's limits: a box that is slow to start, and other work on it.
    if verdict.seconds > 3 * job.limits.timeout_s + START_S + 20.0:
        problems.append(f"it took {verdict.seconds:.1f} s")
    left = wait_gone(reached, known=known)
    after = judge(GOOD, lambda: executor.open(GOOD.limits), executor=executor.name)
    if after.status != "ok":
        problems.append(f"the next program got {after.status}: {after.stderr[-200:]}")
    return Row(attack, verdict, (*problems, *left))


def wait_gone(reached: Targets, *, known: frozenset[str] = frozenset()) -> list[str]:
    """Wait until all of an attack is gone; list what it has left.

    A process that still works ends the waiting: its own limit of the processor would end it as well, a little later.
    """
    before = used_cpu_s(boxed_processes() - known)
    until = time.monotonic() + 60.0  # for the kernel to clear a killed namespace away
    while (left := reached.leftovers(known=known)) and time.monotonic() < until:
        used = used_cpu_s(boxed_processes() - known)
        # A killed process uses less than 1 s of the processor until it is gone, on a busy machine too.
        if working := [number for number in sorted(used) if used[number] - before.get(number, 0.0) > 1.0]:
            return [f"process {number} still works" for number in working]
        time.sleep(0.02)
    return left


def listing(rows: dict[str, list[Row]]) -> str:
    """List the attacks of a group that ended alike in every box, as Markdown; what got through stands in bold."""
    groups = {id(attack): group for group, attacks in GROUPS.items() for attack in attacks}
    alike: dict[str, list[str]] = {}
    for several in zip(*rows.values(), strict=True):
        attack, mode = several[0].attack, several[0].verdict.mode
        ends = [f"**{'; '.join(row.problems)}**" if row.problems else row.verdict.status for row in several]
        by_box = ", ".join(f"{end} ({name})" for name, end in zip(rows, ends, strict=True))
        end = ends[0] if len(set(ends)) == 1 else by_box
        alike.setdefault(f"{groups[id(attack)]}, {mode}, {end}", []).append(attack.name)
    wrap = textwrap.TextWrapper(128, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(wrap.fill(f"{same}: {'; '.join(names)}.") for same, names in alike.items())
