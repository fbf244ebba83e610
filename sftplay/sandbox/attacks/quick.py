"""The self-test at the start: several attacks in one box."""

from __future__ import annotations

from sftplay.sandbox.attacks import exhaust, files, network, rights
from sftplay.sandbox.attacks.attack import targets
from sftplay.sandbox.boxes.bootstrap import Executor
from sftplay.sandbox.boxes.job import Job, Limits
from sftplay.sandbox.boxes.judge import judge

ATTEMPT = """
def attempt(name):
    names = {}
    exec(CODES[name], names)
    return names["f"]()
"""


def find_hole(executor: Executor) -> str:
    """Find what a program reaches from these boxes that it should not, or why they do not work; or nothing."""
    chosen = [attack for kind in (files, network, rights, exhaust) for attack in kind.ATTACKS if attack.is_quick]
    with targets() as reached:
        codes = {attack.name: reached.names() + attack.code for attack in chosen}
        codes["control"] = "def f():\n    return 'works'"
        code = f"CODES = {codes!r}\n{ATTEMPT}"
        escapes = (f"assert attempt({attack.name!r}) == 'escaped'" for attack in chosen)
        tests = ("assert attempt('control') == 'works'", *escapes)
        # Where the machine is busy, a slow answer is no hole.
        job = Job(code=code, tests=tests, limits=Limits(timeout_s=120, test_timeout_s=60))
        verdict = judge(job, lambda: executor.open(job.limits), executor=executor.name)
        losses = reached.losses()
    if verdict.per_test[0] != "ok":
        return f"no program runs in its box ({verdict.per_test[0]}: {verdict.stderr[-300:]})"
    escaped = [attack.name for attack, status in zip(chosen, verdict.per_test[1:], strict=True) if status == "ok"]
    return "; ".join([*(f"escaped: {name}" for name in escaped), *losses])
