"""Send tasks to the process that forks children, a few at a time, and yield their results as they end.

A task is a function of a module and its arguments, all of them JSON. Nothing that a task does can end this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sftplay.errors import MachineError
from sftplay.places import ROOT
from sftplay.signals import TiedPopen

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MALLOC_ARENA_MAX": "2",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The server's environment: who forks must have one thread, and memory must come from the system to be counted."""


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    function: str
    """`package.module.function`; it returns what JSON can hold."""

    arguments: dict[str, Any] = field(default_factory=dict)
    answer: str
    """The file that gets what the function returns."""

    limit_s: float | None = None
    memory_bytes: int | None = None
    most_file_bytes: int | None = None


@dataclass(frozen=True)
class ChildEnd:
    task: ChildTask
    exit_code: int
    """0 where the task's answer is complete."""

    killed_for: str
    """`timeout`, `memory`, or nothing."""

    seconds: float
    peak_bytes: int


class ChildPool:
    """Runs tasks in `size` children side by side."""

    def __init__(self, size: int, *, warmed: Iterable[str], errors: Path) -> None:
        """Call `module.warm_up(word, ...)` once for all children, for each `module:word:...` of `warmed`.

        `errors` gets what libraries print.
        """
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._size, self._errors = size, errors
        with errors.open("ab") as stream:
            self._server = TiedPopen(
                [sys.executable, "-m", f"{__package__}.fork_server", *warmed], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=stream, env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> ChildPool:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # the server has ended already
                    stream.close()
        self._server.wait()

    def run(self, tasks: Iterable[ChildTask]) -> Iterator[ChildEnd]:
        """Yield the end of each task, in the order in which they end. A task is taken only when a child is free.
        Raise MachineError where the server was killed.
        """
        running: dict[int, ChildTask] = {}
        assert self._server.stdin is not None
        for number, task in enumerate(tasks):
            running[number] = task
            request = {"number": number, **asdict(task)}
            try:
                self._server.stdin.write(json.dumps(request).encode() + b"\n")
                self._server.stdin.flush()
            except BrokenPipeError:
                raise self._describe_end() from None
            if len(running) == self._size:
                yield self._wait(running)
        while running:
            yield self._wait(running)

    def _wait(self, running: dict[int, ChildTask]) -> ChildEnd:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise self._describe_end()
        answer = json.loads(line)
        return ChildEnd(task=running.pop(answer.pop("number")), **answer)

    def _describe_end(self) -> MachineError:
        code = self._server.wait()
        last_line = self._errors.read_text(errors="replace").strip().rpartition("\n")[2]
        what = f"the process that starts readers has ended (code {code}{': ' + last_line if last_line else ''})"
        return MachineError(what, where="ingest", fix="free memory; the same command goes on where this one stopped")
