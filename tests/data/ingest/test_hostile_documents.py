"""Documents that try to hang, fill or break their reader are named in the report, within bounds seen from outside."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_documents import HOSTILE, LARGE, Hostile
from processes import HANG_S, is_alive, wait_until

from sftplay.data.ingest.children import NO_ROOM_CODE, ROWS, ChildPool, ChildTask
from sftplay.data.ingest.extract.document import SUFFIXES

ROOT = Path(__file__).resolve().parents[3]
GB = 10**9
LIMIT_S, LATE_S = 30.0, 15.0
"""The default limit of a file, and how much later a busy machine may end what is over it. A reader's time is counted
on the processor: the clock goes on where the whole machine stands still."""

GOOD = "A plain document next to the others, which is long enough to be kept as it is.\n"
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24


def without_roots_rights() -> None:
    """Let what is executed next be refused files as other users are."""
    for right in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, right, 0, 0, 0)


class Watch:
    """Looks at the readers of an ingestion from outside: the most memory of one, the most time of one."""

    def __init__(self) -> None:
        self.peak_bytes, self.longest_s, self.others_peak_bytes = 0, 0.0, 0

    def follow(self, root: psutil.Popen) -> None:
        """Look until the process has ended."""
        while root.poll() is None:
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    held, used = process.memory_info().rss, process.cpu_times()
                    if process.pid != root.pid and process.ppid() != root.pid:
                        self.peak_bytes = max(self.peak_bytes, held)
                        self.longest_s = max(self.longest_s, used.user + used.system)
                    else:
                        self.others_peak_bytes = max(self.others_peak_bytes, held)
            time.sleep(0.02)


def fill(home: Path, hostile: tuple[Hostile, ...]) -> Path:
    """A folder with these files and a good one."""
    docs = home / "docs"
    docs.mkdir()
    (docs / "good.txt").write_text(GOOD)
    for document in hostile:
        document.make(docs / document.name)
    return docs


def ingest_watched(docs: Path, *flags: str, **environment: str) -> tuple[Watch, dict[str, Any], list[dict[str, Any]]]:
    """Ingest a folder: what was seen from outside, the report and the rows."""
    out = docs.with_name("out.jsonl")
    plain = [] if find_spec("ftfy") or flags else ["--without", "encoding"]
    argv = [sys.executable, "-m", "sftplay", "ingest", f"--in={docs}", f"--out={out}", "--workers=2", *plain, *flags]
    watch, errors = Watch(), docs.with_name("errors.txt")
    with errors.open("w") as stream, suppress(psutil.NoSuchProcess):
        running = psutil.Popen(
            argv, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=stream,
            preexec_fn=without_roots_rights,
        )  # fmt: skip
        watch.follow(running)
    assert running.wait() == 0, errors.read_text()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return watch, json.loads(out.with_suffix(".report.json").read_text()), rows


def is_known(document: Hostile) -> bool:
    return Path(document.name).suffix in SUFFIXES or document.name.endswith(ROWS)


def check_named(report: dict[str, Any], hostile: tuple[Hostile, ...]) -> None:
    """Each file is in the report with a reason that fits; where it is read, its rows are in OUT."""
    files = {file["path"]: file for file in report["files"]}
    for document in filter(is_known, hostile):
        file = files[document.name.encode("utf-8", "backslashreplace").decode()]
        found = {file["reason"]} if "reason" in file else set(file["dropped"]) or {""}
        assert found & set(document.reasons or [""]), (document.name, file)
    assert files["good.txt"]["kept"] == 1
    n_dropped = sum(report["dropped"].values()) + sum(report["unreadable"].values())
    assert report["documents"] == report["kept"] + n_dropped


def test_every_hostile_file_is_named_and_the_good_ones_are_read(tmp_path):
    pytest.importorskip("pypdfium2", reason="needs pypdfium2: make install EXTRAS=ingest")
    docs = fill(tmp_path, HOSTILE)
    (docs / "around").symlink_to(docs)
    (docs / "secret.txt").write_text(GOOD)
    (docs / "secret.txt").chmod(0)
    (docs / "closed").mkdir(mode=0)
    watch, report, rows = ingest_watched(docs)
    check_named(report, HOSTILE)
    files = {file["path"]: file for file in report["files"]}
    assert files["secret.txt"]["reason"] == files["closed"]["reason"] == "not_readable"
    assert (files["around"]["status"], files["around"]["reason"]) == ("skipped", "link_to_folder")
    assert "\u200f" in {row["source"]: row["text"] for row in rows}["arabic.txt"]
    assert "Die Größe der Türen." in {row["source"]: row["text"] for row in rows}["latin.txt"]
    assert report["guessed_encodings"] == {"cp1252": 1}
    assert watch.peak_bytes < GB
    assert watch.longest_s < LIMIT_S + LATE_S


@pytest.mark.slow
def test_bombs_and_a_line_of_200_mb_stay_within_the_bounds(tmp_path):
    watch, report, rows = ingest_watched(fill(tmp_path, LARGE), "--without", "encoding,near_duplicates")
    check_named(report, LARGE)
    parts = [row for row in rows if row["source"] == "line.txt"]
    assert parts[0]["place"][0] == 0
    assert all(before["place"][1] == after["place"][0] for before, after in pairwise(parts))
    assert parts[-1]["place"][1] == (tmp_path / "docs" / "line.txt").stat().st_size
    assert max(row["n_chars"] for row in parts) <= 1_000_000
    assert watch.peak_bytes < GB
    assert watch.others_peak_bytes < GB
    assert watch.longest_s < LIMIT_S + 200e6 / 4e6 + LATE_S


GROWS = """
import os, sys
def listen(event, args):
    if event == "open" and str(args[0]).endswith("growing.txt") and not args[2] & os.O_APPEND:
        with open(args[0], "a") as stream:
            stream.write("one more line")
sys.addaudithook(listen)
"""
"""The text of a sitecustomize.py: who opens the file finds that another has written to it meanwhile."""


@pytest.mark.contract
def test_a_file_that_changes_while_it_is_read_is_not_taken(tmp_path):
    docs = fill(tmp_path, ())
    growing = docs / "growing.txt"
    growing.write_text("A line of a log that grows and grows.\n" * 1000)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(GROWS)
    _, report, rows = ingest_watched(docs, PYTHONPATH=str(tmp_path / "hook"))
    assert growing.read_text().endswith("one more line")
    assert report["unreadable"] == {"changed": 1}
    assert [row["source"] for row in rows] == ["good.txt"]


FAULTS = """
import ctypes, os, subprocess, sys, time
monotonic = time.monotonic
def warm_up():
    # in the process that watches: once a file says so, its clock is two hours further
    time.monotonic = lambda: monotonic() + 7200 * os.path.exists("LATE")
def hang(): time.sleep(1000)
def hang_in_c(): ctypes.CDLL(None).pause()
def hang_deaf():
    import signal
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)
def eat():
    kept = []
    while True: kept.append(bytearray(b"x" * 10_000_000))
def eat_mapped():
    import mmap
    kept = mmap.mmap(-1, 600_000_000)
    for place in range(0, 600_000_000, 4096): kept[place] = 1
    time.sleep(1000)
def crash(): ctypes.string_at(0)
def leave(): os._exit(3)
def fill(): raise OSError(28, "No space left on device")
def write(path):
    with open(path, "wb") as stream: stream.write(b"x" * 50_000_000)
def spawn(path, waits):
    code = "import os, time; os.setsid(); open(%r, 'a').write(str(os.getpid()) + chr(10)); time.sleep(1000)" % path
    child = subprocess.Popen([sys.executable, "-c", code])
    while not os.path.exists(path) or not open(path).read().endswith(chr(10)): time.sleep(0.01)
    if waits:
        open("LATE", "w").close()
        child.wait()
    return {}
def answer():
    print("noise"); os.write(1, b"more noise")
    return {"is": "fine"}
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "faults.py").write_text(FAULTS.replace("LATE", str(tmp_path / "late")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ChildPool(4, warmed=["faults"], errors=tmp_path / "errors.txt") as pool:
        yield pool


def fault(function: str, answer: Path, **bounds: Any) -> ChildTask:
    arguments = bounds.pop("arguments", {})
    return ChildTask(function=f"faults.{function}", answer=str(answer), arguments=arguments, **bounds)


def test_a_reader_that_hangs_dies_or_fills_memory_or_disk_ends_alone(pool, tmp_path):
    bounds = {"limit_s": HANG_S, "memory_bytes": 400_000_000, "most_file_bytes": 10_000_000}
    tasks = [fault(name, tmp_path / name, **{**bounds, "limit_s": 0.3}) for name in ("hang", "hang_in_c", "hang_deaf")]
    tasks += [
        fault(name, tmp_path / name, **bounds) for name in ("eat", "eat_mapped", "crash", "leave", "fill", "answer")
    ]
    tasks.append(fault("write", tmp_path / "write", arguments={"path": str(tmp_path / "large")}, **bounds))
    ends = {end.task.function.removeprefix("faults."): end for end in pool.run(tasks)}
    assert [ends[name].killed_for for name in ("hang", "hang_in_c", "hang_deaf")] == ["timeout"] * 3
    assert ends["eat_mapped"].killed_for == "memory"
    # Python's own MemoryError at the system's limit, or the watcher, whichever comes first
    assert ends["eat"].exit_code == 1 or ends["eat"].killed_for == "memory"
    assert ends["crash"].exit_code == -11
    assert ends["leave"].exit_code == 3
    assert ends["write"].exit_code == 1
    assert ends["fill"].exit_code == NO_ROOM_CODE
    assert (tmp_path / "large").stat().st_size <= 10_000_000
    assert ends["answer"].exit_code == 0
    assert json.loads((tmp_path / "answer").read_text()) == {"is": "fine"}
    assert ends["eat"].peak_bytes < 500_000_000


@pytest.mark.parametrize("waits", [True, False], ids=["killed at the limit", "ends by itself"])
def test_what_a_reader_has_started_ends_with_it_even_in_a_session_of_its_own(pool, tmp_path, waits):
    pids = tmp_path / "pids"
    task = fault("spawn", tmp_path / "answer", limit_s=HANG_S, arguments={"path": str(pids), "waits": waits})
    (end,) = pool.run([task])
    assert end.killed_for == ("timeout" if waits else "")
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))
