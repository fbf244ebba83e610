"""The verbs about this machine and this repository."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.machine.probe import probe
from sftplay.units import format_bytes

CHECKS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))


def gpu_info(args: Namespace) -> int:
    """`gpu-info`: GPUs, or why there are none, memory, cores, library versions."""
    machine = probe()
    if args.json:
        print(json.dumps({"n_gpus": len(machine.gpus), **machine.as_dict()}))
        return 0
    log.show(f"Number of GPUs: {len(machine.gpus)}")
    if not machine.gpus:
        log.show(f"  none: {machine.gpu_reason}")
    for gpu in machine.gpus:
        kinds = "bf16, fp16" if gpu.has_bf16 else "fp16"
        total, free = format_bytes(gpu.total_bytes), format_bytes(gpu.free_bytes)
        log.show(f"  GPU {gpu.index}: {gpu.name}, {total}, {free} free, {kinds}")
    log.show(f"CPU cores: {machine.cores}, memory: {format_bytes(machine.ram_bytes)}, {machine.system}")
    log.show(f"Python {machine.python}, " + ", ".join(f"{name} {v}" for name, v in machine.libraries.items()))
    log.show(f"unsloth: {'not usable, ' + machine.unsloth_problem if machine.unsloth_problem else 'usable'}")
    return 0


def check(args: Namespace) -> int:
    """`check`: ruff's lint and format and mypy over this repository; the first failure's code, 0 for none."""
    root = Path(__file__).resolve().parents[2]
    failed = [
        " ".join(c) for c in CHECKS if subprocess.run([sys.executable, "-m", *c], cwd=root, check=False).returncode
    ]
    if failed:
        log.say(f"failed: {', '.join(failed)}", "check")
        return 1
    log.say("lint, format and types are clean", "check")
    return 0
