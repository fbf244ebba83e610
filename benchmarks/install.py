"""Seconds from a fresh clone to the demo's last line, by uv and by pip, and again with the environment there.

    make bench-install ARGS="--tools uv"

The clone is of this repository's last commit. What pip and uv have in their caches stays: the first round of a tool may
fetch, the second one does not. For a round from nothing, empty the caches (`pip cache purge`, `uv cache clean`).
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST_LINE = re.compile(r"demo: exact match .* in (\d+) s")


def main() -> int:
    """Run every tool's rounds in turn and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default="uv,pip")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    tools = [tool for tool in args.tools.split(",") if tool == "pip" or shutil.which(tool)]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}\n")
    print(
        "| by | package cache | install s (processor s) | demo s | clone to last line s | demo again s | exact match |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tool in tools:
        for number in range(args.rounds):
            cache = "as found" if not number else "warm"
            with tempfile.TemporaryDirectory(prefix="clone-") as folder:
                print(f"| {tool} | {cache} | {measure(Path(folder) / 'sft-play', tool)} |", flush=True)
    return 0


def measure(clone: Path, tool: str) -> str:
    """The cells of one round: clone, install, demo, demo."""
    began = time.perf_counter()
    run(["git", "clone", "--quiet", str(ROOT), str(clone)], ROOT)
    install_s, processor_s, _ = run(["make", "install", f"INSTALLER={tool}", f"PYTHON={sys.executable}"], clone)
    demo_s, _, said = run(["make", "demo"], clone)
    whole_s = time.perf_counter() - began
    again_s, _, said = run(["make", "demo"], clone)
    last = said.strip().splitlines()[-1]
    if not LAST_LINE.fullmatch(last):
        raise SystemExit(f"the demo ended with {last!r}")
    scores = last.partition("exact match ")[2].partition(" on")[0]
    return f"{install_s:.0f} ({processor_s:.0f}) | {demo_s:.0f} | {whole_s:.0f} | {again_s:.0f} | {scores}"


def run(argv: list[str], folder: Path) -> tuple[float, float, str]:
    """Wall and processor seconds of a command and what it printed; ends the benchmark where it fails."""
    # Neither the settings of the make that started this, nor a Python that is told to compile everything anew.
    hidden = ("MAKE", "TYPED_", "PYTHONDONTWRITEBYTECODE", "MFLAGS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    taken, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return taken, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
