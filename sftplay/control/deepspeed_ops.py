"""DeepSpeed's operators, built once and aloud before workers need them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from sftplay import log
from sftplay.errors import MachineError
from sftplay.launch.command.strategy import build_environment
from sftplay.machine.doctor.system import look_at_builds

OPERATORS = {"ShareMemCommBuilder": "deepspeed_shm_comm", "CPUAdamBuilder": "cpu_adam"}
"""DeepSpeed's builder -> the folder and library it makes."""


_BUILD = """
import sys
from deepspeed.accelerator import get_accelerator
for name in sys.argv[1:]:
    get_accelerator().create_op_builder(name).load()
"""


def prebuild_deepspeed_ops(*, has_gpu: bool, offloads: bool) -> None:
    """Build, once and aloud, what workers would else build in silence and all at the same time at their start.

    On a CPU that is the communication between processes; `offloads` adds the optimizer that runs on the host.

    Raises:
        MachineError: DeepSpeed is not installed, a killed build left a lock, or the compiler failed.
    """
    wanted = [*(() if has_gpu else ("ShareMemCommBuilder",)), *(("CPUAdamBuilder",) if offloads else ())]
    if find_spec("deepspeed") is None:
        raise MachineError("is not installed", where="deepspeed", fix="make install EXTRAS=deepspeed")
    for finding in look_at_builds():
        if finding.level == "warn":
            raise MachineError(finding.what, where="deepspeed", fix=finding.fix)
    env = build_environment(has_gpu=has_gpu)
    folder = Path(env["TORCH_EXTENSIONS_DIR"])
    missing = [name for name in wanted if not (folder / OPERATORS[name] / f"{OPERATORS[name]}.so").exists()]
    if not missing:
        return
    names = " and ".join("CPU communication" if name == "ShareMemCommBuilder" else "CPU optimizer" for name in missing)
    log.say(f"building DeepSpeed's {names}, about 2 min each, once", "deepspeed")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, *missing], env=os.environ | env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        problem = next(
            (line.strip() for line in said if "error" in line.lower()), said[-1] if said else "no reason given"
        )
        fix = "apt install g++ (Debian, Ubuntu), or cluster.strategy: ddp"
        raise MachineError(f"its operators cannot be built: {problem}", where="deepspeed", fix=fix)
    log.say(f"built in {time.monotonic() - started:.0f} s, kept in {folder}", "deepspeed")
