"""A disk that will not last until the end of the run is told once, in bytes, while there is time."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Inputs, new_run, train_in

from sftplay.monitor.checkpoints import mark_complete
from sftplay.monitor.disk import SMALL_FILES_BYTES, WarnOfFullDisk

MIB = 2**20
RESULT = 4 * 100  # ninety-nine fp32 weights and their bias


class Disk:
    """A run of 100 steps that saves every 10, on a disk whose free bytes the test says."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch, *, limit: int = 2) -> None:
        self.home, self.free = home, 0
        patch.setattr("sftplay.monitor.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=self.free))
        self.warn = WarnOfFullDisk(home, limit)
        self.parts = {"model": torch.nn.Linear(99, 1), "optimizer": SimpleNamespace(state={})}

    def look(self, step: int, *, free: int, saved: bool = False) -> None:
        self.free = free
        state = SimpleNamespace(global_step=step, max_steps=100, save_steps=10)
        if saved:
            self.warn.on_save(None, state, None, **self.parts)
        else:
            self.warn.on_step_end(None, state, SimpleNamespace(should_save=False), **self.parts)

    def save(self, step: int, n_bytes: int) -> None:
        folder = self.home / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(n_bytes))
        mark_complete(folder, {})


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def told(capsys: Any) -> list[dict[str, int]]:
    """The byte counts of each warning."""
    count = r"([\d,]+)"
    pattern = (
        rf"{count} bytes free, {count} needed \(checkpoints {count} at {count} each,"
        rf" result {count}, what else grows {count}\)"
    )
    names = ("free", "needed", "own", "each", "result", "others")
    found = re.findall(pattern, capsys.readouterr().out)
    return [{name: int(text.replace(",", "")) for name, text in zip(names, each, strict=True)} for each in found]


def test_all_checkpoints_that_will_be_kept_are_reckoned_with_behind_the_first_step(disk: Disk, capsys: Any):
    # Two stay and a third is written before the oldest goes; each is as large as the model's weights here.
    needed = 3 * RESULT + RESULT + SMALL_FILES_BYTES
    disk.look(1, free=needed)
    assert told(capsys) == []
    disk.warn = WarnOfFullDisk(disk.home, 2)
    disk.look(1, free=needed - 1)
    assert [each["needed"] for each in told(capsys)] == [needed]


def test_warning_gives_the_bytes_and_comes_once(disk: Disk, capsys: Any):
    disk.look(1, free=1000)
    found = told(capsys)
    assert found == [{
        "free": 1000, "needed": 4 * RESULT + SMALL_FILES_BYTES, "own": 3 * RESULT, "each": RESULT,
        "result": RESULT, "others": 0,
    }]  # fmt: skip
    disk.look(10, free=0, saved=True)
    assert told(capsys) == []


def test_next_checkpoint_needs_room_beside_those_that_stay(disk: Disk, capsys: Any):
    disk.look(1, free=100 * MIB)
    for step in (10, 20):
        disk.save(step, MIB)
    disk.look(20, free=MIB, saved=True)
    (found,) = told(capsys)
    assert MIB < found["each"] < MIB + 4096  # its marker is small
    assert found["own"] == found["each"]


def test_rate_of_what_others_write_is_carried_on_to_the_last_step(disk: Disk, capsys: Any):
    disk.look(1, free=100 * MIB)
    disk.save(10, 3 * MIB)
    own = sum(path.stat().st_size for path in disk.home.rglob("*") if path.is_file())
    # In nine steps 9 MiB went to others, 1 MiB a step: 90 more steps take 90.
    disk.look(10, free=100 * MIB - own - 9 * MIB, saved=True)
    (found,) = told(capsys)
    assert found["others"] == 90 * MIB


def test_last_checkpoint_leaves_only_the_result_to_come(disk: Disk, capsys: Any):
    disk.look(1, free=100 * MIB)
    disk.save(100, MIB)
    disk.look(100, free=RESULT + SMALL_FILES_BYTES, saved=True)
    assert told(capsys) == []
    disk.look(100, free=RESULT + SMALL_FILES_BYTES - 1, saved=True)
    assert [each["own"] for each in told(capsys)] == [0]


def test_other_ranks_say_nothing(disk: Disk, capsys: Any, monkeypatch: Any):
    monkeypatch.setenv("RANK", "1")
    disk.look(1, free=0)
    assert told(capsys) == []


def test_run_on_a_disk_that_is_nearly_full_warns_after_its_first_step_and_goes_on(
    tmp_path: Path, tiny_llama: Path, chat_rows: Path, held_out_rows: Path, capsys: Any, monkeypatch: Any
):
    cfg, folder = new_run(
        tmp_path, Inputs(tiny_llama, chat_rows, held_out_rows), train__save_steps=2, tuning__mode="full"
    )
    # 48,288 fp32 weights with two moments each: two checkpoints take 1.16 MB, the result 0.19 MB.
    monkeypatch.setattr("sftplay.monitor.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=1_300_000))
    assert train_in(cfg, folder).outcome.step == 4
    out = capsys.readouterr().out
    assert out.count("warning: the disk will be full before step 4: 1,300,000 bytes free") == 1
    assert out.index("warning: the disk") < out.index("step 2/4")
