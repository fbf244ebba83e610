"""Build the command of an OpenAI-compatible server on this machine, and run it from start to stop.

It knows nothing of runs and loads no model; it serves a given folder.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sftplay import log
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export import gate
from sftplay.export.vllm_command import ENVIRONMENT, small_machine_environment, vllm_command
from sftplay.launch.command import Launch, offline_environment, quiet_environment
from sftplay.launch.generation_server import answers
from sftplay.machine.ports import HOST, free_port
from sftplay.places import ROOT, find_python
from sftplay.signals import Forwarder, popen_tied

ServerKind = Literal["transformers", "vllm"]

NEEDS = ("fastapi", "uvicorn", "openai")
"""Packages that transformers' server needs in addition to the kit's (5.17, `is_serve_available`)."""

START_S = 600.0
"""Reading a large model takes minutes. A failing server ends by itself, which is noticed at once."""

STOP_S = 10.0
"""Seconds for which an unfinished answer keeps the server alive."""


def choose_server(choice: ServerKind | Literal["auto"]) -> tuple[ServerKind, str]:
    """Return the server to use and the reason; auto takes vLLM where it is installed. Raise MachineError where what the
    server needs is not installed.
    """
    has_vllm = find_python() is not None
    if choice == "vllm" and not has_vllm:
        raise MachineError("vLLM is not installed", where=".venv-vllm", fix="make install-vllm")
    if choice == "vllm" or (choice == "auto" and has_vllm):
        return "vllm", "asked for" if choice == "vllm" else "it is installed"
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        fix = "make install EXTRAS=serve"
        raise MachineError(f"serving by transformers needs {', '.join(missing)}", where=sys.prefix, fix=fix)
    return "transformers", "asked for" if choice != "auto" else "vLLM is not installed (make install-vllm)"


def choose_port(port: int) -> int:
    """Return `port`, or any free one for 0. Clients know the port, so it is never replaced by another. Raise
    MachineError where something listens on it.
    """
    free = free_port(port)
    if port not in (0, free):
        raise MachineError("something listens here already", where=f"{HOST}:{port}", fix="give another with PORT=")
    return free


def check_token() -> None:
    """Refuse a token that no client could send. Raise ConfigError where SFTPLAY_SERVE_TOKEN is set, and is empty or not
    of visible ASCII characters.
    """
    token = os.environ.get(gate.TOKEN)
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        what = "is empty" if not token else "holds a character that a header cannot carry"
        raise ConfigError(what, where=gate.TOKEN, fix="set it to letters, digits and signs, or unset it")


def build_server(
    server: ServerKind,
    folder: Path,
    *,
    name: str,
    port: int,
    trusts_code: bool,
    adapter: Path | None = None,
    tokenizer: Path | None = None,
    generation: Path | None = None,
    max_model_len: int | None = None,
    has_gpu: bool = False,
    is_gated: bool = True,
) -> Launch:
    """Return the command of a server for the model `name` in `folder`.

    `folder` is the model's own for vLLM; for transformers a hub cache (see `serve`), since its server lists hub names.
    What follows `trusts_code` is for vLLM alone; see `vllm_command`, and what it raises.
    """
    env = quiet_environment() | offline_environment() | {"HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    # The server has another working folder, and the kit may not be installed.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))
    flags = ["--host", HOST, "--port", str(port), *(["--trust-remote-code"] if trusts_code else [])]
    if server == "vllm":
        command = vllm_command(
            folder, name=name, adapter=adapter, tokenizer=tokenizer, generation=generation,
            max_model_len=max_model_len, has_gpu=has_gpu, is_gated=is_gated,
        )  # fmt: skip
        env |= ENVIRONMENT | {gate.SERVED: name} | ({} if has_gpu else small_machine_environment())
        return Launch((*command, *flags), env)
    # -P: do not import from the working folder.
    module = ["-m", "sftplay.export.chat_server", name]
    return Launch((sys.executable, "-P", *module, *flags), env | {"HF_HUB_CACHE": str(folder)})


def end_with_this_process(session: int) -> subprocess.Popen[bytes]:
    """Start a process that kills this session when this process dies, by whatever signal.

    Linux kills the server itself then (`popen_tied`), but vLLM's engine would live on without its server.
    """
    code = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"  # the pipe's other end is closed
    quiet = subprocess.DEVNULL
    words = [sys.executable, "-I", "-S", "-c", code, str(session)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)


@contextmanager
def server_process(launch: Launch, *, cwd: Path, log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server whose lines go to `log_file`. When the block ends it has `STOP_S` seconds to do so too; then
    nothing that it has started is left, and nor is it where this process is killed.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as handle:
        process = popen_tied(launch.argv, output=handle, env=launch.env, cwd=cwd)
        guard = end_with_this_process(process.pid)
        try:
            yield process
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):  # vLLM's engine and workers are in its session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            guard.kill()
            guard.communicate()


def run_server(launch: Launch, name: str, *, port: int, cwd: Path, log_file: Path) -> int:
    """Start the server, report when it answers, and wait until it is stopped; return 128 + the signal's number.

    The first stop signal lets answers finish for `STOP_S` seconds, the second ends at once; the server does not
    outlive this process. Raise RunError where it ended by itself; the error holds its last lines.
    """
    stopper = Forwarder(lambda process, _: process.terminate(), at_second=lambda process: process.kill())
    with stopper.installed(), server_process(launch, cwd=cwd, log_file=log_file) as process:
        stopper.attach(process)
        deadline = time.monotonic() + START_S
        while process.poll() is None and not stopper.received and not answers(port, within_s=1.0):
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.1)
        if not stopper.received and process.poll() is None:
            key = f", API key from {gate.TOKEN}" if os.environ.get(gate.TOKEN) else ""
            log.say(f"http://{HOST}:{port}/v1 answers, model {name!r}{key}; Ctrl-C stops it", "serve")
        while process.poll() is None and not stopper.received:
            time.sleep(0.1)
    if not stopper.received:
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        # vLLM ends with what its outermost process says of the engine's end.
        cause = [line for line in lines[:-15] if re.search(r"\b[A-Z]\w*(Error|Exception): ", line)][:1]
        shown = [f"  {line}" for line in cause + lines[-15:]]
        what = "\n".join([f"the server ended with code {process.returncode}:", *shown])
        raise RunError(what, where=str(log_file), fix="read that log")
    log.say("stopped", "serve")
    return 128 + stopper.received[0]
