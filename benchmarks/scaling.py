"""Tokens a second with more and more processes: the same config in real launches, and what each process more brings.

    make bench-scaling NPROC=1,2
    make bench-scaling NPROC=1,2,4,8 CONFIG=configs/run_lora.yaml WEAK=1

Strong scaling, the usual case: the effective batch stays, so that more processes do the same steps sooner. Weak
(`--weak`): it grows with them, so that each keeps its share. Efficiency is the tokens a second of N processes over N
times those of one. The first steps of a run, in which everything is allocated, are not counted; of the others the
median counts. Without a GPU every process has as many threads as there are cores for it in the largest launch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "run_demo.yaml"

NOT_COUNTED = 2
"""Steps before a run has its pace."""

BEYOND = 1_000_000
"""A step that no run here reaches."""


@dataclass(frozen=True)
class Measured:
    """One launch."""

    processes: int
    effective_batch_size: int
    tokens_per_s: float
    step_s: float
    exposed_communication_share: float


def main() -> int:
    """Launch with each number of processes in turn, and print a Markdown table or, with --json, one document."""
    options = parse_options()
    from sftplay.config.load import load_config
    from sftplay.machine.probe import probe

    machine = probe()
    effective = load_config(options.config, options.overrides).train.effective_batch_size
    threads = max(1, machine.cores // max(options.nproc))
    results = []
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        for processes in options.nproc:
            rows = effective * processes if options.weak else effective
            results.append(launch((processes, rows), Path(name), options, threads))
            print(f"{processes} processes: {results[-1].tokens_per_s:.0f} tokens/s", file=sys.stderr)
    notes = describe_sharing(options.nproc, machine.cores, len(machine.gpus))
    if options.json:
        kind = "weak" if options.weak else "strong"
        rows_json = [{**asdict(each), "efficiency": efficiency(each, results)} for each in results]
        print(json.dumps({"scaling": kind, "config": str(options.config), "rows": rows_json, "notes": notes}))
        return 0
    device = machine.gpus[0].name if machine.gpus else f"{machine.cores} CPU cores"
    print(f"{platform.node()}: {device}, load {os.getloadavg()[0]:.1f}; {options.config}, {options.steps} steps\n")
    for line in (*as_table(results, is_weak=options.weak), "", *(f"Note: {note}." for note in notes)):
        print(line)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nproc", type=read_counts, default=(1, 2), help="numbers of processes, such as 1,2,4")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--weak", action="store_true", help="the effective batch grows with the processes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    options = parser.parse_args()
    if options.steps <= NOT_COUNTED:
        parser.error(f"--steps {options.steps}: the first {NOT_COUNTED} are not counted, so write more")
    return options


def read_counts(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers, each once, rising."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"not numbers of processes: {text!r} (write 1,2,4)")
    return tuple(sorted({int(word) for word in words}))


def launch(size: tuple[int, int], home: Path, options: argparse.Namespace, threads: int) -> Measured:
    """Train with so many processes and rows a step, as a user does, and read what the run says of itself."""
    processes, effective = size
    values = {
        "run_name": f"nproc-{processes}", "output_dir": home, "train.max_steps": options.steps,
        "train.effective_batch_size": effective, "train.eval_steps": BEYOND, "train.save_steps": BEYOND,
        "logging.steps": 1, "logging.backend": "none", "eval.before": "false", "eval.after": "false",
    }  # fmt: skip
    argv = [sys.executable, "-m", "sftplay", "train", "--nproc", str(processes), "--config", str(options.config)]
    argv += [*options.overrides, *(f"{key}={value}" for key, value in values.items())]
    env = {"OMP_NUM_THREADS": str(threads), **os.environ}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise SystemExit(f"{processes} processes ended with code {done.returncode}:\n{said}")
    metrics = (home / f"nproc-{processes}" / "metrics.jsonl").read_text().splitlines()
    return measure(processes, effective, [json.loads(line) for line in metrics])


def measure(processes: int, effective: int, lines: Sequence[dict[str, Any]]) -> Measured:
    """Medians of a run's metrics, a line a step: what else the machine does meets single steps."""
    keys = ("tokens_per_s", "step_s", "exposed_communication_share")
    return Measured(
        processes, effective, *(statistics.median(line[key] for line in lines[NOT_COUNTED:]) for key in keys)
    )


def efficiency(one: Measured, results: Sequence[Measured]) -> float | None:
    """Tokens a second over N times those of one process; None where one process was not measured."""
    alone = next((each.tokens_per_s for each in results if each.processes == 1), None)
    return one.tokens_per_s / (one.processes * alone) if alone else None


def as_table(results: Sequence[Measured], *, is_weak: bool) -> list[str]:
    """Markdown: a line for each launch, the kind of scaling above them."""
    kind = "Weak scaling: the effective batch grows with the processes." if is_weak else (
        "Strong scaling: the effective batch stays, whatever the number of processes."
    )  # fmt: skip
    lines = [kind, "", "| processes | effective batch | tokens/s | step s | efficiency | exposed communication |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for each in results:
        reached = efficiency(each, results)
        figures = (
            f"{each.tokens_per_s:,.0f}",
            f"{each.step_s:.3f}",
            f"{reached:.0%}" if reached is not None else "-",
            f"{each.exposed_communication_share:.1%}",
        )
        lines.append(f"| {each.processes} | {each.effective_batch_size} | {' | '.join(figures)} |")
    return lines


def describe_sharing(counts: Sequence[int], cores: int, gpus: int) -> list[str]:
    """What keeps the figures from saying what more devices bring; empty where nothing does."""
    most = max(counts)
    if gpus or most == 1:
        return []
    if most > cores:
        return [f"{most} processes share {cores} cores: more of them than cores cannot be faster"]
    return [
        f"processes of one machine share its memory and caches; each has {cores // most} of {cores} cores here, unless"
        " OMP_NUM_THREADS says otherwise, so that one process alone leaves the others idle"
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
