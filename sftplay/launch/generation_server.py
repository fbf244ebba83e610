"""The generation server of a run (grpo.generation: vllm_server): what holds it, and the trainers that need it.

`make train`, SLURM or Ray start `MODULE` on the server's node. When the server answers, its address stands in a file,
and the trainers learn it from their environment.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sftplay.errors import MachineError, RunError
from sftplay.machine.ports import HOST
from sftplay.places import ROOT, find_python
from sftplay.signals import popen_tied

if TYPE_CHECKING:  # pydantic comes with it, which the process of a job does not need
    from sftplay.config.run import RunConfig

MODULE = "sftplay.tasks.grpo.vllm_server"

GLOO = "gloo"  # the kit's own way for weights where there is no GPU (`tasks.grpo.vllm_cpu`)
URL = "SFTPLAY_SERVER_URL"  # the trainers' variable with the address of the server that was started for them
DEFAULT_URL = "http://localhost:8000"  # TRL's own default

POLL_S = 0.3

HOLDER_ENDING_S = 40.0  # how long the process that holds the server may take to end, before it is killed
CHECKPOINT_S = 60.0
"""How long trainers without a server may take for a checkpoint. They can save one only if they are not sampling."""


def starts_server(cfg: RunConfig) -> bool:
    """True when completions come from a server and the config names none that runs."""
    return cfg.task.turns == 1 and cfg.grpo.generation == "vllm_server" and cfg.grpo.vllm.url is None


def find_worker_python(cfg: RunConfig) -> str:
    """The Python of the run's workers: where vLLM samples, one that has it, by whose client TRL's trainer asks it."""
    has_vllm = cfg.task.turns == 1 and cfg.grpo.generation.startswith("vllm")
    return str((find_python() if has_vllm else None) or sys.executable)


def vllm_environment() -> dict[str, str]:
    """Variables of workers whose answers vLLM samples. In one process with the trainer it must neither start others nor
    bind the trainer's threads to cores."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return quiet | {"PYTHONPATH": paths, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def client_environment(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which trainers find the server at `url`, past a proxy that `environ` may name."""
    names = [environ.get("no_proxy") or environ.get("NO_PROXY") or "", urlsplit(url).hostname or ""]
    direct = ",".join(filter(None, names))
    return {URL: url, "no_proxy": direct, "NO_PROXY": direct}


class ServerProcess:
    """The process that holds the server on its node, where `runner` starts `main` with `options`."""

    def __init__(
        self, config: Path, address: Path, *, log_file: Path, runner: Sequence[str] = (), options: Sequence[str] = (),
        env: Mapping[str, str] | None = None, cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self._address = address
        address.unlink(missing_ok=True)  # of a previous attempt
        command = [*runner, sys.executable, "-m", MODULE, str(config), str(address), *options]
        with log_file.open("ab", buffering=0) as output:
            self._process = popen_tied(command, output=output, env=env, cwd=cwd)

    def look(self) -> tuple[int | None, str]:
        """The exit code, None while it runs; and the server's address, empty until it answers."""
        return self._process.poll(), self._address.read_text(encoding="utf-8") if self._address.exists() else ""

    def end(self) -> None:
        """End the server, unless it has ended."""
        for end in (self._process.terminate, self._process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(HOLDER_ENDING_S)
                break
        self._address.unlink(missing_ok=True)


class FollowedServer:
    """A server and the trainers that need it: neither outlives the other. `look` is that of its `ServerProcess`."""

    def __init__(self, look: Callable[[], tuple[int | None, str]], *, is_stopping: Callable[[], bool]) -> None:
        self._look, self._is_stopping = look, is_stopping
        self.lost: int | None = None
        """The exit code of a server that has ended before the trainers."""

    def await_address(self) -> str:
        """The server's address when it answers, empty for a stop of the run. An error if it ends before that."""
        while not self._is_stopping():
            code, url = self._look()
            if code is not None:
                kind = MachineError if code == MachineError.exit_code else RunError
                raise _lost_error(code, "before it was ready", kind=kind)
            if url:
                return url
            time.sleep(POLL_S)
        return ""

    def follow(self, *, wait: Callable[[float | None], bool], stop: Callable[[int], None]) -> None:
        """Wait for the trainers. Those that have lost the server are stopped, and killed if they do not stop.

        `wait` waits so many seconds for them and says whether they have ended; `stop` sends them a signal.
        """
        while self.lost is None and not wait(POLL_S):
            self.lost, _ = self._look()
        if self.lost is not None:
            if not self._is_stopping():  # a second signal would end them at once
                stop(signal.SIGTERM)
            if not wait(CHECKPOINT_S):
                stop(signal.SIGKILL)
            wait(None)

    def await_end(self, limit_s: float) -> None:
        """Wait for the end of a server that the trainers may have failed for want of."""
        deadline = time.monotonic() + limit_s
        while self.lost is None and time.monotonic() < deadline:
            self.lost, _ = self._look()
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise RunError if the trainers were stopped because the server had ended."""
        if self.lost is not None and not self._is_stopping():
            raise _lost_error(self.lost, "while the run trained", kind=RunError)


def _lost_error(code: int, when: str, *, kind: type[MachineError | RunError]) -> MachineError | RunError:
    what = f"the generation server has ended with {code} {when}"
    return kind(what, where="grpo.generation", fix="look at logs/generation_server.log")


def answers(port: int, *, within_s: float) -> bool:
    """Return whether a server on this machine says that it is ready."""
    connection = http.client.HTTPConnection(HOST, port, timeout=within_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
