"""The sandbox as the kit sees it: the executor that this machine can be trusted with; jobs in, their verdicts out."""

from __future__ import annotations

import hashlib
import os
import platform
import queue
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from importlib.metadata import packages_distributions, version
from itertools import islice
from pathlib import Path

from sftplay import log
from sftplay.errors import ConfigError, MachineError, suggest
from sftplay.sandbox.attacks.suite import find_hole
from sftplay.sandbox.boxes.executors import INSTALL, Bwrap, Executor, Landlock, PlainProcess, WarmBwrap
from sftplay.sandbox.boxes.job import Job, Verdict
from sftplay.sandbox.boxes.judge import judge

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
        fix, near = suggest(name, NAMES, f"there are {', '.join(NAMES)}")
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


MOST_WORKERS = 16


def count_workers(processes: int | None = None) -> int:
    """Count the boxes to run at the same time: this rank's share of the process's cores, at most MOST_WORKERS.

    `processes` share these cores; None means those that the launcher started on this machine.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_WORKERS, cores // max(1, processes or len(log.local_ranks()))))


class Sandbox:
    """Runs jobs in boxes, several at a time. Equal jobs run once, and verdicts are kept, those of `infra` excepted.

    Use it as a context manager: its end closes what runs.
    """

    def __init__(
        self, executor: str = "auto", *, workers: int | None = None, is_warm: bool = True, packages: Sequence[str] = ()
    ) -> None:
        """Programs may import `packages`, such as numpy, besides Python's own. Raise ConfigError where there is no such
        executor or package, and MachineError where nothing here can box a program.
        """
        make = choose_executor(executor, is_warm=is_warm)
        self._packages = packages
        self._executors: queue.SimpleQueue[Executor] = queue.SimpleQueue()
        self._all = [make(packages) for _ in range(workers or count_workers())]
        for opened in self._all:
            self._executors.put(opened)
        self.workers = len(self._all)
        """How many boxes stand at the same time."""
        self.executor = self._all[0].name
        """The name of what the boxes are made of; to be recorded with each result."""
        self._threads = ThreadPoolExecutor(len(self._all), thread_name_prefix="sandbox")
        self._kept: dict[str, Verdict] = {}

    def run(self, jobs: Iterable[Job], *, within_s: float | None = None) -> list[Verdict]:
        """Return the verdict of each job, in the order of the jobs. What is not judged in time is `infra`; every job
        ends by its own limits, so this happens only where the boxes themselves hang."""
        listed = list(jobs)
        keys = [job.key(self.executor) for job in listed]
        new = {key: job for key, job in zip(keys, listed, strict=True) if key not in self._kept}
        futures = {key: self._threads.submit(self._judge, job) for key, job in new.items()}
        wait(futures.values(), timeout=within_s)
        late = Verdict(status="infra", stderr=f"no verdict within {within_s} s", executor=self.executor)
        found = {key: future.result() if future.done() else late for key, future in futures.items()}
        for future in futures.values():
            future.cancel()  # does nothing to those that are done
        verdicts = [found[key] if key in found else self._kept[key] for key in keys]
        self._kept |= {key: verdict for key, verdict in found.items() if verdict.status != "infra"}
        for key in list(islice(self._kept, max(0, len(self._kept) - 50_000))):  # about 1 KB each; the oldest go first
            del self._kept[key]
        return verdicts

    def run_again(self, job: Job) -> Verdict:
        """Return the verdict of one job that runs alone, whatever is known of it; it replaces what is known."""
        self._kept.pop(job.key(self.executor), None)
        return self.run([job])[0]

    @property
    def version(self) -> str:
        """The machinery's version: it changes with anything that may change a verdict."""
        owners = packages_distributions() if self._packages else {}
        packages = (f"{name} {version(owner)}" for name in self._packages for owner in owners.get(name, ()))
        return ", ".join([read_version(self.executor), *packages])

    def _judge(self, job: Job) -> Verdict:
        executor = self._executors.get()
        try:
            verdict = judge(job, executor)
            # The second boxes need nothing that could die.
            return judge(job, executor) if executor.renew() else verdict
        finally:
            self._executors.put(executor)

    def close(self) -> None:
        """End everything that runs. The sandbox cannot be used afterwards."""
        self._threads.shutdown(cancel_futures=True)
        for executor in self._all:
            executor.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
