"""Which executor this machine can be trusted with: the first that holds what its self-test tries."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from sftplay import log
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.sandbox.attacks.suite import find_hole
from sftplay.sandbox.boxes.executors import INSTALL, Bwrap, Executor, Landlock, PlainProcess, WarmBwrap

NAMES = ("auto", "bwrap", "landlock", "none")

SAFE: dict[str, Callable[..., Executor]] = {"bwrap": Bwrap, "landlock": Landlock}
"""The executors that isolate, the best first."""

WARM: dict[str, Callable[..., Executor]] = {"bwrap": WarmBwrap}
"""The same kinds of boxes out of a process that waits, where there is such a way."""


def choose_executor(name: str, *, is_warm: bool) -> Callable[..., Executor]:
    """Choose what makes executors of that name, from the packages that programs may import.

    `auto` takes the best one that holds on this machine. Raise ConfigError where no executor is called so, and
    MachineError where it is not installed here, or a program gets out of its boxes.
    """
    if name not in NAMES:
        near = nearest_names(name, NAMES)
        fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
        raise ConfigError(f"no executor is called {name!r}", where="executor", fix=fix, nearest=near)
    if name == "none":
        warning = "WARNING: executor none: programs written by a model run on this machine WITHOUT ANY ISOLATION"
        log.say(warning, "sandbox")
        return PlainProcess
    problems = []
    for kind in SAFE if name == "auto" else (name,):
        problem = find_problem(kind)
        if not problem:
            has_warm = is_warm and kind in WARM and not find_problem(kind, is_warm=True)
            return WARM[kind] if has_warm else SAFE[kind]
        problems.append(f"{kind}: {problem}")
    fix = f"install bubblewrap: {INSTALL}; or in a container, where it cannot work: make install EXTRAS=sandbox"
    raise MachineError(f"nothing here can box a program ({'; '.join(problems)})", where="sandbox", fix=fix)


@cache
def find_problem(name: str, *, is_warm: bool = False) -> str:
    """Say why an executor cannot be used here, or nothing. It is asked once a process."""
    try:
        executor = (WARM if is_warm else SAFE)[name]()
    except MachineError as error:
        return error.what
    try:
        return find_hole(executor)
    finally:
        executor.close()


@cache
def read_version(name: str) -> str:
    """Read an executor's name and version, Python's version, and a digest of this package's sources."""
    release = version("sandlock") if name == "landlock" else ""
    if name == "bwrap":
        done = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True)
        release = done.stdout.strip().removeprefix("bubblewrap ")
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{name} {release}, python {platform.python_version()}, {digest.hexdigest()[:16]}"
