"""Seconds until the commands that need no torch have answered, beside an import of torch.

    make bench-startup ARGS="--rounds 5"

Every call is a process of its own, as a user starts it; the median of the rounds counts. Calls take turns, so that
what else the machine does meets all of them alike; processor seconds hardly depend on it. The disk's cache is warm: the
first round is not counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLANNED = ROOT / "configs" / "run_gemma27b_distributed.yaml"

GOALS_S = {"gpu-info": 0.3, "memory-check": 0.3, "doctor --fast": 0.5, "plan": 0.5}
"""What the kit promises on two quiet cores."""


def main() -> int:
    """Time every command `--rounds` times and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    commands = available_commands()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, argv in commands.items():
            taken = run_once(argv)
            seconds[name] += [taken] if number else []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}, {rounds} rounds\n")
    print("| command | median s | fastest s | processor s | goal s |")
    print("| --- | --- | --- | --- | --- |")
    for name, taken in seconds.items():
        wall, processor = zip(*taken)
        goal = f"{GOALS_S[name]:g}" if name in GOALS_S else "-"
        figures = (statistics.median(wall), min(wall), statistics.median(processor))
        print(f"| `{name}` | " + " | ".join(f"{each:.2f}" for each in figures) + f" | {goal} |")
    return 0


def available_commands() -> dict[str, list[str]]:
    """Name -> argv; commands this version does not have are left out."""
    from sftplay.cli import VERBS

    kit = [sys.executable, "-m", "sftplay"]
    commands = {
        "gpu-info": [*kit, "gpu-info"],
        "memory-check": [*kit, "memory-check"],
        "doctor --fast": [*kit, "doctor", "--fast"],
        "plan": [*kit, "plan", "--config", str(PLANNED), "--gpus", "2xH200"],
    }
    known = {name: argv for name, argv in commands.items() if name.split()[0] in VERBS}
    return {**known, "python -c 'import torch'": [sys.executable, "-c", "import torch"]}


def run_once(argv: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one process from its start to its end; what it prints is thrown away."""
    began, used = time.perf_counter(), processor_s()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
    taken = time.perf_counter() - began, processor_s() - used
    if done.returncode not in (0, 3):  # 3: the doctor found something, or the plan does not fit
        raise SystemExit(f"{' '.join(argv)} ended with code {done.returncode}:\n{done.stderr.decode()[-2000:]}")
    return taken


def processor_s() -> float:
    """Processor seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
