"""A run warns once, in bytes and while there is time, that the disk will be full before its end."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Inputs, new_run, train_in

from sftplay.launch.checkpoints import mark_complete
from sftplay.train.guards import SMALL_FILES_BYTES, WarnOfFullDisk

MIB = 2**20
RESULT = 4 * 100  # 99 fp32 weights and their bias


class Disk:
    """A run of 100 steps that saves every 10, on a disk whose free bytes the test sets."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.home, self.free = home, 0
        patch.setattr("sftplay.train.guards.shutil.disk_usage", lambda _: SimpleNamespace(free=self.free))
        self.warn = WarnOfFullDisk(home, 2)
        self.parts = {"model": torch.nn.Linear(99, 1), "optimizer": SimpleNamespace(state={})}

    def predict(self, step: int, *, free: int, saved: bool = False) -> None:
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


def warnings_in(capsys: Any) -> list[dict[str, int]]:
    """The byte counts of each warning."""
    count = r"([\d,]+)"
    pattern = (
        rf"{count} bytes free, {count} needed \(checkpoints {count} at {count} each,"
        rf" result {count}, growth of other files {count}\)"
    )
    names = ("free", "needed", "own", "each", "result", "others")
    warnings = re.findall(pattern, capsys.readouterr().out)
    return [{name: int(text.replace(",", "")) for name, text in zip(names, each, strict=True)} for each in warnings]


def test_warning_gives_the_bytes_and_comes_once(disk: Disk, capsys: Any):
    disk.predict(1, free=1000)
    assert warnings_in(capsys) == [{
        "free": 1000, "needed": 4 * RESULT + SMALL_FILES_BYTES, "own": 3 * RESULT, "each": RESULT,
        "result": RESULT, "others": 0,
    }]  # fmt: skip
    disk.predict(10, free=0, saved=True)
    assert warnings_in(capsys) == []


def test_other_files_are_expected_to_grow_and_after_the_last_checkpoint_only_the_result_needs_room(
    disk: Disk, capsys: Any
):
    disk.predict(1, free=100 * MIB)
    disk.save(10, 3 * MIB)
    own = sum(path.stat().st_size for path in disk.home.rglob("*") if path.is_file())
    # In nine steps other files grew by 9 MiB, 1 MiB a step: 90 more steps take 90 MiB.
    disk.predict(10, free=100 * MIB - own - 9 * MIB, saved=True)
    assert [each["others"] for each in warnings_in(capsys)] == [90 * MIB]
    disk.warn = WarnOfFullDisk(disk.home, 2)
    disk.predict(100, free=RESULT + SMALL_FILES_BYTES, saved=True)
    assert warnings_in(capsys) == []
    disk.predict(100, free=RESULT + SMALL_FILES_BYTES - 1, saved=True)
    assert [each["own"] for each in warnings_in(capsys)] == [0]


def test_run_on_a_disk_that_is_nearly_full_warns_after_its_first_step_and_goes_on(
    tmp_path: Path, inputs: Inputs, capsys: Any, monkeypatch: Any
):
    cfg, folder = new_run(tmp_path, inputs, train__save_steps=2, tuning__mode="full")
    # 48,288 fp32 weights with two moments each: two checkpoints take 1.16 MB, the result 0.19 MB.
    monkeypatch.setattr("sftplay.train.guards.shutil.disk_usage", lambda _: SimpleNamespace(free=1_300_000))
    assert train_in(cfg, folder).outcome.step == 4
    out = capsys.readouterr().out
    assert out.count("warning: the disk will be full before step 4: 1,300,000 bytes free") == 1
    assert out.index("warning: the disk") < out.index("step 2/4")
