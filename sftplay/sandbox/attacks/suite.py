"""Attacks on an executor: the programs of programs.txt, what they reach for, and what came of them as a list."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from sftplay.sandbox.boxes.box import START_S
from sftplay.sandbox.boxes.executors import OWNER, Executor
from sftplay.sandbox.boxes.job import Job, Limits, Status, Verdict
from sftplay.sandbox.boxes.judge import judge

TESTS = {
    "task": ("assert f(2) == 3", "assert f(40) == 41"),
    "proxy": ("y = f(2)\nassert y == 3", "assert f(40) - 1 == 40"),  # these run in a box of their own
    "once": ("assert f(2) == 3",),
    "never": ("assert f() == 'never'",),
    "": ("assert f() == 'escaped'",),
}

LIMITS: dict[str, dict[str, Any]] = {
    "short": {"timeout_s": 1, "test_timeout_s": 0.25},
    "load": {"timeout_s": 0.5},
    "1s": {"timeout_s": 1, "test_timeout_s": 0.5},
    "10s": {"timeout_s": 10, "test_timeout_s": 10},
    "20s": {"timeout_s": 20, "test_timeout_s": 20},
    "": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A program, the tests that it must not pass, and how the verdict may say so."""

    group: str
    name: str
    code: str
    tests: tuple[str, ...]
    statuses: tuple[Status, ...]
    limits: dict[str, Any]
    is_harmless: bool
    is_quick: bool


@cache
def read_attacks() -> tuple[Attack, ...]:
    """Read all attacks, in the order of the table."""
    text = Path(__file__).with_name("programs.txt").read_text(encoding="utf-8")
    templates: dict[str, str] = {}

    def expand(match: re.Match[str]) -> str:
        return templates[match[1]].format(*match[2].split(" | "))

    attacks = []
    for part in re.split("^=== ", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.strip("\n").partition("\n")
        group, name, *rest = head.split(" | ")
        tests = tuple(line.replace("\\n", "\n") for line in re.findall(r"^\? (.*)", body, flags=re.MULTILINE))
        code = re.sub(r"^\? .*\n", "", body, flags=re.MULTILINE)
        code = re.sub(r"^@(\w+) ?(.*)", expand, code, flags=re.MULTILINE)
        if group == "template":
            templates[name] = code
            continue
        words = rest[0].split() if rest else []
        named = {word for word in words if word in (*TESTS, *LIMITS, "harmless", "quick", "escaped")}
        statuses: Any = tuple(word for word in words if word not in named) or ("wrong", "runtime")
        assert set(statuses) <= set(get_args(Status)), head
        attacks.append(
            Attack(
                group=group, name=name, statuses=statuses, is_harmless="harmless" in named, is_quick="quick" in named,
                code=code.encode().decode("unicode_escape") if "escaped" in named else code,
                tests=tests or TESTS[next(iter(named & TESTS.keys()), "")],
                limits=LIMITS[next(iter(named & LIMITS.keys()), "")],
            )
        )  # fmt: skip
    return tuple(attacks)


@dataclass(frozen=True, slots=True)
class Targets:
    """A file that only its owner may read, sockets that listen, and a process; nothing of them is of worth."""

    folder: Path
    mark: str
    port: int
    udp_port: int
    abstract: str
    victim: subprocess.Popen[bytes]

    def names(self) -> str:
        """Write the assignments that tell a program where they are."""
        values = {
            "FOLDER": str(self.folder), "SECRET": str(self.folder / "secret"),
            "TREASURE": str(self.folder / "treasure"),
            "UNIX": str(self.folder / "socket"), "MARK": self.mark, "PORT": self.port, "UDP_PORT": self.udp_port,
            "ABSTRACT": self.abstract, "VICTIM": self.victim.pid, "PARENT": os.getpid(), "LEFT": f"sftplay-{self.mark}",
        }  # fmt: skip
        return "; ".join(f"{name} = {value!r}" for name, value in values.items()) + "\n"

    def losses(self) -> list[str]:
        """List what an attack has done to them."""
        found = sorted(path.name for path in self.folder.iterdir())
        losses = [] if found == ["secret", "socket", "treasure"] else [f"the folder holds {', '.join(found)}"]
        if "treasure" in found and (self.folder / "treasure").read_text() != self.mark:
            losses.append("a file was written to")
        return [*losses, "a process was killed"] if self.victim.poll() is not None else losses

    def leftovers(self, *, known: frozenset[str]) -> list[str]:
        """List the files that an attack has left on the machine, and the processes that are not known."""
        left = [f"process {number}" for number in sorted(boxed_processes() - known)]
        for folder in ("/tmp", "/var/tmp", "/dev/shm", str(Path.home())):
            left += [str(path) for path in Path(folder).glob(f"*sftplay-{self.mark}*")]
            left += [str(path) for path in Path(folder).glob(f"sftplay-box-{os.getpid()}-*")]
        return left


def boxed_processes() -> frozenset[str]:
    """Number all processes on the machine that came out of boxes that this process opened."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{OWNER}={os.getpid()}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.add(path.name)
    return frozenset(found)


def used_cpu_s(processes: Iterable[str]) -> dict[str, float]:
    """Read what each of these processes has used of the processor; those that are gone are left out."""
    found = {}
    for number in processes:
        with suppress(OSError):
            parts = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
            found[number] = (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")  # proc(5): user and system
    return found


@contextmanager
def targets() -> Iterator[Targets]:
    """Set targets up, and take them away again."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sftplay-targets-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        mark = secrets.token_hex(8)
        for name in ("secret", "treasure"):
            (folder / name).write_text(mark)
            (folder / name).chmod(0o600)
        ports = []
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket")),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0sftplay-{mark}"),
        ):
            listening = stack.enter_context(socket.socket(family, kind))
            listening.bind(address)
            if kind == socket.SOCK_STREAM:
                listening.listen(64)
            ports.append(listening.getsockname()[1])
        # `cat` ends with its standard input, that is with this process at the latest.
        victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={"MARK": mark})
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        yield Targets(folder, mark, ports[0], ports[1], f"sftplay-{mark}", victim)
        assert victim.stdin is not None
        victim.stdin.close()


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


def run_attacks(
    executor: Executor, *, chosen: Iterable[Attack] | None = None, note: Callable[[Row], None]
) -> list[Row]:
    """Try the attacks, or the chosen ones, on an executor in turn; all on the same targets, as far as those stand."""
    rows: list[Row] = []
    judge(GOOD, executor)
    known = boxed_processes()  # of an executor that keeps a process which waits
    waiting = list(read_attacks() if chosen is None else chosen)
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
    job = Job(code=code, tests=attack.tests, limits=limits)
    verdict = judge(job, executor)
    problems = reached.losses()
    if verdict.passed >= verdict.total:
        problems.append("it passed")
    if verdict.status not in attack.statuses:
        problems.append(f"status {verdict.status}: {verdict.stderr[-200:]}")
    # A machine may add to a job's limits: a box that is slow to start, and other work on it.
    if verdict.seconds > 3 * job.limits.timeout_s + START_S + 20.0:
        problems.append(f"it took {verdict.seconds:.1f} s")
    left = wait_gone(reached, known=known)
    after = judge(GOOD, executor)
    if after.status != "ok":
        problems.append(f"the next program got {after.status}: {after.stderr[-200:]}")
    return Row(attack, verdict, (*problems, *left))


def wait_gone(reached: Targets, *, known: frozenset[str] = frozenset()) -> list[str]:
    """Wait until all of an attack is gone; list what it has left.

    A process that still works ends the waiting: its own limit of the processor would end it as well, a little later.
    """
    before: dict[str, float] = {}
    until = time.monotonic() + 60.0  # for the kernel to clear a killed namespace away
    while (left := reached.leftovers(known=known)) and time.monotonic() < until:
        used = used_cpu_s(boxed_processes() - known)
        before = before or used
        # A killed process uses less than 1 s of the processor until it is gone, on a busy machine too.
        if working := [number for number in sorted(used) if used[number] - before.get(number, 0.0) > 1.0]:
            return [f"process {number} still works" for number in working]
        time.sleep(0.02)
    return left


def format_list(rows: dict[str, list[Row]]) -> str:
    """List the attacks of a group that ended alike in every box, as Markdown; what got through stands in bold."""
    alike: dict[str, list[str]] = {}
    for several in zip(*rows.values(), strict=True):
        attack, mode = several[0].attack, several[0].verdict.mode
        ends = [f"**{'; '.join(row.problems)}**" if row.problems else row.verdict.status for row in several]
        by_box = ", ".join(f"{end} ({name})" for name, end in zip(rows, ends, strict=True))
        end = ends[0] if len(set(ends)) == 1 else by_box
        alike.setdefault(f"{attack.group}, {mode}, {end}", []).append(attack.name)
    wrap = textwrap.TextWrapper(128, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(wrap.fill(f"{same}: {'; '.join(names)}.") for same, names in alike.items())


ATTEMPT = """
def attempt(name):
    names = {}
    exec(CODES[name], names)
    return names["f"]()
"""


def find_hole(executor: Executor) -> str:
    """Find what a program reaches from these boxes that it should not, or why they do not work; or nothing."""
    chosen = [attack for attack in read_attacks() if attack.is_quick]
    with targets() as reached:
        codes = {attack.name: reached.names() + attack.code for attack in chosen}
        codes["control"] = "def f():\n    return 'works'"
        code = f"CODES = {codes!r}\n{ATTEMPT}"
        escapes = (f"assert attempt({attack.name!r}) == 'escaped'" for attack in chosen)
        tests = ("assert attempt('control') == 'works'", *escapes)
        # Where the machine is busy, a slow answer is no hole.
        job = Job(code=code, tests=tests, limits=Limits(timeout_s=120, test_timeout_s=60))
        verdict = judge(job, executor)
        losses = reached.losses()
    if verdict.per_test[0] != "ok":
        return f"no program runs in its box ({verdict.per_test[0]}: {verdict.stderr[-300:]})"
    escaped = [attack.name for attack, status in zip(chosen, verdict.per_test[1:], strict=True) if status == "ok"]
    return "; ".join([*(f"escaped: {name}" for name in escaped), *losses])
