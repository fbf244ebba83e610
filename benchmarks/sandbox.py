"""Programs a second in a box, and what a box adds to the start of a plain process. `make bench-sandbox` runs it.

A program is a small function with three tests of the form `assert f(literals) == literal`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sftplay.sandbox.boxes.executors import PlainProcess, interpreter
from sftplay.sandbox.boxes.job import Job
from sftplay.sandbox.boxes.judge import judge
from sftplay.sandbox.pool import SAFE, WARM, find_problem

CODE = "import re, math, collections\ndef f(x):\n    return math.prod(range(1, x + 1)) + {n}"

TESTS = ("assert f(3) == {a}", "assert f(4) == {b}", "assert f(0) == {c}")


def job(n: int) -> Job:
    values = {"a": 6 + n, "b": 24 + n, "c": 1 + n}
    return Job(code=CODE.format(n=n), tests=tuple(test.format(**values) for test in TESTS))


def run_plainly(work: Job) -> None:
    """What everybody does: a process with the program and its tests in one file. It isolates nothing."""
    source = "\n".join((work.code, *work.tests))
    subprocess.run([str(interpreter()), "-I", "-S", "-c", source], check=True, capture_output=True, timeout=60)


def in_boxes(make: Callable) -> Callable[[], tuple[Callable[[Job], None], Callable[[], None]]]:
    def open_it() -> tuple[Callable[[Job], None], Callable[[], None]]:
        executor = make()

        def run(work: Job) -> None:
            verdict = judge(work, executor)
            assert verdict.status == "ok", verdict

        return run, executor.close

    return open_it


def kinds() -> dict[str, Callable[[], tuple[Callable[[Job], None], Callable[[], None]]]]:
    """Name -> what gives a function that runs a job, and one that ends what it keeps."""
    found = {"plain subprocess": lambda: (run_plainly, lambda: None), "none": in_boxes(PlainProcess)}
    found |= {name: in_boxes(make) for name, make in SAFE.items() if not find_problem(name)}
    return found | {
        f"{name}, warm": in_boxes(make) for name, make in WARM.items() if not find_problem(name, is_warm=True)
    }


def measure(open_it: Callable, *, count: int, workers: int) -> dict[str, float]:
    """Milliseconds for one program alone, and programs a second with several workers."""
    run, close = open_it()
    run(job(0))
    alone = []
    for n in range(count):
        started = time.perf_counter()
        run(job(n))
        alone.append((time.perf_counter() - started) * 1000)
    close()
    opened = [open_it() for _ in range(workers)]
    for run, _ in opened:
        run(job(0))
    started = time.perf_counter()
    with ThreadPoolExecutor(workers) as threads:
        parts = [threads.submit(lambda run=run: [run(job(n)) for n in range(count)]) for run, _ in opened]
        for part in parts:
            part.result()
    seconds = time.perf_counter() - started
    for _, close in opened:
        close()
    cuts = quantiles(alone, n=10)
    return {"p50_ms": cuts[4], "p90_ms": cuts[8], "min_ms": min(alone), "per_s": workers * count / seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    rows = {name: measure(open_it, count=args.count, workers=args.workers) for name, open_it in kinds().items()}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.count} programs, {args.workers} workers\n")
    print("| boxes | one alone, p50 (p90) ms | least ms | a second, several at once |")
    print("| --- | --- | --- | --- |")
    for name, row in rows.items():
        cells = f"{row['p50_ms']:.1f} ({row['p90_ms']:.1f}) | {row['min_ms']:.1f}"
        print(f"| {name} | {cells} | {row['per_s']:.0f} |")


if __name__ == "__main__":
    main()
