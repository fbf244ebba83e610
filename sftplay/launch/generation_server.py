"""The generation server of a run (grpo.generation: vllm_server): its command, and the process that holds it.

SLURM or Ray starts this module on the server's node. When the server answers, its address stands in a file, and the
trainers learn it from their environment. Nothing is decided here about when the server ends.
"""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sftplay.atomic import write_text
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.machine.ports import HOST, free_port
from sftplay.signals import catch_signals, popen_tied

if TYPE_CHECKING:  # pydantic comes with it, which the process of a job does not need
    from sftplay.config.run import RunConfig

MODULE = "sftplay.launch.generation_server"
KEY = "grpo.vllm.command"

GLOO = "gloo"  # the kit's own way for weights where there is no GPU (`tasks.grpo.vllm_cpu`)
URL = "SFTPLAY_SERVER_URL"  # the trainers' variable with the address of the server that was started for them
DEFAULT_URL = "http://localhost:8000"  # TRL's own default

NEEDED = (
    "--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
)  # fmt: skip
"""What a server of TRL's trainers needs (trl 1.16, scripts/vllm_serve.py, `build_command`)."""

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # the endpoints for weights belong to vLLM's development mode
EVERYWHERE = "0.0.0.0"
POLL_S, ANSWER_S, ENDING_S = 0.3, 5.0, 20.0

HOLDER_ENDING_S = 40.0  # how long the process that holds the server may take to end, before it is killed
CHECKPOINT_S = 60.0
"""How long trainers without a server may take for a checkpoint. They can save one only if they are not sampling."""


def starts_server(cfg: RunConfig) -> bool:
    """True when completions come from a server and the config names none that runs."""
    return cfg.task.turns == 1 and cfg.grpo.generation == "vllm_server" and cfg.grpo.vllm.url is None


def server_command(cfg: RunConfig, *, host: str, port: int) -> list[str]:
    """The command of a server that listens there."""
    values = {"{model}": cfg.model.name, "{host}": host, "{port}": str(port)}
    if cfg.grpo.vllm.command:
        words = shlex.split(cfg.grpo.vllm.command)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return words
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", cfg.model.name, "--host", host]
    command += ["--port", str(port), "--tensor-parallel-size", str(cfg.grpo.vllm.tensor_parallel)]
    command += ["--max-model-len", str(cfg.prompt_tokens + cfg.grpo.max_completion_length)]
    command += ["--revision", cfg.model.revision] if cfg.model.revision else []
    command += ["--trust-remote-code"] if cfg.model.trust_remote_code else []
    return [*command, *NEEDED]


def client_environment(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which trainers find the server at `url`, past a proxy that `environ` may name."""
    names = [environ.get("no_proxy") or environ.get("NO_PROXY") or "", urlsplit(url).hostname or ""]
    direct = ",".join(filter(None, names))
    return {URL: url, "no_proxy": direct, "NO_PROXY": direct}


class ServerProcess:
    """The process that holds the server on its node, where `runner` starts `main` with `options`."""

    def __init__(
        self, config: Path, address: Path, *, log: Path, runner: Sequence[str] = (), options: Sequence[str] = (),
        env: Mapping[str, str] | None = None, cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self._address = address
        address.unlink(missing_ok=True)  # of a previous attempt
        command = [*runner, sys.executable, "-m", MODULE, str(config), str(address), *options]
        with log.open("ab", buffering=0) as output:
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


def main(arguments: Sequence[str]) -> int:
    """Hold the server until it ends or a stop signal comes: its exit code, 3 when it was never ready."""
    parser = ArgumentParser(prog="generation_server")
    parser.add_argument("config", type=Path)
    parser.add_argument("address", type=Path)
    parser.add_argument("--node", default=socket.gethostname(), help="how the trainers call this node")
    args = parser.parse_args(arguments)
    from sftplay.config.load import load_config

    stopped: list[int] = []
    catch_signals(lambda number, _frame: stopped.append(number))
    try:
        _hold(load_config(args.config), args.address, node=args.node, stopped=stopped)
    except SftplayError as error:
        print(error, flush=True)
        return error.exit_code
    return 128 + stopped[0]


def _hold(cfg: RunConfig, address: Path, *, node: str, stopped: Sequence[int]) -> None:
    """Start the server and end it when a signal has `stopped` this process. An error if it ends before that."""
    port, timeout_s = free_port(0), cfg.grpo.vllm.timeout
    command = server_command(cfg, host=HOST if node == HOST else EVERYWHERE, port=port)
    print(f"[server] {shlex.join(command)}", flush=True)
    try:
        process = popen_tied(command, output=1, env=ENVIRONMENT)
    except OSError as error:
        raise MachineError(str(error), where=KEY, fix="correct the command; it runs on the server's node") from None
    deadline, is_ready = time.monotonic() + timeout_s, False
    try:
        while process.poll() is None and not stopped:
            if not is_ready and (is_ready := answers(port, within_s=ANSWER_S)):
                write_text(address, f"http://{node}:{port}")
                print(f"[server] ready at http://{node}:{port}", flush=True)
            if not is_ready and time.monotonic() > deadline:
                what = f"the generation server has not answered for {timeout_s} s"
                raise MachineError(what, where="grpo.vllm.timeout", fix="look at its lines above, or wait longer")
            time.sleep(POLL_S)
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(ENDING_S)
        with suppress(ProcessLookupError):  # what it has started in its session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not stopped:
        what = f"the generation server has ended with {process.returncode}"
        raise RunError(what, where=KEY, fix="look at its lines above")


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
