"""Rows a second of data preparation beside a plain `datasets.map` with the same tokenizer and template, in one run.

    make bench-data ARGS="--rows 100000 --rounds 3"

Ours reads one file in which five layouts are mixed, finds and checks every mask, counts everything and writes the
cache. `datasets.map` gets the same chats, already in one layout, and only renders and tokenises; with one process (its
tokenizer's threads use all cores) and with one process a core. Every contestant is a process of its own; imports count
in `wall s`, while `rows/s` counts from the first row to the last byte on disk. Memory is the sum of the proportional
shares of all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.material import make_model
from benchmarks.overhead import cpu_name

ROOT = Path(__file__).resolve().parents[1]
WORDS = ROOT / "data" / "base"
MIB = 2**20


@dataclass
class Measured:
    """One process from start to end."""

    rows_per_s: float
    wall_s: float
    cpu_s: float
    peak_mib: float


def main() -> int:
    """Measure every contestant in turn, `--rounds` times, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as", dest="part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(run_part(options.part, options.work)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        work = Path(name)
        make_material(work, options.rows)
        contestants = [
            "ours, first time",
            "ours, from the cache",
            "datasets.map",
            f"datasets.map, {os.cpu_count()} processes",
        ]
        found: dict[str, list[Measured]] = {each: [] for each in contestants}
        for _ in range(options.rounds):
            for each in contestants:
                found[each].append(measure(each, work, options.rows))
        print(table(found, options.rows, work))
    return 0


def make_material(work: Path, count: int) -> None:
    """Write `mixed.jsonl` and `messages.jsonl` (the same chats) and a tokenizer trained on their words."""
    texts = sentences()
    draw = random.Random(7)
    with (work / "mixed.jsonl").open("w") as mixed, (work / "messages.jsonl").open("w") as plain:
        for n in range(count):
            parts = [" ".join(draw.choices(texts, k=draw.randint(1, 7))) for _ in range(4)]
            parts[0] = f"{n}: {parts[0]}"
            row, turns = layouts(parts)[n % 5]
            mixed.write(json.dumps(row) + "\n")
            plain.write(json.dumps({"messages": turns}) + "\n")
    make_model(work / "model", texts)
    config = {
        "model": {"name": str(work / "model"), "max_seq_len": 2048},
        "data": {"train_path": str(work / "mixed.jsonl"), "split": 0, "processed_dir": str(work / "processed")},
    }
    (work / "run.yaml").write_text(json.dumps(config))


def sentences() -> list[str]:
    """Sentences of the text that ships with the kit."""
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(WORDS.rglob("*.txt")))
    return [part.strip() + "." for part in text.split(".") if 20 < len(part) < 400 and "<|" not in part]


def layouts(parts: list[str]) -> list[tuple[dict[str, Any], list[dict[str, str]]]]:
    """The texts as a row of each of five layouts, each with the messages it stands for."""

    def turns(*texts: str) -> list[dict[str, str]]:
        return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]

    first, second = parts[:2]
    talk = [{"from": "gpt" if n % 2 else "human", "value": text} for n, text in enumerate(parts)]
    return [
        ({"messages": turns(*parts)}, turns(*parts)),
        ({"instruction": first, "input": "", "output": second}, turns(first, second)),
        ({"conversations": talk}, turns(*parts)),
        ({"prompt": first, "completion": second}, turns(first, second)),
        ({"question": first, "answer": second}, turns(first, second)),
    ]


def run_part(part: str, work: Path) -> dict[str, float]:
    """One contestant, in this process: seconds from the first row to the last byte on disk."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    if part.startswith("ours"):
        from sftplay.config.load import load_config
        from sftplay.data.pipeline import load_examples

        cfg = load_config(str(work / "run.yaml"), [])
        start = time.perf_counter()
        load_examples(cfg, tokenizer)
        return {"seconds": time.perf_counter() - start}
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()

    def tokenise(batch: dict[str, Any]) -> dict[str, Any]:
        texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
        return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=work) as cache:
        rows = load_dataset("json", data_files=str(work / "messages.jsonl"), split="train", cache_dir=cache)
        processes = os.cpu_count() if "processes" in part else None
        rows.map(tokenise, batched=True, remove_columns=rows.column_names, num_proc=processes)
        return {"seconds": time.perf_counter() - start}


def measure(part: str, work: Path, count: int) -> Measured:
    """Run one contestant as a process and watch all its processes' memory."""
    if part == "ours, first time":
        subprocess.run(["rm", "-rf", str(work / "processed")], check=True)
    words = [sys.executable, __file__, "--as", part, "--work", str(work)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hf")}
    before, start = os.times(), time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    peaks: list[float] = []
    watcher = threading.Thread(target=watch_memory, args=(process, peaks))
    watcher.start()
    out, err = process.communicate()
    wall, after = time.perf_counter() - start, os.times()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{part} failed:\n{err[-2000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    seconds = json.loads(out.splitlines()[-1])["seconds"]
    return Measured(count / seconds, wall, cpu, max(peaks, default=0.0))


def watch_memory(process: subprocess.Popen[str], peaks: list[float]) -> None:
    """Append the memory of the process and its children in MiB, five times a second, until it ends."""
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        try:
            for each in [root, *root.children(recursive=True)]:
                total += each.memory_full_info().pss
        except psutil.Error:
            pass
        peaks.append(total / MIB)
        time.sleep(0.2)


def table(found: dict[str, list[Measured]], count: int, work: Path) -> str:
    """Medians and ranges as Markdown."""
    size = (work / "mixed.jsonl").stat().st_size / MIB
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"tokenizers {version('tokenizers')}, datasets {version('datasets')}. {count:,} rows, {size:.0f} MiB, "
        f"medians of {len(next(iter(found.values())))} rounds.",
        "",
        "| path | rows/s | wall s, whole process | CPU s | peak memory MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in found.items():
        cells = [figures([getattr(run, key) for run in runs]) for key in ("rows_per_s", "wall_s", "cpu_s", "peak_mib")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figures(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"


if __name__ == "__main__":
    raise SystemExit(main())
