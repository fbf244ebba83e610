"""A piece that ran out of memory is not planned a second time, unless there is more room than then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from in_process import Inputs, written_config

from sftplay.config.load import load_config
from sftplay.control.past_shortages import LESSONS, learn
from sftplay.control.start import size
from sftplay.launch.command.command import Scale
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import Machine, probe
from sftplay.plan.sizing.size_run import SizedRun


def sized(home: Path, inputs: Inputs, machine: Machine, **changes: object) -> SizedRun:
    keys = {"train__effective_batch_size": 48, **changes}
    return size(load_config(written_config(home, inputs, **keys)), machine, Scale())


def run_short_of_memory(home: Path, before: int, after: int) -> RunFolder:
    folder = RunFolder(home / "outputs" / "first")
    folder.create()
    note = {"step": 3, "batch_size_before": before, "batch_size": after, "planned_bytes": 100, "held_bytes": 200}
    folder.write_json("plan.json", {"shortages": [note]})
    return folder


def test_the_next_plan_of_such_a_run_begins_with_what_worked_and_says_why(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    machine = probe()
    first = sized(tmp_path, inputs, machine)
    planned = first.cfg.train.batch_size
    assert planned == 8  # 1,024 tokens on a CPU, 128 a row
    learn(first, run_short_of_memory(tmp_path, 8, 3))
    again = sized(tmp_path, inputs, machine, seed=1, train__learning_rate=0.5)
    assert (again.cfg.train.batch_size, again.cfg.train.grad_accum) == (3, 16)
    reason = again.decisions["train.batch_size"].reason
    assert "8 rows ran out of memory in " in reason
    assert "outputs/first" in reason
    [lesson] = (tmp_path / LESSONS).iterdir()
    assert str(lesson.name) in reason
    lesson.unlink()
    assert sized(tmp_path, inputs, machine).cfg.train.batch_size == planned


@pytest.mark.parametrize(
    "changes",
    [{"model__max_seq_len": 64}, {"tuning__mode": "full"}, {"train__gradient_checkpointing": True}],
    ids=["shorter rows", "another method", "recomputation"],
)
def test_it_says_nothing_of_other_runs(
    changes: dict[str, object], inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    machine = probe()
    other = sized(tmp_path, inputs, machine, **changes)
    learn(sized(tmp_path, inputs, machine), run_short_of_memory(tmp_path, 8, 1))
    assert sized(tmp_path, inputs, machine, **changes).cfg.train.batch_size == other.cfg.train.batch_size > 1


def test_a_batch_size_that_was_given_stays_and_more_room_is_used(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    machine = replace(probe(), ram_bytes=2 * 2**30)
    learn(sized(tmp_path, inputs, machine), run_short_of_memory(tmp_path, 8, 2))
    assert sized(tmp_path, inputs, machine).cfg.train.batch_size == 2
    assert sized(tmp_path, inputs, machine, train__batch_size=8).cfg.train.batch_size == 8
    roomier = replace(machine, ram_bytes=4 * 2**30)
    assert sized(tmp_path, inputs, roomier).cfg.train.batch_size == 8
