"""One config on one process and, by every strategy, on two: is it the same experiment?

    make bench-invariance ARGS="--modes full,lora --strategies ddp,zero2"
    make bench-invariance ARGS="--tasks dpo,kto,orpo --tolerance 4e-6"

Each case is the user's own command, launched for real: fp32 on CPUs, rows of which each learns 1 or about 200 tokens.
Losses of a step and final weights may differ by 1e-4 from those of one process, exact match by one prompt; else it ends
with 5. FSDP runs on CPUs only by the shim in `cpu_fsdp`; its cases say so. `--fault divisor` and `--fault averaging`
break the runs of two processes on purpose: the comparison must then fail.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.material import make_model  # noqa: E402

TOLERANCE = 1e-4
STEPS = 30
LEAST_FALL = 0.3
"""Share by which a loss must fall: a curve that stands still would be the same under any fault."""

SPREAD = 0.06
"""Of the model's weights: with transformers' usual 0.02 an adapter beside a random head cannot learn so much."""

RATES = {"full": 0.02, "lora": 0.1, "qlora": 0.1}
"""For plain gradient descent without clipping: AdamW makes of a gradient's last bits a share of the rate, and such
steps add up; and FSDP clips by torch's norm, which on a CPU is up to 5e-4 too small (`train/exact_batch.py`)."""

SCALES: dict[str, float] = {}
"""What the rate of a task is multiplied with."""

WORDS = ["river", "stone", "light", "boats", "salt", "hills"]
TARGET = Path("outputs") / "bench" / "invariance.json"


def main() -> int:
    """Run the cases, print a table, write the JSON; 0 when all curves are the same, else 5."""
    options = parse_options()
    cases = []
    with tempfile.TemporaryDirectory(prefix="invariance-") as name:
        work = Path(name)
        texts = write_rows(work / "rows.jsonl", "row") + write_rows(work / "held_out.jsonl", "line")
        make_model(work / "model", texts, spread=SPREAD)
        for task, mode in itertools.product(options.tasks, options.modes):
            for strategy in ("single", *options.strategies):
                cases.append(run_case(work, task, strategy, mode, options.fault))
                losses = cases[-1]["losses"]
                print(f"{task} {mode} {strategy}: {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
        problems, furthest = compare(cases, work, tolerance=options.tolerance)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps({"cases": cases, "max_abs_diff": furthest}, indent=1) + "\n")
    print(as_table(cases))
    print("\n".join(problems) or f"the same experiment: nothing differs by more than {furthest:.1e}")
    return 5 if problems else 0


def parse_options() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=["sft"], help="sft, dpo, kto, orpo ...")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of losses and weights")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["full", "lora", "qlora"])
    parser.add_argument(
        "--strategies", type=lambda text: text.split(","), default=["ddp", "fsdp", "zero1", "zero2", "zero3"]
    )
    parser.add_argument("--fault", choices=["divisor", "averaging"], help="break the runs of two processes on purpose")
    return parser.parse_args()


def write_rows(path: Path, what: str) -> list[str]:
    """Sixteen chats about a `what`, every other one with an answer of one word; all texts for a tokenizer. Beside them
    stand pairs with the same questions, in which the other answer has its words backwards."""
    lines, pairs, texts = [], [], []
    for n in range(16):
        words = [WORDS[(n + k) % len(WORDS)] for k in range(1 if n % 2 else 190)]
        asked, *answers = f"{what} {n}", " ".join(words), " ".join([*reversed(words), WORDS[n % 3]])
        prompt, *sides = [{"role": "user", "content": asked}], *({"role": "assistant", "content": a} for a in answers)
        lines.append({"messages": [*prompt, sides[0]]})
        pairs.append({"prompt": prompt, "chosen": [sides[0]], "rejected": [sides[1]]})
        texts += [asked, *answers]
    for file, rows in ((path, lines), (path.with_stem(f"{path.stem}_pairs"), pairs)):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return texts


def run_case(work: Path, task: str, strategy: str, mode: str, fault: str | None) -> dict[str, Any]:
    """Train one case by the user's command."""
    processes, name = (1 if strategy == "single" else 2), f"{task}-{mode}-{strategy}"
    kind = "" if task == "sft" else "_pairs"
    values = {
        "task_mode": task, "run_name": name, "output_dir": str(work),
        "model": {"name": str(work / "model"), "max_seq_len": 512},
        "tuning": {"mode": mode, "lora": {"r": 8}},
        "train": {"max_steps": STEPS, "effective_batch_size": 8, "batch_size": 2,
                  "learning_rate": RATES[mode] * SCALES.get(task, 1.0),
                  "warmup_ratio": 0.0, "gradient_checkpointing": False, "optim": "sgd", "max_grad_norm": 0.0,
                  "precision": "fp32"},
        "data": {"train_path": str(work / f"rows{kind}.jsonl"), "val_path": str(work / f"held_out{kind}.jsonl"),
                 "processed_dir": str(work / "processed")},
        "eval": {"after": True, "max_new_tokens": 8}, "logging": {"steps": 1, "backend": "none"},
        "cluster": {"strategy": "ddp" if strategy == "single" else strategy},
    }  # fmt: skip
    config = work / f"{name}.yaml"
    config.write_text(json.dumps(values))
    shims = [str(ROOT / "benchmarks" / "cpu_fsdp")] if strategy == "fsdp" else []
    shims += [str(ROOT / "benchmarks" / "broken")] if fault and processes > 1 else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(shims), "BROKEN": fault or "", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "sftplay", "train", "--config", str(config), "--nproc", str(processes)]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    run = work / name
    after = json.loads((run / "eval" / "after.json").read_text())
    return {
        "task": task,
        "strategy": strategy,
        "processes": processes,
        "mode": mode,
        "shimmed": strategy == "fsdp",
        "losses": [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()],
        "final_exact_match": after.get("exact_match", after.get("accuracy")),
        "ranks": [
            {key: rank[key] for key in ("pid", "distributed_type", "model_class", "world_size")}
            for rank in json.loads((run / "status.json").read_text())["ranks"]
        ],
    }


def compare(cases: list[dict[str, Any]], work: Path, *, tolerance: float) -> tuple[list[str], float]:
    """What differs from one process by more than may be, and the largest difference of all."""
    problems, furthest = [], 0.0
    alone = {(case["task"], case["mode"]): case for case in cases if case["strategy"] == "single"}
    for case in cases:
        kind = f"{case['task']}-{case['mode']}"
        name, one = f"{kind}-{case['strategy']}", alone[case["task"], case["mode"]]
        losses = max(abs(a - b) for a, b in zip(case["losses"], one["losses"], strict=True))
        weights = apart(work / name, work / f"{kind}-single")
        furthest = max(furthest, losses, weights)
        case |= {"max_loss_diff": losses, "max_weight_diff": weights}
        if losses > tolerance or weights > tolerance:
            problems.append(f"{name}: losses differ by {losses:.1e}, weights by {weights:.1e}")
        if abs(case["final_exact_match"] - one["final_exact_match"]) > 1 / 16 + 1e-9:
            problems.append(f"{name}: held out {case['final_exact_match']} beside {one['final_exact_match']}")
        if case["losses"][-1] > (1 - LEAST_FALL) * case["losses"][0]:
            problems.append(f"{name}: the loss fell too little for this to say anything")
    return problems, furthest


def apart(run: Path, other: Path) -> float:
    """The largest difference between two runs' saved weights."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(next(each.glob("*/*model.safetensors"))) for each in (run, other))
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs)


def as_table(cases: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| task | mode | strategy | processes | class | loss | largest difference of losses, of weights | held out |"
    ]
    lines.append("| --- " * 8 + "|")
    for case in cases:
        shim = " (by the shim)" if case["shimmed"] else ""
        lines.append(
            f"| {case['task']} | {case['mode']} "
            f"| {case['strategy']}{shim} | {case['processes']} | {case['ranks'][0]['model_class']} | "
            f"{case['losses'][0]:.4f} to {case['losses'][-1]:.4f} | {case['max_loss_diff']:.1e}, "
            f"{case['max_weight_diff']:.1e} | {case['final_exact_match']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
