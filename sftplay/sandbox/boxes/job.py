"""What the box is asked and what it says: jobs, their limits, and verdicts."""

from __future__ import annotations

import ast
import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

from sftplay.errors import DataError, nearest_names

Status = Literal["ok", "wrong", "runtime", "syntax", "timeout", "memory", "output", "killed", "tampered", "infra"]
"""How a test, or a job, ended.

`ok` passed; `wrong` another value; `runtime` raised; `syntax` is no Python; `timeout` took too long; `memory` wanted
more than there is; `output` printed or returned too much; `killed` the process ended itself; `tampered` wrote what is
no answer where answers go; `infra` the machinery failed, and nothing is known of the program: never count it as 0.
"""

Mode = Literal["pair", "proxy", "in_process", "none"]
"""How tests were judged.

`pair`: the program gives values, they are compared here. `proxy`: tests run in a box of their own and call the
program's functions in the other. `in_process`: tests share the program's process, because they hand it objects.
`none`: no tests.
"""

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use. A limit that ends one test does not take the others with it."""

    timeout_s: float = 5.0
    """Of a whole job, on the clock, without the time that the box needs to start."""
    test_timeout_s: float = 4.0
    """Of one test, on the clock. The slowest reference solution of MBPP needs 2.5 s for one."""
    memory_bytes: int = 512 * MIB
    """Address space of one process."""
    disk_bytes: int = 16 * MIB
    """Of the folder that it may write to; it lies in memory."""
    file_bytes: int = MIB
    """Of one file."""
    output_bytes: int = 64 << 10
    """Of what it prints, both streams together."""
    answer_bytes: int = MIB
    """Of the value of one call."""
    processes: int = 16
    """Processes and threads at the same time."""
    open_files: int = 32
    stack_bytes: int = 8 * MIB

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise DataError(f"{value!r} is no limit", where=name, fix="give a number above 0")
            if not name.endswith("_s") and not isinstance(value, int):
                raise DataError(f"{value!r} is no whole number", where=name, fix="give one above 0")


LIMIT_NAMES = tuple(limit.name for limit in fields(Limits))
_read_values = attrgetter(*LIMIT_NAMES)


@lru_cache(maxsize=4_096)
def parse(source: str) -> ast.Module:
    """Parse a trusted source. Nobody changes the tree: the same tests come with many programs."""
    return ast.parse(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program, and the tests that say whether it does what it should."""

    code: str
    tests: tuple[str, ...] = ()
    """Each is Python that raises AssertionError where the program is wrong. The tests are trusted, the code is not."""
    setup: str = ""
    """Trusted statements that code and tests need, such as imports."""
    entry_point: str | None = None
    """The function that the tests call. None: the functions that the tests name and nothing of theirs defines."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for number, source in enumerate((self.setup, *self.tests)):
            where = f"tests[{number - 1}]" if number else "setup"
            try:
                parse(source)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                fix = "mend it, or leave it out; only `code` may be anything"
                raise DataError(f"is no Python ({error})", where=where, fix=fix) from error

    def key(self, executor: str) -> str:
        """Return a digest that changes with anything that may change the verdict."""
        parts = json.dumps([self.code, self.tests, self.setup, self.entry_point, _read_values(self.limits), executor])
        return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a job. `passed` of `total` tests; all is well only with the status `ok`."""

    status: Status
    per_test: tuple[Status, ...] = ()
    """In the order of the tests."""
    passed: int = 0
    total: int = 0
    seconds: float = 0.0
    """On the clock, the start of the box included."""
    stderr: str = ""
    """The first failure's last line; or the end of what the program printed."""
    mode: Mode = "none"
    executor: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as the verb `sandbox` writes it."""
        return {**asdict(self), "per_test": list(self.per_test), "seconds": round(self.seconds, 4)}


JOB_KEYS = ("code", "tests", "setup", "entry_point", "limits")


def job_from_dict(content: object, *, limits: Limits) -> Job:
    """Make the job of one JSON object; `limits` hold where it names none. Raise DataError where a key is missing,
    unknown or of the wrong type, or a test is no Python.
    """
    if not isinstance(content, dict):
        raise DataError("is no JSON object", fix='write {"code": "...", "tests": ["assert ..."]}')
    for key in content:
        if key not in JOB_KEYS:
            near = nearest_names(key, JOB_KEYS)
            raise DataError("is no key of a job", where=key, fix=f"there are {', '.join(JOB_KEYS)}", nearest=near)
    tests = content.get("tests", [])
    for key, is_right, kind in (
        ("code", isinstance(content.get("code"), str), "a text"),
        ("tests", isinstance(tests, list) and all(isinstance(text, str) for text in tests), "a list of texts"),
        ("setup", isinstance(content.get("setup", ""), str), "a text"),
        ("entry_point", isinstance(content.get("entry_point", ""), str | None), "a text"),
        ("limits", isinstance(content.get("limits", {}), dict), "an object"),
    ):
        if not is_right:
            raise DataError(f"is not {kind}", where=key, fix=f"give {kind}")
    named = content.get("limits", {})
    if unknown := next((key for key in named if key not in LIMIT_NAMES), None):
        near = nearest_names(unknown, LIMIT_NAMES)
        fix = f"there are {', '.join(LIMIT_NAMES)}"
        raise DataError("is no limit", where=f"limits.{unknown}", fix=fix, nearest=near)
    return Job(
        code=content["code"], tests=tuple(tests), setup=content.get("setup", ""),
        entry_point=content.get("entry_point"), limits=replace(limits, **named),
    )  # fmt: skip
