"""Speed and memory of our training path beside a plain TRL script of the same environment, in one alternating run.

Same model, rows, order, adapter, rate and step size everywhere; medians over several rounds. Prints a Markdown table.

    make bench ARGS="--rows-file FILE.json --rounds 5"

Other kits take part when their command is given: `--kit "NAME=COMMAND"`; it is run by a shell with BENCH_MODEL,
BENCH_ROWS (jsonl, messages, already in order) and BENCH_OUT set, and measured as a whole process.
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
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.material import MAX_LENGTH, MICRO_BATCH, STEP_ROWS, make_model, make_rows

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT.parent / "shared" / "data" / "alpaca" / "alpaca_2000.json"
TRL_VARIANTS = {"TRL, padded": "padded", "TRL, packed": "packed"}


@dataclass
class Measured:
    """One run. Seconds of CPU count all processes; `train_cpu_s` only what lies between first and last step."""

    cpu_s: float
    wall_s: float
    peak_rss_bytes: int
    train_cpu_s: float | None = None
    first_step_s: float | None = None
    losses: tuple[float, ...] = ()


def main() -> int:
    """Measure every contestant `--rounds` times in turn and print the table."""
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        work = Path(name)
        rows = make_rows(options.rows_file, work, options.steps * STEP_ROWS)
        make_model(work / "model", rows)
        tokens = count_tokens(work)
        contestants = build_contestants(work, options)
        results: dict[str, list[Measured]] = {label: [] for label in contestants}
        for n in range(options.rounds):
            for label, contestant in contestants.items():
                out = work / f"out-{n}-{len(results[label])}-{abs(hash(label))}"
                results[label].append(contestant(out))
                print(f"round {n + 1}/{options.rounds}  {label}: {results[label][-1].wall_s:.1f} s", file=sys.stderr)
        print(as_table(results, tokens, options))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows-file", type=Path, default=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run contestants whose name contains this")
    parser.add_argument("--cli", action="store_true", help="also the `trl sft` command line")
    parser.add_argument("--kit", action="append", default=[], metavar="NAME=COMMAND")
    return parser.parse_args()


def count_tokens(work: Path) -> int:
    """Real tokens of the rows: what every contestant trains on, padding not counted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    total = 0
    for line in (work / "rows.jsonl").read_text().splitlines():
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=True, return_dict=True)["input_ids"]
        total += min(len(ids), MAX_LENGTH)
    return total


def build_contestants(work: Path, options: argparse.Namespace) -> dict:
    """name -> function of an output folder that runs it once."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "BENCH_MODEL": str(work / "model"),
        "BENCH_ROWS": str(work / "rows.jsonl"),
    }
    contestants: dict = {
        "SFT-Play, make train": lambda out: run_ours(work, out, env, options.steps),
        "SFT-Play, train.batching=tokens": lambda out: run_ours(work, out, env, options.steps, batching="tokens"),
    }
    for label, layout in TRL_VARIANTS.items():
        contestants[label] = lambda out, layout=layout: run_plain(out, env, layout)
    if options.cli:
        contestants["trl sft command"] = lambda out: run_cli(work, out, env)
    for given in options.kit:
        label, _, command = given.partition("=")
        contestants[label] = lambda out, command=command: measure(["sh", "-c", command], {**env, "BENCH_OUT": str(out)})
    return {label: run for label, run in contestants.items() if options.only in label}


def run_ours(work: Path, out: Path, env: dict[str, str], steps: int, *, batching: str = "examples") -> Measured:
    """The user's command on a config of the same run."""
    config = out.with_suffix(".yaml")
    values = {
        "run_name": "run", "output_dir": str(out), "seed": 7,
        "model": {"name": str(work / "model"), "max_seq_len": MAX_LENGTH},
        "tuning": {"mode": "lora", "lora": {"r": 16, "alpha": 32}},
        "train": {"max_steps": steps, "effective_batch_size": STEP_ROWS, "learning_rate": 1e-3, "warmup_ratio": 0.0,
                  "gradient_checkpointing": False, "batching": batching},
        "data": {"train_path": str(work / "source.jsonl"), "split": 0.0, "processed_dir": str(out / "processed")},
        "logging": {"steps": 1, "backend": "none"},
    }  # fmt: skip
    config.write_text(json.dumps(values))
    metrics = out / "run" / "metrics.jsonl"
    argv = ["make", "-s", "-C", str(ROOT), "train", f"CONFIG={config}"]
    measured = measure(argv, env, first_step=metrics.exists)
    status = json.loads((out / "run" / "status.json").read_text())
    measured.train_cpu_s = status["train_cpu_seconds"]
    measured.losses = tuple(json.loads(line)["loss"] for line in metrics.read_text().splitlines())
    return measured


def run_plain(out: Path, env: dict[str, str], layout: str) -> Measured:
    """The short script a TRL user writes."""
    argv = [sys.executable, str(ROOT / "benchmarks" / "plain_trl.py"), layout]
    measured = measure(argv, {**env, "BENCH_OUT": str(out), "BENCH_STARTED": str(time.time())})
    told = json.loads((out / "told.json").read_text())
    measured.train_cpu_s, measured.first_step_s = told["train_cpu_s"], told["first_step_s"]
    measured.losses = tuple(told["losses"])
    return measured


def run_cli(work: Path, out: Path, env: dict[str, str]) -> Measured:
    """`trl sft` with the same settings; it does not tell its training part."""
    config = out.with_suffix(".yaml")
    values = {
        "model_name_or_path": str(work / "model"), "output_dir": str(out), "dtype": "float32", "use_cpu": True,
        "bf16": False, "use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear",
        "assistant_only_loss": True, "per_device_train_batch_size": MICRO_BATCH, "num_train_epochs": 1,
        "gradient_accumulation_steps": STEP_ROWS // MICRO_BATCH, "learning_rate": 1e-3, "max_length": MAX_LENGTH,
        "activation_checkpointing": False, "save_strategy": "no", "report_to": "none",
        "datasets": [{"path": "json", "data_files": str(work / "rows.jsonl"), "split": "train"}],
    }  # fmt: skip
    config.write_text(json.dumps(values))
    return measure([str(Path(sys.executable).parent / "trl"), "sft", "--config", str(config)], env)


def measure(argv: list[str], env: dict[str, str], first_step=lambda: False) -> Measured:
    """Run to the end: CPU of the whole tree, wall, and the sum of every process's own peak memory."""
    before, started = os.times(), time.time()
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output: list[bytes] = []
    reader = threading.Thread(target=lambda: output.append(process.stdout.read()))
    reader.start()
    peaks: dict[int, int] = {}
    first_step_s = None
    while process.poll() is None:
        if first_step_s is None and first_step():
            first_step_s = time.time() - started
        watch_memory(process.pid, peaks)
        time.sleep(0.02)
    reader.join()
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{argv[:3]} ended with {process.returncode}:\n{output[0].decode()[-3000:]}")
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Measured(cpu_s, time.time() - started, sum(peaks.values()), first_step_s=first_step_s)


def watch_memory(root: int, peaks: dict[int, int]) -> None:
    """Note the largest resident set so far of `root` and everything it started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
    for pid in parents:
        ancestor = pid
        while ancestor not in (0, 1, root) and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor != root:
            continue
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
        peaks[pid] = max(peaks.get(pid, 0), int(peak) * 1024)  # a process that is ending shows 0


def as_table(results: dict[str, list[Measured]], tokens: int, options: argparse.Namespace) -> str:
    """The Markdown table, with machine, versions and date."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft"))
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, {options.threads} thread(s), "
        f"Python {platform.python_version()}, {libraries}.",
        f"{options.steps} steps of {STEP_ROWS} rows (micro-batch {MICRO_BATCH}), {tokens} real tokens, LoRA r 16, "
        f"fp32, medians of {options.rounds}.",
        "",
        "| path | real tokens per CPU second of training | CPU s, whole process | wall s | s to first step "
        "| peak RSS MiB | first and last loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label, runs in results.items():
        speed = median([tokens / run.train_cpu_s for run in runs if run.train_cpu_s])
        first = median([run.first_step_s for run in runs if run.first_step_s])
        losses = f"{runs[0].losses[0]:.4f}, {runs[0].losses[-1]:.4f}" if runs[0].losses else "-"
        lines.append(
            f"| {label} | {speed} | {median([r.cpu_s for r in runs])} | {median([r.wall_s for r in runs])} | {first} | "
            f"{median([r.peak_rss_bytes / 2**20 for r in runs])} | {losses} |"
        )
    return "\n".join(lines)


def median(values: list[float]) -> str:
    """Median with the range behind it."""
    if not values:
        return "-"
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    raise SystemExit(main())
