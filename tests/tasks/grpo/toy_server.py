"""A vLLM server for GRPO on a CPU, as docs/grpo.md has users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from processes import HANG_S, wait_until

from sftplay.export.server import end_with_this_process
from sftplay.launch.generation_server import answers
from sftplay.machine.ports import free_port
from sftplay.places import find_vllm_python
from sftplay.signals import popen_tied

ROOT = Path(__file__).resolve().parents[3]
FEW_CORES = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def documented_command() -> str:
    """What docs/grpo.md tells users to type."""
    text = (ROOT / "docs/grpo.md").read_text()
    found = re.search(r"^    env VLLM_SERVER_DEV_MODE.*?max-lora-rank 32$", text, re.M | re.S)
    assert found
    return found[0]


@contextmanager
def served(home: Path, model: Path, *more: str) -> Iterator[tuple[str, int]]:
    """Inside, a server of the model answers; its address and pid."""
    port = free_port(0)
    values = {"MODEL": str(model), "8000": str(port), "PYTHONPATH=": f"PYTHONPATH={Path(__file__).parent}:"}
    command = documented_command()
    for word, value in values.items():
        command = command.replace(word, value)
    with (home / "server.log").open("wb") as log:
        process = popen_tied(["bash", "-c", " ".join(["exec", command, *more])], output=log, env=FEW_CORES, cwd=ROOT)
    guard = end_with_this_process(process.pid)
    try:
        wait_until(lambda: process.poll() is not None or answers(port, within_s=5))
        assert process.poll() is None, (home / "server.log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        guard.kill()
        guard.communicate()


def run_by_vllm_python(module: str, home: Path, *words: str) -> Any:
    """What `main` of a module in this folder leaves in HOME/found.json.

    A script would be imported again, torch with it, by each process that a training spawns for its rewards.
    """
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
    env = {**os.environ, **FEW_CORES, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    code = f"import sys; from {module} import main; main(*sys.argv[1:])"
    argv = [str(find_vllm_python()), "-c", code, str(home), *words]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=3 * HANG_S, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads((home / "found.json").read_text())
