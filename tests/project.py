"""A folder with a config in which tests start runs as a user does, held and stopped from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from holding import Hold, write_hook
from processes import HANG_S, wait_until
from run_outputs import Outputs
from small_run import Inputs, write_small_run

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Project(Outputs):
    """Runs of run.yaml, each under its name, and what they leave and print."""

    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def hook(self) -> Path:
        """The folder of the hook that holds a worker."""
        return self.root / "hook"

    def start(self, verb: str, name: str, *words: object, **environment: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sftplay", verb, "--config", self.config, f"run_name={name}", *words]
        return self.spawn([str(word) for word in argv], name, **environment)

    def spawn(self, argv: list[str], name: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own; a file keeps what it prints, as a pipe would have to be read."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        for key in ("MAKELEVEL", "MAKEFLAGS"):
            env.pop(key, None)
        with (self.root / f"{name}.txt").open("ab") as out:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.started.append(process)
        return process

    def run(self, verb: str, name: str, *words: object, **environment: str) -> tuple[int, str]:
        """Run to the end: (exit code, output)."""
        code = self.start(verb, name, *words, **environment).wait(HANG_S)
        return code, self.output(name)

    def output(self, name: str) -> str:
        return (self.root / f"{name}.txt").read_text()

    def adapter(self, name: str) -> bytes:
        return (self.folder(name).path / "adapter" / "adapter_model.safetensors").read_bytes()

    def holding(self, name: str) -> Hold:
        return Hold(self.root / name)

    def when_held(self, name: str, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """All processes of a run, once it is held."""
        assert self.holding(name).wait(process), self.output(name)
        command = psutil.Process(process.pid)
        return [command, *command.children(recursive=True)]

    def start_training(self, name: str, *words: object) -> tuple[subprocess.Popen[bytes], list[int]]:
        """Start a run and return when its ranks have met, with the process and the ranks' pids."""
        process = self.start("train", name, *words)
        wait_until(lambda: self.status(name).get("ranks") or process.poll() is not None)
        assert process.poll() is None, self.output(name)
        return process, [rank["pid"] for rank in self.status(name)["ranks"]]


@contextmanager
def open_project(root: Path, inputs: Inputs, **changes: Any) -> Iterator[Project]:
    """A project with the config of a small run on rows without a held-out part; a failed test leaves no run behind."""
    usual = {"model__max_seq_len": 64, "data__val_path": None, "data__split": 0}
    write_small_run(root, inputs, **{**usual, **changes})
    write_hook(root / "hook")
    project = Project(root)
    try:
        yield project
    finally:
        for process in project.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
