"""Task hrm beside a plain script of the published training step, in one alternating run. `make bench-hrm` runs it.

Both train the same model on the same 4x4 Sudokus on this CPU, with the published step: two forward passes (the second
for the targets of the halting values), stablemax in float64, AdamW, and the sign-SGD of the puzzle embeddings. Counted
are puzzles a second: by the median time of a step, and by all CPU seconds of training over its steps, which hardly
change when the machine is shared. Ours has in them what a run does beside: order of the rows, metrics, a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.overhead import cpu_name
from sftplay.config.load import load_config, load_resolved
from sftplay.tasks.hrm.plan import GridSize, PuzzleShape
from sftplay.tasks.hrm.puzzles.sampler import open_split

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "run_hrm_sudoku4.yaml"
SHAPES = {
    "tiny": ["hrm.grad=one_step", "hrm.ema=null", "hrm.q_continue=true", "hrm.loss_precision=fp64"],
    "middle": [
        "hrm.grad=one_step", "hrm.ema=null", "hrm.q_continue=true", "hrm.loss_precision=fp64",
        "hrm.hidden_size=128",
        "hrm.h_layers=2", "hrm.l_layers=2",
        "hrm.n_supervision=8", "hrm.positions=rope",
    ],
}  # fmt: skip
"""What is changed of the shipped config. The tiny one is its model, of 108 thousand weights."""


def main() -> int:
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    print(
        f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, {options.threads} thread(s), "
        f"load {os.getloadavg()[0]:.1f}, torch {version('torch')}, transformers {version('transformers')}"
    )
    if options.only != "runs":
        show_steps(options)
    if options.only == "steps":
        return 0
    print(f"{options.steps} steps of 64 puzzles, medians of the steps of {options.rounds} runs each; in brackets the")
    print("slowest and the fastest run\n")
    print("| model | path | puzzles/s | puzzles per CPU second | ms a step | CPU seconds beside the plain script |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            print(compare(Path(name), shape, options=options), flush=True)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["steps", "runs"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    return parser.parse_args()


def show_steps(options: argparse.Namespace) -> None:
    """The table of the step alone."""
    from benchmarks.hrm_steps import compare_steps  # brings torch

    print("The step alone, both in turn in one process, medians of 40 steps\n")
    print("| model | path | puzzles/s | ms a step | CPU ms a step | CPU time beside the plain script |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in options.shapes:
        found = compare_steps(load_config(CONFIG, SHAPES[shape]).hrm, steps=40)
        for name, (wall, cpu) in found.items():
            ratio = found["plain script"][1] / cpu
            print(
                f"| {shape} | {name} | {64 / wall:.0f} | {1000 * wall:.1f} | {1000 * cpu:.1f} | {ratio:.2f}x |",
                flush=True,
            )
    print()


def compare(work: Path, shape: str, *, options: argparse.Namespace) -> str:
    """The rows of one model."""
    found: dict[str, list[tuple[float, float]]] = {"SFT-Play": [], "plain script": []}
    weights = 0
    for n in range(options.rounds):
        ours = run_ours(work / f"ours-{n}", shape, steps=options.steps)
        found["SFT-Play"].append(ours)
        plain, weights = run_plain(work / f"plain-{n}", like=work / f"ours-{n}" / "run", steps=options.steps)
        found["plain script"].append(plain)
        print(f"{shape} round {n + 1}/{options.rounds}", file=sys.stderr)
    step_s = {name: median(each[0] for each in runs) for name, runs in found.items()}
    lines = []
    for name, runs in found.items():
        walls = [64 / wall for wall, _ in runs]
        cpu = median(64 / cpu for _, cpu in runs)
        rate = f"{64 / step_s[name]:.0f} ({min(walls):.0f} to {max(walls):.0f})"
        ratio = median(each[1] for each in found["plain script"]) / median(each[1] for each in runs)
        lines.append(
            f"| {shape}, {weights / 1000:.0f}K weights | {name} | {rate} | {cpu:.0f} | {1000 * step_s[name]:.1f} | "
            f"{ratio:.2f}x |"
        )
    return "\n".join(lines)


def run_ours(home: Path, shape: str, *, steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of a step, by the user's command."""
    given = ["run_name=run", f"output_dir={home}", f"train.max_steps={steps}", "logging.steps=10"]
    given += ["logging.backend=none", f"train.eval_steps={2 * steps}", f"train.save_steps={2 * steps}"]
    given += ["hrm.eval_limit=1"]  # the measurement at the end is no part of training
    run([sys.executable, "-m", "sftplay", "train", "--config", str(CONFIG), *given, *SHAPES[shape]])
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    status = json.loads((home / "run" / "status.json").read_text())
    return median(line["step_s"] for line in lines[1:]), status["train_cpu_seconds"] / steps


def run_plain(home: Path, *, like: Path, steps: int) -> tuple[tuple[float, float], int]:
    """The same of the plain script, with the settings of the run in `like`; and its weights."""
    home.mkdir(parents=True)
    cfg = load_resolved(like / "config.resolved.yaml")
    puzzles = open_split(cfg.rows_path, "train", key="data.train_path")
    (folder, rows) = puzzles.path, puzzles.sets[0].name
    shape = PuzzleShape(cfg.hrm, GridSize(cells=puzzles.facts.seq_len, words=puzzles.facts.vocab_size, identifiers=1))
    names = ("hidden_size", "num_heads", "expansion", "h_layers", "l_layers", "h_cycles", "l_cycles", "positions",
             "q_continue", "halt_exploration", "puzzle_emb_lr", "puzzle_emb_weight_decay")  # fmt: skip
    job = {
        **{name: getattr(cfg.hrm, name) for name in names},
        "multiple": 32, "vocab_size": puzzles.facts.vocab_size, "seq_len": puzzles.facts.seq_len,
        "puzzle_emb_dim": cfg.hrm.embedding_size, "num_puzzle_identifiers": 1, "halt_max": cfg.hrm.n_supervision,
        "learning_rate": cfg.train.learning_rate, "weight_decay": cfg.train.weight_decay,
        "batch": cfg.train.effective_batch_size, "seed": cfg.seed, "steps": steps, "out": str(home / "told.json"),
        "arrays": {"inputs": str(folder / f"{rows}__inputs.npy"), "labels": str(folder / f"{rows}__labels.npy"),
                   "ids": str(folder / f"{rows}__puzzle_identifiers.npy")},
    }  # fmt: skip
    (home / "job.json").write_text(json.dumps(job))
    run([sys.executable, str(ROOT / "benchmarks" / "plain_hrm.py"), str(home / "job.json")])
    told = json.loads((home / "told.json").read_text())
    assert told["weights"] == shape.weights  # both train the same model
    return (median(told["seconds"][5:]), sum(told["cpu_seconds"]) / steps), told["weights"]


def run(argv: list[str]) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{argv[1:5]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
