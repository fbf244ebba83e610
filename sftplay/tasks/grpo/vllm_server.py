"""The generation server's command, and the process that holds it on its node: `launch.generation_server` starts it.

Nothing is decided here about when the server ends.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.export.server import ENVIRONMENT as QUIET
from sftplay.export.server import (
    RANKS,
    check_heads,
    cpu_dtype,
    end_with_this_process,
    find_cache_bytes,
    server_module,
    small_machine_environment,
)
from sftplay.launch.command import offline_environment, quiet_environment
from sftplay.launch.generation_server import GLOO, POLL_S, answers
from sftplay.machine.ports import HOST, free_port
from sftplay.machine.probe import find_gpus
from sftplay.model.source import is_local, locate
from sftplay.places import ROOT, find_python
from sftplay.signals import catch_signals, popen_tied

KEY = "grpo.vllm.command"

NEEDED = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")
"""What TRL's trainers need of a server next to a way for weights (trl 1.16, scripts/vllm_serve.py, `build_command`)."""

PLUGIN = Path(__file__).with_name("vllm_plugin")
"""Metadata of a package that tells vLLM of the engine in `vllm_cpu`, by the entry point `vllm.general_plugins`."""

EVERYWHERE = "0.0.0.0"
ANSWER_S, ENDING_S = 5.0, 20.0


def server_command(cfg: RunConfig, *, host: str, port: int, has_gpu: bool) -> list[str]:
    """The command of a server that listens there. Raise MachineError where vLLM cannot compute the model on a CPU."""
    grpo, name = cfg.grpo, locate(cfg.model.name)
    values = {"{model}": name, "{host}": host, "{port}": str(port)}
    if grpo.vllm.command:
        words = shlex.split(grpo.vllm.command)
        for placeholder, value in values.items():
            words = [word.replace(placeholder, value) for word in words]
        return words
    length = cfg.prompt_tokens + grpo.max_completion_length
    # -P: do not import from the working folder.
    command = [str(find_python() or sys.executable), "-P", "-m", server_module(has_gpu=has_gpu), "--model", name]
    command += ["--host", host, "--port", str(port), "--tensor-parallel-size", str(grpo.vllm.tensor_parallel)]
    command += ["--max-model-len", str(length)]
    command += ["--revision", cfg.model.revision] if cfg.model.revision else []
    command += ["--trust-remote-code"] if cfg.model.trust_remote_code else []
    if grpo.vllm.sync == "adapter":
        rank = next(rank for rank in RANKS if rank >= cfg.tuning.lora.r)
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
    else:
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl" if has_gpu else GLOO})]
    if not has_gpu:
        folder = Path(name)
        if folder.is_dir():
            check_heads(folder)
            command += ["--kv-cache-memory-bytes", str(find_cache_bytes(folder, length))]
        command += ["--enforce-eager", "--dtype", cpu_dtype(cfg)]
    return [*command, *NEEDED]


def server_environment(cfg: RunConfig, *, has_gpu: bool) -> dict[str, str]:
    """The server's variables: vLLM's development mode has the endpoints for weights."""
    env = QUIET | quiet_environment() | {"VLLM_SERVER_DEV_MODE": "1"}
    env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(cfg.grpo.vllm.sync == "adapter")}
    env |= offline_environment() if is_local(cfg.model.name) else {}
    if has_gpu:
        return env
    found = (str(PLUGIN), str(ROOT), os.environ.get("PYTHONPATH"))
    return env | small_machine_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, found))}


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
    has_gpu = bool(find_gpus()[0])
    command = server_command(cfg, host=HOST if node == HOST else EVERYWHERE, port=port, has_gpu=has_gpu)
    print(f"[server] {shlex.join(command)}", flush=True)
    try:
        process = popen_tied(command, output=1, env=server_environment(cfg, has_gpu=has_gpu))
    except OSError as error:
        raise MachineError(str(error), where=KEY, fix="correct the command; it runs on the server's node") from None
    guard = end_with_this_process(process.pid)
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
        guard.kill()
        guard.communicate()
    if not stopped:
        what = f"the generation server has ended with {process.returncode}"
        raise RunError(what, where=KEY, fix="look at its lines above")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
