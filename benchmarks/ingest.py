"""Speed and memory of `make ingest` on generated documents.

    make bench-ingest ARGS="--tables formats,gigabyte --mb 20"

`formats`: megabytes a second for each format, with one reader for each core. `gigabyte`: a corpus of 1 GB, as one
text, as one file of rows, and as many documents, with the memory of the largest process and of all together. Each
ingestion is a command of its own; what is counted is its whole time, with near-duplicates and all other steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.documents import FORMATS, make_files, pieces
from benchmarks.overhead import cpu_name

ROOT = Path(__file__).resolve().parents[1]
MB = 10**6
FILE_CHARS = 100_000


@dataclass(frozen=True)
class Measured:
    """One ingestion from start to end."""

    seconds: float
    cpu_s: float
    peak_mb: float
    """The most memory of any one of its processes."""

    all_mb: float
    """The most memory of all of them together; pages that they share count once."""

    report: dict[str, int]


def main() -> int:
    """Print the tables that were asked for as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES), help="of " + ",".join(TABLES))
    parser.add_argument("--mb", type=int, default=20, help="megabytes of text for each format")
    parser.add_argument("--corpus-mb", type=int, default=1000, help="megabytes of the large corpus")
    options = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}.")
    for name in options.tables.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-ingest-") as folder:
            print(f"\n{TABLES[name](Path(folder), options)}", flush=True)
    return 0


def format_table(work: Path, options: argparse.Namespace) -> str:
    """Megabytes a second for each format."""
    head = "| format | files | MB of files | MB of text | s | files, MB/s | text, MB/s | CPU s | largest process MB |"
    lines = [head, "| --- " * 9 + "|"]
    for suffix in FORMATS:
        n_bytes = make_files(work / "docs", suffix, n_chars=options.mb * MB, file_chars=FILE_CHARS)
        found = measure(work / "docs", work / "out.jsonl")
        n_chars, n_files = found.report["characters"], len(list((work / "docs").iterdir()))
        lines.append(
            f"| {suffix[1:]} | {n_files} | {n_bytes / MB:.1f} | {n_chars / MB:.1f} | {found.seconds:.1f}"
            f" | {n_bytes / MB / found.seconds:.1f} | {n_chars / MB / found.seconds:.1f}"
            f" | {found.cpu_s:.1f} | {found.peak_mb:.0f} |"
        )
        clear(work)
    return "\n".join(lines)


def gigabyte_table(work: Path, options: argparse.Namespace) -> str:
    """A large corpus in three forms."""
    lines = ["| 1 corpus | MB | rows | s | MB/s | CPU s | largest process MB | all processes MB |", "| --- " * 8 + "|"]
    for name, make in {"one text": one_text, "one file of rows": one_table, "documents of 100 kB": many_texts}.items():
        (work / "docs").mkdir(parents=True)
        make(work / "docs", options.corpus_mb * MB)
        size = sum(path.stat().st_size for path in (work / "docs").iterdir()) / MB
        found = measure(work / "docs", work / "out.jsonl")
        lines.append(
            f"| {name} | {size:,.0f} | {found.report['kept']:,} | {found.seconds:.0f} | {size / found.seconds:.1f}"
            f" | {found.cpu_s:.0f} | {found.peak_mb:.0f} | {found.all_mb:.0f} |"
        )
        clear(work)
    return "\n".join(lines)


TABLES: dict[str, Callable[[Path, argparse.Namespace], str]] = {"formats": format_table, "gigabyte": gigabyte_table}
"""Name -> what makes the table in a working folder."""


def one_text(docs: Path, n_chars: int) -> None:
    with (docs / "book.txt").open("w") as stream:
        for paragraphs in pieces(n_chars):
            stream.write("\n\n".join(paragraphs) + "\n\n")


def one_table(docs: Path, n_chars: int) -> None:
    with (docs / "rows.jsonl").open("w") as stream:
        for paragraphs in pieces(n_chars):
            texts = ["\n".join(paragraphs[begin : begin + 4]) for begin in range(0, len(paragraphs), 4)]
            stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def many_texts(docs: Path, n_chars: int) -> None:
    for number, paragraphs in enumerate(pieces(n_chars)):
        share = len(paragraphs) // 10 + 1
        for part in range(10):
            text = "\n\n".join(paragraphs[part * share : (part + 1) * share])
            (docs / f"{number:05}-{part}.txt").write_text(text)


def measure(docs: Path, out: Path) -> Measured:
    """Ingest a folder by the command line."""
    began = time.perf_counter()
    argv = [sys.executable, "-m", "sftplay", "ingest", f"--in={docs}", f"--out={out}", "--timeout=600"]
    running = psutil.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
    peaks, ended = [0.0, 0.0], threading.Event()
    watching = threading.Thread(target=watch, args=(running.pid, peaks, ended))
    watching.start()
    _, status, used = os.wait4(running.pid, 0)
    ended.set()
    watching.join()
    if status:
        raise SystemExit(f"ingest ended with {os.waitstatus_to_exitcode(status)}")
    report = json.loads(out.with_suffix(".report.json").read_text())
    cpu_s = used.ru_utime + used.ru_stime
    return Measured(time.perf_counter() - began, cpu_s, peaks[0] / MB, peaks[1] / MB, report)


def watch(pid: int, peaks: list[float], ended: threading.Event) -> None:
    """Note the most memory that a process or one that it started holds, and that all hold together."""
    while not ended.wait(0.05):
        largest = together = 0.0
        try:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            return
        for process in family:
            try:
                memory = process.memory_full_info()
            except psutil.Error:
                continue
            largest, together = max(largest, memory.rss), together + memory.pss
        peaks[0], peaks[1] = max(peaks[0], largest), max(peaks[1], together)


def clear(work: Path) -> None:
    """Remove the documents and what was made of them."""
    for path in sorted(work.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


if __name__ == "__main__":
    raise SystemExit(main())
