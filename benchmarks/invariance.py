"""One config on one process and, by every strategy, on two: is it the same experiment?

    make bench-invariance ARGS="--modes full,lora --strategies ddp,zero2"

Each case is the user's own command, launched for real: fp32 on CPUs, rows of which each learns 1 or about 200 tokens.
Losses of a step and final weights may differ by 1e-4 from those of one process, exact match by one prompt; else it ends
with 5. FSDP runs on CPUs only by the shim in `cpu_fsdp`; its cases say so. `--fault divisor` and `--fault averaging`
break the runs of two processes on purpose: the comparison must then fail.
"""

from __future__ import annotations

import argparse
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
steps add up; and FSDP clips by torch's norm, which on a CPU is up to 5e-4 too small (`train/gradients.py`)."""

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
        for mode in options.modes:
            for strategy in ("single", *options.strategies):
                cases.append(run_case(work, strategy, mode, options.fault))
                print(f"{mode} {strategy}: {cases[-1]['losses'][0]:.4f} to {cases[-1]['losses'][-1]:.4f}", flush=True)
        problems, furthest = compare(cases, work)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps({"cases": cases, "max_abs_diff": furthest}, indent=1) + "\n")
    print(as_table(cases))
    print("\n".join(problems) or f"the same experiment: nothing differs by more than {furthest:.1e}")
    return 5 if problems else 0


def parse_options() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["full", "lora", "qlora"])
    parser.add_argument(
        "--strategies", type=lambda text: text.split(","), default=["ddp", "fsdp", "zero1", "zero2", "zero3"]
    )
    parser.add_argument("--fault", choices=["divisor", "averaging"], help="break the runs of two processes on purpose")
    return parser.parse_args()


def write_rows(path: Path, what: str) -> list[str]:
    """Sixteen chats about a `what`, every other one with an answer of one word; all texts for a tokenizer."""
    lines, texts = [], []
    for n in range(16):
        answer = " ".join(WORDS[(n + k) % len(WORDS)] for k in range(1 if n % 2 else 190))
        lines.append(
            {"messages": [{"role": "user", "content": f"{what} {n}"}, {"role": "assistant", "content": answer}]}
        )
        texts += [f"{what} {n}", answer]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return texts


def run_case(work: Path, strategy: str, mode: str, fault: str | None) -> dict[str, Any]:
    """Train one case by the user's command."""
    processes, name = (1 if strategy == "single" else 2), f"{strategy}-{mode}"
    values = {
        "run_name": name, "output_dir": str(work), "model": {"name": str(work / "model"), "max_seq_len": 512},
        "tuning": {"mode": mode, "lora": {"r": 8}},
        "train": {"max_steps": STEPS, "effective_batch_size": 8, "batch_size": 2, "learning_rate": RATES[mode],
                  "warmup_ratio": 0.0, "gradient_checkpointing": False, "optim": "sgd", "max_grad_norm": 0.0,
                  "precision": "fp32"},
        "data": {"train_path": str(work / "rows.jsonl"), "val_path": str(work / "held_out.jsonl"),
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
    return {
        "strategy": strategy,
        "processes": processes,
        "mode": mode,
        "shimmed": strategy == "fsdp",
        "losses": [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()],
        "final_exact_match": json.loads((run / "eval" / "after.json").read_text())["exact_match"],
        "ranks": [
            {key: rank[key] for key in ("pid", "distributed_type", "model_class", "world_size")}
            for rank in json.loads((run / "status.json").read_text())["ranks"]
        ],
    }


def compare(cases: list[dict[str, Any]], work: Path) -> tuple[list[str], float]:
    """What differs from one process by more than may be, and the largest difference of all."""
    problems, furthest = [], 0.0
    alone = {case["mode"]: case for case in cases if case["strategy"] == "single"}
    for case in cases:
        name, one = f"{case['strategy']}-{case['mode']}", alone[case["mode"]]
        losses = max(abs(a - b) for a, b in zip(case["losses"], one["losses"], strict=True))
        weights = apart(work / name, work / f"single-{case['mode']}")
        furthest = max(furthest, losses, weights)
        case |= {"max_loss_diff": losses, "max_weight_diff": weights}
        if losses > TOLERANCE or weights > TOLERANCE:
            problems.append(f"{name}: losses differ by {losses:.1e}, weights by {weights:.1e}")
        if abs(case["final_exact_match"] - one["final_exact_match"]) > 1 / 16 + 1e-9:
            problems.append(f"{name}: exact match {case['final_exact_match']} beside {one['final_exact_match']}")
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
    lines = ["| mode | strategy | processes | class | loss | largest difference of losses, of weights | exact match |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for case in cases:
        shim = " (by the shim)" if case["shimmed"] else ""
        lines.append(
            f"| {case['mode']} | {case['strategy']}{shim} | {case['processes']} | {case['ranks'][0]['model_class']} | "
            f"{case['losses'][0]:.4f} to {case['losses'][-1]:.4f} | {case['max_loss_diff']:.1e}, "
            f"{case['max_weight_diff']:.1e} | {case['final_exact_match']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
