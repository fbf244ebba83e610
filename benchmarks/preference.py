"""DPO beside a plain TRL script on the same pairs, in one alternating run. `make bench-preference` runs it.

Same model, pairs, order, rate and step size everywhere; medians over several rounds. A pair's prompt is a question with
earlier exchanges before it, its answers are two texts of the rows' file. Prints a Markdown table for each mode.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.material import SEED, TEMPLATE, make_model
from benchmarks.overhead import ROOT, ROWS, Measured, cpu_name, measure, median

MAX_LENGTH = 1024  # nothing is cut: TRL cuts an answer at its end, this kit a prompt at its beginning
RATES = {"lora": 1e-4, "full": 1e-5}
TRL = {"TRL": "each-step", "TRL, precomputed reference": "precomputed"}
OURS = "SFT-Play, make train"


def main() -> int:
    """Measure every contestant `--rounds` times in turn and print the tables."""
    options = parse_options()
    print(
        f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, {options.threads} thread(s), "
        f"load {os.getloadavg()[0]:.1f}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft"))
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        work = Path(name)
        rows = make_pairs(options, work)
        make_model(work / "model", [turn["content"] for row in rows for turn in row["prompt"] + row["chosen"]])
        # A line end behind the last answer would be learned by TRL and not here, and the losses would not be the same.
        template = TEMPLATE.replace("endif %}{{ '\\n' }}{% endfor", "endif %}{{ '' if loop.last else '\\n' }}{% endfor")
        template = template.replace("{{ '<|im_start|>assistant", "{{ '\\n<|im_start|>assistant")
        (work / "model" / "chat_template.jinja").write_text(template)
        tokens = count_tokens(work, rows) * options.epochs
        for mode in options.modes:
            print(compare(work / mode, mode=mode, tokens=tokens, options=options))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows-file", type=Path, default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--step-pairs", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4, help="pairs that are computed at a time")
    parser.add_argument("--exchanges", type=int, default=1, help="earlier exchanges in a prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=list(RATES), default=list(RATES))
    return parser.parse_args()


def make_pairs(options: argparse.Namespace, work: Path) -> list[dict]:
    """Write `source.jsonl` (as made) and `rows.jsonl` (in our training order) of pairs; return the pairs."""
    from sftplay.data.pipeline import training_order

    if not options.rows_file.is_file():
        raise SystemExit(f"no rows at {options.rows_file}\n  fix: give a JSON array of instruction/output: --rows-file")
    found = [row for row in json.loads(options.rows_file.read_text()) if 40 < len(row["output"]) < 600]
    count, turns = options.steps * options.step_pairs, options.exchanges + 1
    if len(found) < count * (turns + 1):
        raise SystemExit(f"{options.rows_file} has {len(found)} rows of middling length\n  fix: fewer --steps")
    rows = []
    for n in range(count):
        *earlier, asked, other = found[n * (turns + 1) : (n + 1) * (turns + 1)]
        exchanges = [(row["instruction"], row["output"]) for row in earlier]
        prompt = [message(*pair) for said in exchanges for pair in zip(("user", "assistant"), said, strict=True)]
        prompt.append(message("user", "\n\n".join(part for part in (asked["instruction"], asked["input"]) if part)))
        chosen, rejected = ([message("assistant", row["output"])] for row in (asked, other))
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    order = training_order(count, count, seed=SEED)
    for name, numbers in (("source", range(count)), ("rows", order)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(rows[n]) + "\n" for n in numbers))
    return rows


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def count_tokens(work: Path, rows: list[dict]) -> int:
    """Real tokens of both sides with their prompts: what TRL forwards, padding not counted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    sides = [row["prompt"] + row[side] for row in rows for side in ("chosen", "rejected")]
    return sum(len(tokenizer.apply_chat_template(side, return_dict=True)["input_ids"]) for side in sides)


def compare(work: Path, *, mode: str, tokens: int, options: argparse.Namespace) -> str:
    """A table of one mode."""
    work.mkdir()
    results: dict[str, list[Measured]] = {label: [] for label in (OURS, *TRL)}
    for n in range(options.rounds):
        for number, label in enumerate(results):
            out = work / f"{n}-{number}"
            run = run_ours(out, mode, options) if label == OURS else run_plain(out, mode, TRL[label], options)
            results[label].append(run)
            print(f"{mode} {n + 1}/{options.rounds}  {label}: {run.wall_s:.1f} s", file=sys.stderr)
    lines = [
        f"\n{mode}: {options.epochs} x {options.steps} steps of {options.step_pairs} pairs, "
        f"{options.micro_batch} at a time, {tokens} tokens, medians of {options.rounds}",
        "",
        "| path | tokens per CPU second of training | CPU s, whole process | wall s | peak RSS MiB | losses |",
        "| " + "--- | " * 6,
    ]
    for label, runs in results.items():
        losses = ", ".join(f"{loss:.4f}" for loss in runs[0].losses)
        lines.append(
            f"| {label} | {median([tokens / run.train_cpu_s for run in runs])} | {median([r.cpu_s for r in runs])} "
            f"| {median([r.wall_s for r in runs])} | {median([r.peak_rss_bytes / 2**20 for r in runs])} | {losses} |"
        )
    return "\n".join(lines)


def run_ours(out: Path, mode: str, options: argparse.Namespace) -> Measured:
    """The user's command on a config of the same run. Nothing is in its cache."""
    out.mkdir()
    work, config = out.parents[1], out / "run.yaml"
    values = {
        "task_mode": "dpo", "run_name": "run", "output_dir": str(out), "seed": SEED,
        "model": {"name": str(work / "model"), "max_seq_len": MAX_LENGTH},
        "tuning": {"mode": mode, **({"lora": {"r": 16, "alpha": 32}} if mode == "lora" else {})},
        "preference": {"beta": 0.1},
        "train": {"epochs": options.epochs, "effective_batch_size": options.step_pairs,
                  "batch_size": options.micro_batch, "learning_rate": RATES[mode], "warmup_ratio": 0.0,
                  "weight_decay": 0.0, "gradient_checkpointing": False},
        "data": {"train_path": str(work / "source.jsonl"), "split": 0.0, "processed_dir": str(out / "processed")},
        "logging": {"steps": 1, "backend": "none"},
    }  # fmt: skip
    config.write_text(json.dumps(values))
    argv = ["make", "-s", "-C", str(ROOT), "train", f"CONFIG={config}"]
    measured = measure(argv, environment(options))
    measured.train_cpu_s = json.loads((out / "run" / "status.json").read_text())["train_cpu_seconds"]
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    measured.losses = tuple(json.loads(line)["loss"] for line in lines)
    return measured


def run_plain(out: Path, mode: str, reference: str, options: argparse.Namespace) -> Measured:
    """The short script a TRL user writes."""
    out.mkdir()
    work = out.parents[1]
    job = {
        "rows": str(work / "rows.jsonl"), "model": str(work / "model"), "mode": mode, "rate": RATES[mode],
        "epochs": options.epochs, "step_pairs": options.step_pairs, "micro_batch": options.micro_batch,
        "max_length": MAX_LENGTH,
    }  # fmt: skip
    argv = [sys.executable, str(ROOT / "benchmarks" / "plain_preference.py"), reference]
    measured = measure(argv, {**environment(options), "BENCH_OUT": str(out), "BENCH_JOB": json.dumps(job)})
    told = json.loads((out / "told.json").read_text())
    measured.train_cpu_s, measured.losses = told["train_cpu_s"], tuple(told["losses"])
    return measured


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What all contestants have."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, "OMP_NUM_THREADS": str(options.threads), **offline}


if __name__ == "__main__":
    raise SystemExit(main())
