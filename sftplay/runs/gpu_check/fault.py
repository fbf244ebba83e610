"""Plants a fault in the worker of a run from outside: a signal after a step, or a cap on its GPU's memory.

`environment` gives the variables with which Python loads it in every process that is started; only a worker obeys. The
run's own code does not know of it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sftplay.launch.command import WORKER
from sftplay.places import ROOT

FAULT = "SFTPLAY_GPU_CHECK_FAULT"


def environment(folder: Path, kind: Literal["kill", "term", "cap"], *, step: int) -> dict[str, str]:
    """Return variables for a launch whose worker meets the fault after its optimizer step `step`.

    `folder` gets the hook.
    """
    hooks = folder / "fault"
    hooks.mkdir(exist_ok=True)
    text = "from sftplay.runs.gpu_check.fault import obey\n\nobey()\n"
    (hooks / "sitecustomize.py").write_text(text, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(hooks), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, FAULT: f"{kind} {step}"}


def obey() -> None:
    """In a worker whose environment asks for it, wait for the step."""
    if FAULT not in os.environ or WORKER not in sys.orig_argv:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    kind, step = os.environ[FAULT].split()
    done = 0

    def after_step(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == int(step):
            FAULTS[kind]()

    register_optimizer_step_post_hook(after_step)


def cap_memory() -> None:
    """Leave this process too little of its GPU for a micro-batch like those before, and enough for half of it."""
    from torch import cuda

    room = cuda.max_memory_allocated() - cuda.memory_allocated()
    cuda.empty_cache()
    total = cuda.get_device_properties(cuda.current_device()).total_memory
    # 0.7 of what a step takes on top of what stays: a whole micro-batch does not fit, half of it does.
    cuda.set_per_process_memory_fraction((cuda.memory_reserved() + 0.7 * room) / total)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "cap": cap_memory,
}
