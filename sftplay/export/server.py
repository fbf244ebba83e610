"""The command of an OpenAI-compatible server on this machine, vLLM's among them; and its run from start to stop.

It knows nothing of runs and loads no model; it serves a given folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sftplay import log
from sftplay.atomic import read_object
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export import gate
from sftplay.launch.command import Launch, offline_environment, quiet_environment
from sftplay.launch.generation_server import answers
from sftplay.machine.gpu import ram_free_bytes, usable_cores
from sftplay.machine.ports import HOST, free_port
from sftplay.places import ROOT, find_python
from sftplay.signals import Forwarder, popen_tied

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig


MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""The server without `vllm serve`, whose other commands make a start longer (vLLM 0.31)."""

BASE = "-base"
"""Ends the name of the base next to an adapter; vLLM needs a name for it, which the gate does not list."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank (vLLM 0.31, config/lora.py, `MaxLoRARanks`)."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_API_KEY": "",  # the gate asks for the kit's own token
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "False",
}
"""Nothing is reported, and no variable of the user opens more of vLLM."""

FORKED_MODULE = "sftplay.export.forked_vllm"

SMALL_MACHINE_CORES = 8

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of heads that vLLM 0.31 computes with on a CPU (backends/cpu_attn.py, `get_supported_head_sizes`)."""

SEQUENCES, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 16, 2**28, 4 * 2**30
"""Without a GPU the cache of keys and values takes memory, and its zeros time, from the start on."""


def find_lora_rank(adapter: Path) -> int:
    """Return the adapter's rank. Raise ConfigError where vLLM would serve it wrongly, or not at all."""
    config = read_object(adapter / "adapter_config.json")
    unsupported = {
        "use_dora": "it is a DoRA",
        "modules_to_save": "it holds modules that were trained in full",
        "trainable_token_indices": "it trains rows of new tokens",
        "rank_pattern": "its layers have several ranks",
        "alpha_pattern": "its layers have several scales",
        "lora_bias": "it has biases",
    }
    found = [why for key, why in unsupported.items() if config.get(key)]
    found += ["it has biases"] if config.get("bias", "none") != "none" else []
    rank = config.get("r", 0)
    found += [f"its rank is {rank}"] if not 0 < rank <= RANKS[-1] else []
    if found:
        what = f"vLLM cannot serve this adapter unmerged: {', '.join(found)}"
        raise ConfigError(what, where=str(adapter), fix="leave --weights out, and the merged model is served")
    return int(rank)


def find_dtype(folder: Path, *, has_gpu: bool) -> str:
    """Return the dtype of the model in `folder`; float32 on a CPU without bf16, which would compute it in software."""
    config = read_object(folder / "config.json")
    text = config.get("text_config") or {}
    stored = next((part[key] for part in (config, text) for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if not has_gpu and not cpu_has_bf16():
        return "float32"
    return str(stored) if stored in ("float32", "float16", "bfloat16") else "auto"


def cpu_dtype(cfg: RunConfig) -> str:
    """Return the dtype in which vLLM samples for a trainer without a GPU: that in which the trainer computes."""
    return "bfloat16" if cfg.train.precision == "bf16" else "float32"


def cpu_has_bf16() -> bool:
    """Return whether this machine's CPU computes bf16 itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(text.split())


def server_module(*, has_gpu: bool) -> str:
    """Return the module that vLLM's Python runs as the server. The user's own settings of its processes stay."""
    is_free = not has_gpu and {"VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING"}.isdisjoint(os.environ)
    return FORKED_MODULE if is_free and usable_cores() <= SMALL_MACHINE_CORES else MODULE


def small_machine_environment() -> dict[str, str]:
    """Lets a CPU of few cores compute inside the engine's process, and not in a third one whose threads are bound to
    all cores but one. A start took 31 CPU seconds instead of 49, and 0.7 GB less. The user's own settings stay.
    """
    cores = usable_cores()
    if cores > SMALL_MACHINE_CORES:
        return {}
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(cores)}
    return {key: value for key, value in settings.items() if key not in os.environ}


def check_heads(folder: Path) -> None:
    """Raise MachineError where vLLM's attention on a CPU does not know the width of the model's heads: the server would
    start, and end at the first request.
    """
    config = read_object(folder / "config.json")
    width = find_head_width(config.get("text_config") or config)
    if width and width not in CPU_HEADS:
        what = (
            f"vLLM computes on a CPU with heads of {', '.join(map(str, CPU_HEADS))}, and this model's are {width} wide"
        )
        raise MachineError(what, where=str(folder), fix="ENGINE=transformers")


def find_head_width(config: Mapping[str, Any]) -> int:
    """Return the width of a head by config.json, 0 where it does not say."""
    heads = config.get("num_attention_heads") or 0
    return int(config.get("head_dim") or (config.get("hidden_size") or 0) // max(heads, 1))


def find_cache_bytes(folder: Path, max_model_len: int | None) -> int:
    """Return the size of the cache of keys and values on a machine without a GPU: SEQUENCES of the longest, in fp32."""
    config = read_object(folder / "config.json")
    config = config.get("text_config") or config
    heads, width = config.get("num_attention_heads") or 0, find_head_width(config)
    layers, kv_heads = config.get("num_hidden_layers") or 0, config.get("num_key_value_heads") or heads
    tokens = max_model_len or config.get("max_position_embeddings") or 0
    wanted = 2 * 4 * layers * kv_heads * width * tokens * SEQUENCES
    return max(LEAST_CACHE_BYTES, min(wanted or MOST_CACHE_BYTES, MOST_CACHE_BYTES, ram_free_bytes() // 4))


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
    """Return the command of a server for the model `name` in `folder`, and its environment.

    `folder` is the model's own for vLLM; for transformers a hub cache (see `serve`), since its server lists hub names.
    What follows `trusts_code` is for vLLM alone. With `adapter`, that adapter on the base in `folder` answers as
    `name`, and the base as `name` + BASE. `tokenizer` is a folder with tokenizer and chat template, `generation` one
    with generation_config.json; None takes the model's. `max_model_len` None takes the model's own, or what the memory
    holds. `is_gated` False leaves every endpoint of vLLM open.

    Raises:
        ConfigError: vLLM cannot serve such an adapter without a merge.
        MachineError: there is no environment with vLLM, or its attention on a CPU does not know the model's heads.
    """
    env = quiet_environment() | offline_environment() | {"HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    # The server has another working folder, and the kit may not be installed.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))
    flags = ["--host", HOST, "--port", str(port), *(["--trust-remote-code"] if trusts_code else [])]
    if server != "vllm":
        # -P: do not import from the working folder.
        module = ["-m", "sftplay.export.chat_server", name]
        return Launch((sys.executable, "-P", *module, *flags), env | {"HF_HUB_CACHE": str(folder)})
    python = find_python()
    if python is None:
        raise MachineError("vLLM is not installed", where=".venv-vllm", fix="make install-vllm")
    if not has_gpu:
        check_heads(folder)
    folder, adapter = folder.absolute(), adapter and adapter.absolute()
    words_from = (tokenizer or folder).absolute()
    served = ["--served-model-name", name]
    if adapter:
        rank = next(rank for rank in RANKS if rank >= find_lora_rank(adapter))
        served = ["--served-model-name", name + BASE, "--enable-lora", "--lora-modules", f"{name}={adapter}"]
        served += ["--max-lora-rank", str(rank)]
    served += ["--tokenizer", str(words_from), "--generation-config", str((generation or folder).absolute())]
    template = words_from / "chat_template.jinja"
    served += ["--chat-template", str(template)] if template.is_file() else []
    served += ["--max-model-len", str(max_model_len or -1), "--language-model-only"]
    served += ["--dtype", find_dtype(folder, has_gpu=has_gpu)]
    served += (
        [] if has_gpu else ["--enforce-eager", "--kv-cache-memory-bytes", str(find_cache_bytes(folder, max_model_len))]
    )
    served += ["--middleware", f"{gate.__name__}.Gate"] if is_gated else []
    env |= ENVIRONMENT | {gate.SERVED: name} | ({} if has_gpu else small_machine_environment())
    return Launch(
        (str(python), "-P", "-m", server_module(has_gpu=has_gpu), "--model", str(folder), *served, *flags), env
    )


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
        with suppress(OSError):  # by this another server sees that the file is taken
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
