"""A disk that is full, a real one: the run ends with 5 and the bytes, its last checkpoint stays, and it goes on later.

The disk is a tmpfs, which only root may mount.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from holding import Hold, write_hook
from processes import HANG_S

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_STEPS = 6, 2
ROOMY_BYTES = 64 << 20

pytestmark = pytest.mark.slow


@dataclass
class Disk:
    """A run whose folder lies on a disk of its own, and everything else elsewhere."""

    root: Path
    mount: Path

    @property
    def hold(self) -> Hold:
        return Hold(self.root / "run")

    @property
    def folder(self) -> Path:
        return self.mount / "run"

    def resize(self, size_bytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(self.mount)], check=True)

    def fill(self, *, leave_bytes: int) -> None:
        """Take all room but `leave_bytes` with one file."""
        with (self.mount / "filler").open("wb") as handle:
            handle.write(bytes(max(0, shutil.disk_usage(self.mount).free - leave_bytes)))

    def make_room(self) -> None:
        (self.mount / "filler").unlink(missing_ok=True)

    def start(self, verb: str, **environment: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sftplay", verb, "--config", str(self.root / "run.yaml")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with (self.root / "said.txt").open("w") as out:
            return subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def said(self) -> str:
        return (self.root / "said.txt").read_text()

    def held(self, verb: str, at: str) -> subprocess.Popen[bytes]:
        """Start a run that stops where it opens a file whose path matches `at`."""
        for path in (self.hold.held, self.hold.go):
            path.unlink(missing_ok=True)
        process = self.start(verb, **self.hold.environment(write_hook(self.root / "hook"), name=at))
        assert self.hold.wait(process), self.said()
        return process

    def go_on(self, process: subprocess.Popen[bytes]) -> int:
        self.hold.let_go()
        return process.wait(HANG_S)

    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def complete(self) -> list[int]:
        markers = self.folder.glob("checkpoints/checkpoint-*/COMPLETE.json")
        return sorted(int(path.parent.name.rpartition("-")[2]) for path in markers)

    def result(self) -> tuple[bytes, list[float]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
        return (self.folder / "model" / "model.safetensors").read_bytes(), [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, chat_rows: Path) -> Iterator[Disk]:
    root = tmp_path_factory.mktemp("full disk")
    mount = root / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOMY_BYTES}", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs root and the right to mount a tmpfs: {done.stderr.strip()}")
    model = shutil.copytree(tiny_llama, root / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    values = {
        "run_name": "run",
        "output_dir": str(mount),
        "model": {"name": str(model), "max_seq_len": 64},
        "tuning": {"mode": "full"},
        "train": {
            "max_steps": STEPS, "effective_batch_size": 8, "learning_rate": 0.01, "gradient_checkpointing": False,
            "save_steps": SAVE_STEPS, "save_total_limit": 1,
        },
        "data": {"train_path": str(chat_rows), "split": 0, "processed_dir": str(root / "processed")},
        "logging": {"steps": 1, "backend": "none"},
    }  # fmt: skip
    (root / "run.yaml").write_text(json.dumps(values))
    yield Disk(root, mount)
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture(scope="module")
def undisturbed(disk: Disk) -> tuple[bytes, list[float]]:
    assert disk.start("train").wait(HANG_S) == 0, disk.said()
    result = disk.result()
    shutil.rmtree(disk.folder)
    return result


@pytest.fixture
def empty(disk: Disk, undisturbed: tuple[bytes, list[float]]) -> Iterator[Disk]:
    """The disk with nothing on it."""
    yield disk
    disk.make_room()
    shutil.rmtree(disk.folder, ignore_errors=True)


def resume_and_compare(disk: Disk, undisturbed: tuple[bytes, list[float]]) -> None:
    assert disk.start("resume").wait(HANG_S) == 0, disk.said()
    assert disk.result() == undisturbed
    status = disk.status()
    assert (status["state"], status["exit_code"], status["error"]) == ("done", 0, None)


@pytest.mark.contract
def test_too_little_room_for_the_second_checkpoint_is_seen_before_it_begins(
    empty: Disk, undisturbed: tuple[bytes, list[float]]
):
    process = empty.held("train", r"checkpoint-2/\.COMPLETE\.json\.\d+$")
    size = sum(path.stat().st_size for path in (empty.folder / "checkpoints" / "checkpoint-2").iterdir())
    empty.fill(leave_bytes=size // 2)
    assert empty.go_on(process) == 5, empty.said()
    told = re.search(r"too full for the next checkpoint: ([\d,]+) bytes needed, ([\d,]+) free", empty.said())
    assert told, empty.said()
    needed, free = (int(number.replace(",", "")) for number in told.groups())
    assert size < needed < 2 * size
    assert free <= size // 2
    status = empty.status()
    assert (status["state"], status["exit_code"], status["error"]["code"]) == ("failed", 5, "run")
    assert empty.complete() == [2]
    assert not (empty.folder / "checkpoints" / "checkpoint-4").exists()
    empty.make_room()
    resume_and_compare(empty, undisturbed)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("at", "complete"),
    [
        (r"checkpoint-4/optimizer\.pt$", [2]),
        (r"\.model\.part/tokenizer", [6]),
        (r"run/metrics\.jsonl$", []),
    ],
)
def test_a_disk_that_fills_while_files_are_written_costs_no_complete_checkpoint(
    empty: Disk, undisturbed: tuple[bytes, list[float]], at: str, complete: list[int]
):
    process = empty.held("train", at)
    empty.fill(leave_bytes=0)
    assert empty.go_on(process) == 5, empty.said()
    assert "No space left" in empty.said() or "bytes free" in empty.said()
    assert re.search(r"[\d,]+ bytes free", empty.said())
    assert "Traceback" not in empty.said()
    assert empty.complete() == complete
    assert not list(empty.folder.glob(".*.part"))
    empty.make_room()
    resume_and_compare(empty, undisturbed)
