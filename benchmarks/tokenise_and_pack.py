"""Tokenise and pack: tokens a second beside a plain `datasets.map`, memory, and how long it takes to open a stream.

    python benchmarks/tokenise_and_pack.py --mb 100 --rounds 3
    python benchmarks/tokenise_and_pack.py --mb 1000 --rounds 1 --only ours
    python benchmarks/tokenise_and_pack.py --open

Ours reads a file of documents, judges and counts every record, and writes the store, from which any block is read.
`datasets.map` gets the same file and tokenizer, joins the tokens of each batch and cuts them into blocks, as the
example scripts of transformers do; it loses a rest at the end of each batch. Both use two processes. Every contestant
is a process of its own. Memory is the sum of the proportional shares of all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.material import make_model
from benchmarks.overhead import cpu_name
from benchmarks.preparing import MIB, figures, sentences, watch_memory

BLOCK = 2048
PROCESSES = 2
CONTESTANTS = ("ours", "datasets.map")


def main() -> int:
    """Print the table of tokens a second, or that of opening a stream."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", choices=["", *CONTESTANTS])
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--as", dest="part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(run_part(options.part, options.work)))
    elif options.open:
        print(opening_table())
    else:
        print(tokenise_table(options.mb, rounds=options.rounds, only=options.only))
    return 0


def tokenise_table(megabytes: int, *, rounds: int = 3, only: str = "") -> str:
    """Tokens a second and peak memory of each contestant, in turn, as Markdown."""
    with tempfile.TemporaryDirectory(prefix="bench-tokens-") as name:
        work = Path(name)
        make_documents(work, megabytes * 1_000_000)
        contestants = [only] if only else list(CONTESTANTS)
        found: dict[str, list[tuple[float, float, float, float]]] = {each: [] for each in contestants}
        for _ in range(rounds):
            for each in contestants:
                found[each].append(measure(each, work))
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, tokenizers {version('tokenizers')}, "
        f"datasets {version('datasets')}. {megabytes} MB of documents, medians of {rounds} rounds.",
        "",
        "| path | tokens per CPU second | tokens/s | MB/s | peak memory MiB, all processes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each, runs in found.items():
        cells = [figures([run[at] for run in runs]) for at in range(4)]
        lines.append(f"| {each} | {' | '.join(cells)} |")
    return "\n".join(lines)


def make_documents(work: Path, n_bytes: int) -> None:
    """Write `documents.jsonl` (documents of 100 to a million tokens), a tokenizer of their words, and a config."""
    texts, draw = sentences(), random.Random(7)
    make_model(work / "model", texts)
    size = 0
    with (work / "documents.jsonl").open("w", encoding="utf-8") as file:
        while size < n_bytes:
            count = draw.choices([5, 30, 100, 1000, 40_000], [30, 40, 25, 5, 0.01])[0]
            lines = [" ".join(draw.choices(texts, k=5)) for _ in range(max(1, count // 5))]
            row = json.dumps({"text": f"{size}\n" + "\n".join(lines)}) + "\n"
            file.write(row)
            size += len(row)
    config = {
        "task_mode": "cpt",
        "model": {"name": str(work / "model"), "max_seq_len": BLOCK},
        "data": {"train_path": str(work / "documents.jsonl"), "split": 0, "processed_dir": str(work / "processed")},
    }
    (work / "run.yaml").write_text(json.dumps(config))


def run_part(part: str, work: Path) -> dict[str, float]:
    """One contestant, in this process: seconds from the first row to the last byte on disk, and tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    if part == "ours":
        from sftplay.config.load import load_config
        from sftplay.data.mixture.load import load_mixture

        cfg = load_config(str(work / "run.yaml"), [])
        start = time.perf_counter()
        rows = load_mixture(cfg, tokenizer)
        return {"seconds": time.perf_counter() - start, "tokens": rows.report["tokens"]}
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def tokenise(batch: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in tokenizer(batch["text"])["input_ids"]]}

    def pack(batch: dict[str, Any]) -> dict[str, Any]:
        ids = [id for each in batch["input_ids"] for id in each]
        blocks = [ids[at : at + BLOCK] for at in range(0, len(ids) // BLOCK * BLOCK, BLOCK)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=work) as cache:
        rows = load_dataset("json", data_files=str(work / "documents.jsonl"), split="train", cache_dir=cache)
        rows = rows.map(tokenise, batched=True, remove_columns=rows.column_names, num_proc=PROCESSES)
        rows = rows.map(pack, batched=True, remove_columns=rows.column_names, num_proc=PROCESSES)
        return {"seconds": time.perf_counter() - start, "tokens": len(rows) * BLOCK}


def measure(part: str, work: Path) -> tuple[float, float, float, float]:
    """Tokens per CPU second (start-up included), tokens and MB a second, and peak MiB of a contestant's processes."""
    subprocess.run(["rm", "-rf", str(work / "processed")], check=True)
    words = [sys.executable, __file__, "--as", part, "--work", str(work)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hf")}
    before = os.times()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    peaks: list[float] = []
    watcher = threading.Thread(target=watch_memory, args=(process, peaks))
    watcher.start()
    out, err = process.communicate()
    watcher.join()
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    if process.returncode:
        raise SystemExit(f"{part} failed:\n{err[-2000:]}")
    found = json.loads(out.splitlines()[-1])
    size = (work / "documents.jsonl").stat().st_size / 1e6
    tokens, seconds = found["tokens"], found["seconds"]
    return tokens / cpu_s, tokens / seconds, size / seconds, max(peaks, default=0.0)


def opening_table(n_tokens: int = 100_000_000) -> str:
    """Seconds to open a mixture in the middle of so many tokens, and microseconds to read rows, as Markdown."""
    from sftplay.data.mixture.mixture import BlockForm, MixSource, Mixture
    from sftplay.data.mixture.store import Store

    lines = [
        "| documents | tokens | open and read the row in the middle, s | a row behind it, us | MiB |",
        "| --- " * 5 + "|",
    ]
    with tempfile.TemporaryDirectory(prefix="bench-open-") as name:
        for mean in (10_000, 500, 50):
            folder = Path(name) / str(mean)
            n_documents = synthetic_store(folder, n_tokens, mean=mean)
            start = time.perf_counter()
            source = MixSource(0, "domain", "cpt", 0.9, Store.open(folder))
            other = MixSource(1, "again", "cpt", 0.1, Store.open(folder))
            train = Mixture([source, other], BlockForm(BLOCK), seed=1)
            train.n_rows = n_tokens // BLOCK
            middle = len(train) // 2
            train[middle]
            opened = time.perf_counter() - start
            start = time.perf_counter()
            for row in range(middle, middle + 2000):
                train[row]
            each = (time.perf_counter() - start) / 2000 * 1e6
            size = sum(path.stat().st_size for path in folder.iterdir()) / MIB
            lines.append(f"| {n_documents:,} | {n_tokens:,} | {opened:.3f} | {each:.0f} | {size:.0f} |")
    return "\n".join(lines)


def synthetic_store(folder: Path, n_tokens: int, *, mean: int) -> int:
    """Write a store of random tokens in documents of about `mean` tokens; their number."""
    from sftplay.data.mixture.store import ENTRY, Index

    draw = np.random.default_rng(1)
    ends = np.cumsum(draw.integers(1, 2 * mean, size=n_tokens // mean))
    table = np.zeros(len(ends), ENTRY)
    table["end"], table["learned_end"] = ends, ends - np.arange(1, len(ends) + 1)
    folder.mkdir()
    table.tofile(folder / "train.documents")
    draw.integers(0, 50_000, size=int(ends[-1]), dtype=np.uint16).tofile(folder / "train.tokens")
    for kind in ("documents", "tokens"):
        (folder / f"held_out.{kind}").touch()
    Index(2, False, ["x"]).write(folder)
    return len(ends)


if __name__ == "__main__":
    raise SystemExit(main())
