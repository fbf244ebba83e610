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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sftplay.atomic import write_text
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.machine.ports import HOST, free_port
from sftplay.signals import catch_signals, popen_tied

if TYPE_CHECKING:  # pydantic comes with it, which the process of a job does not need
    from sftplay.config.run import RunConfig

MODULE = "sftplay.launch.generation_server"
KEY = "grpo.vllm.command"

URL = "SFTPLAY_SERVER_URL"
"""The trainers' variable with the address of the server that was started beside them."""

DEFAULT_URL = "http://localhost:8000"
"""TRL's own default."""

NEEDED = (
    "--weight-transfer-config",
    '{"backend": "nccl"}',
    "--logprobs-mode",
    "processed_logprobs",
    "--max-logprobs",
    "-1",
)
"""What a server of TRL's trainers needs (trl 1.16, scripts/vllm_serve.py, `build_command`)."""

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""The endpoints for weights belong to vLLM's development mode."""

EVERYWHERE = "0.0.0.0"
POLL_S, ANSWER_S, ENDING_S = 0.3, 5.0, 20.0


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


def host_command(config: Path, address: Path) -> list[str]:
    """The command that holds the server on its node; `address` is the file for the server's address."""
    return [sys.executable, "-m", MODULE, str(config), str(address)]


def main(arguments: Sequence[str]) -> int:
    """Hold the server until it ends or a stop signal comes: its exit code, 3 when it was never ready."""
    parser = ArgumentParser(prog="generation_server")
    parser.add_argument("config", type=Path)
    parser.add_argument("address", type=Path)
    parser.add_argument("--node", default=socket.gethostname(), help="how the trainers call this node")
    args = parser.parse_args(arguments)
    from sftplay.config.load import load_config

    try:
        return _hold(load_config(args.config), args.address, node=args.node)
    except SftplayError as error:
        print(error, flush=True)
        return error.exit_code


def _hold(cfg: RunConfig, address: Path, *, node: str) -> int:
    """Raises MachineError when the server cannot start or is not ready in time, RunError when it ends by itself."""
    port, stopped = free_port(0), list[int]()
    command = server_command(cfg, host=HOST if node == HOST else EVERYWHERE, port=port)
    print(f"[server] {shlex.join(command)}", flush=True)
    catch_signals(lambda number, _frame: stopped.append(number))
    try:
        process = popen_tied(command, output=1, env=ENVIRONMENT)
    except OSError as error:
        raise MachineError(str(error), where=KEY, fix="correct the command; it runs on the server's node") from None
    deadline, is_ready = time.monotonic() + cfg.grpo.vllm.timeout, False
    try:
        while process.poll() is None and not stopped:
            if not is_ready and (is_ready := _answers(port)):
                write_text(address, f"http://{node}:{port}")
                print(f"[server] ready at http://{node}:{port}", flush=True)
            if not is_ready and time.monotonic() > deadline:
                what = f"the generation server has not answered for {cfg.grpo.vllm.timeout} s"
                raise MachineError(what, where="grpo.vllm.timeout", fix="look at its lines above, or wait longer")
            time.sleep(POLL_S)
    finally:
        _end(process)
    if stopped:
        return 128 + stopped[0]
    raise RunError(
        f"the generation server has ended with {process.returncode}", where=KEY, fix="look at its lines above"
    )


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[Any]) -> None:
    """End the server, and what it has started in its session."""
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(ENDING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
