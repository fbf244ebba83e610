"""`gpu-check`: checks that go wrong leave the others alone, and each figure has a bound that can be missed."""

from __future__ import annotations

import json
import os
import signal
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planted_checks
import pytest
from processes import is_alive, wait_until

from sftplay.commands import gpu_check
from sftplay.machine.gpu import Gpu
from sftplay.machine.probe import Machine, TorchBuild
from sftplay.runs.gpu_check import checks
from sftplay.runs.gpu_check.check import Broken, CheckContext, NotPossible
from sftplay.runs.gpu_check.checks import CHECKS
from sftplay.runs.gpu_check.conduct import Row, Table
from sftplay.signals import STOP_SIGNALS

HERE = Path(__file__).parent
CPU = Machine(
    gpus=(), gpu_reason="none in this test", ram_bytes=2**34, cores=2, python="3.11", system="Linux", libraries={}
)
CARD = Gpu(0, "NVIDIA H100 80GB HBM3", total_bytes=80 * 2**30, free_bytes=79 * 2**30, capability=(9, 0))
ONE_GPU = replace(CPU, gpus=(CARD,), gpu_reason="")
TWO_GPUS = replace(CPU, gpus=(CARD, replace(CARD, index=1)), gpu_reason="")


@pytest.fixture
def place(tmp_path: Path) -> CheckContext:
    (tmp_path / "own").mkdir()
    return CheckContext(CPU, tmp_path / "own", tmp_path / "shared")


def run_planted(out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr("tempfile.tempdir", str(out))
    args = Namespace(only="", out=str(out), fast=True, json=False)
    return gpu_check.run_table(args, list(planted_checks.CHECKS), module="planted_checks")


@pytest.mark.slow
def test_a_check_that_hangs_dies_or_runs_out_of_memory_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    kept: list[int] = []
    real = gpu_check.conduct

    def conduct(checks: Any, scratch: Path, **named: Any) -> None:
        real(checks, scratch, **named)
        kept.extend(int(path.read_text()) for path in (scratch / "shared").glob("pid"))
        assert [each.name for each in scratch.iterdir()] == ["shared"]  # a check's folder goes behind it

    monkeypatch.setattr(gpu_check, "conduct", conduct)
    assert run_planted(tmp_path, monkeypatch) == 5
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == [check.name for check in planted_checks.CHECKS]
    states = {name: (row["state"], row["why"]) for name, row in rows.items()}
    assert states == {
        "well before": ("ok", ""),
        "hangs": ("failed", "no end within 1 s"),
        "dies": ("failed", "killed by SIGKILL, as the kernel does where memory runs out"),
        "runs out": ("failed", "ended with code 1: MemoryError: no room for 2 GiB"),
        "breaks": ("failed", "3 is not 4"),
        "cannot": ("not_possible", "needs a checkout"),
        "is long": ("not_possible", "left out by FAST=1"),
        "needs what is not here": ("not_possible", "needs a moon"),
        "well behind": ("ok", ""),
    }
    assert rows["well behind"]["details"]["cores"] >= 1
    assert rows["dies"]["output"] == ["last words"]
    wait_until(lambda: not any(map(is_alive, kept)))
    table = (tmp_path / "gpu-check.md").read_text()
    assert "| runs out | FAILED | ended with code 1: MemoryError: no room for 2 GiB |" in table
    assert "| well behind | ok | all is well |" in table
    shown = capsys.readouterr().out
    assert "2 ok, 4 FAILED, 3 not possible here" in shown


def test_a_stop_signal_ends_it_with_its_code_and_leaves_nothing_but_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def stop_here(*_: Any, note: Any, **__: Any) -> None:
        note(Row(name="one", state="ok"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    monkeypatch.setattr(gpu_check, "conduct", stop_here)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        assert gpu_check.gpu_check(Namespace(only="", out=str(tmp_path), fast=True, json=False)) == 143
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-check.json", "gpu-check.md"]
    assert "stopped by SIGTERM" in capsys.readouterr().out


def test_without_a_gpu_each_row_says_what_it_needs_and_with_two_none_does():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    here = [check.name for check in CHECKS if not check.needs(CPU)]
    assert here == [
        "facts: driver and torch agree", "run: fp32 full", "run: fp32 lora", "run: fp32 qlora",
        "run: rewards rise", "run: measured before full tuning", "run: eager against sdpa",
        "recovery: kill -9 and resume", "recovery: SIGTERM",
        "delivery: merge, export, plain transformers", "processes: comm-check over gloo", "processes: DDP over gloo",
        "memory: planned against the resident set",
    ]  # fmt: skip
    others = {check.needs(CPU) for check in CHECKS if check.name not in here}
    assert all("CUDA GPU" in reason for reason in others)
    packages = {"needs the package flash-attn", "needs the package liger-kernel"}
    left = {reason for check in CHECKS if (reason := check.needs(TWO_GPUS))} - packages
    assert left == {"is for machines without a GPU; the row above counts the GPU's memory"}
    old = replace(ONE_GPU, gpus=(replace(CARD, capability=(7, 5)),))
    assert [check.needs(old) for check in CHECKS if check.name == "run: bf16 full"] == [
        "needs a GPU with bf16, of Ampere or later"
    ]


def test_torch_and_driver_are_compared_in_memory_capability_peers_and_build():
    def differences(machine: Machine, seen: SimpleNamespace, *, peers: bool = True) -> list[str]:
        return checks.list_differences(machine, [seen] * len(machine.gpus), can_access=lambda a, b: peers)

    same = SimpleNamespace(major=9, minor=0, total_memory=79 * 2**30)
    assert differences(TWO_GPUS, same) == []
    assert len(differences(ONE_GPU, SimpleNamespace(major=9, minor=1, total_memory=40 * 2**30))) == 2
    odd = ["GPUs 0 and 1: torch and the driver differ about peer access"]
    assert differences(TWO_GPUS, same, peers=False) == odd
    assert differences(replace(TWO_GPUS, without_peer_access=((0, 1),)), same, peers=False) == []
    old = TorchBuild("2.0", "11.8", archs=("sm_70", "sm_80"))
    assert differences(replace(ONE_GPU, torch=old), same) == ["GPU 0: torch was built for sm_70 sm_80 only"]


FALLING, USUAL = [3.5, 3.0, 2.5, 2.0, 1.5, 1.2], [3.5, 3.0, 2.5]
ONE = "CUDA_VISIBLE_DEVICES=GPU-0a python -m worker"


@pytest.mark.parametrize(
    ("row", "machine", "losses", "others", "command", "says"),
    [
        ("run: fp32 lora", CPU, FALLING, [], "", "loss 3.500 to 1.200"),
        ("run: fp32 lora", CPU, [3.5, 3.4, 3.5, 3.4, 3.5, 3.4], [], "", Broken("does not fall")),
        ("run: fp32 lora", ONE_GPU, [3.501, *FALLING[1:]], FALLING, "", "of the CPU's"),
        ("run: fp32 lora", ONE_GPU, [3.6, *FALLING[1:]], FALLING, "", Broken("from the CPU's")),
        ("run: eager against sdpa", CPU, USUAL, [3.5, 3.0, 2.501], "", "all within 0.0004"),
        ("processes: one of two visible GPUs", TWO_GPUS, USUAL, [3.5, 3.0, 2.501], ONE, "2 are visible, CUDA_VISIBLE"),
        ("processes: one of two visible GPUs", TWO_GPUS, USUAL, USUAL, ONE.replace("a ", "a,GPU-0b "), Broken("0b")),
        ("processes: one of two visible GPUs", TWO_GPUS, USUAL, [3.5, 3.0, 2.6], ONE, Broken("within 0.04")),
    ],
)
def test_losses_that_do_not_fall_or_are_not_those_of_the_run_beside_fail(
    row: str, machine: Machine, losses: list[float], others: list[float], command: str, says: str | Broken,
    place: CheckContext, monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """`losses` are the shared run's, and `others` those on the CPU or of the run that the row trains."""
    (place.folder / "launch.txt").write_text(command)
    beside = SimpleNamespace(losses=others, folder=SimpleNamespace(path=place.folder))
    monkeypatch.setattr(
        checks,
        "learned",
        lambda *_, on_cpu=False, **__: SimpleNamespace(losses=others if on_cpu and not command else losses),
    )
    monkeypatch.setattr(checks, "train", lambda *_, **__: beside)
    run_row(row, replace(place, machine=machine), says=says)


def run_row(name: str, place: CheckContext, *, says: str | Exception) -> None:
    (check,) = [check for check in CHECKS if check.name == name]
    if isinstance(says, str):
        assert says in check.run(place)
        return
    with pytest.raises(type(says), match=str(says)):
        check.run(place)


SUMMARY = {
    "plan_mean_abs": 0.02, "plan_worst": 0.05, "speed_of_best_mean": 0.98, "speed_of_best_least": 0.95,
    "out_of_memory": 0, "configs": 1,
}  # fmt: skip
OURS = {"tokens_per_s": 12_000.0, "mfu": 0.55, "gradient_checkpointing": False, "losses": [11.9]}
SIZING, RSS, TRL = (
    "memory: planned against held on five configs", "memory: planned against the resident set", "speed: 8B shape, LoRA"
)  # fmt: skip


def sizing(error: str | None = None, **changes: Any) -> dict[str, Any]:
    return {"summary": {**SUMMARY, **changes}, "rows": [{"model": "m", "mode": "lora", "error": error}]}


@pytest.mark.parametrize(
    ("row", "reports", "says"),
    [
        (SIZING, [sizing()], "off by 2.0%"),
        (SIZING, [sizing(plan_worst=-0.2)], Broken("are the bounds")),
        (SIZING, [sizing(speed_of_best_least=0.5)], Broken("are the bounds")),
        (SIZING, [sizing(out_of_memory=1)], Broken("ran out of memory")),
        (SIZING, [sizing(error="it died")], Broken("it died")),
        (SIZING, [], Broken("was not written")),
        (RSS, [], Broken("was not written")),
        (TRL, [OURS, {**OURS, "tokens_per_s": 11e3}], "12,000 tokens/s, MFU 55.0%, 1.09 of plain TRL's 11,000"),
        (TRL, [OURS, {**OURS, "tokens_per_s": 11e3}], "12,473 tokens/s published"),
        (TRL, [OURS, {**OURS, "tokens_per_s": 13e3}], Broken(r"at least 0.95")),
        (TRL, [OURS, {**OURS, "losses": [11.0]}], Broken("first losses differ")),
        (TRL, [{"does_not_fit": "40.0 GiB are planned"}], NotPossible("the card is too small")),
    ],
)
def test_a_measurement_has_bounds_and_one_that_leaves_no_file_is_a_failure_and_nothing_else(
    row: str, reports: list[Any], says: str | Exception, place: CheckContext, monkeypatch: pytest.MonkeyPatch
):
    left = iter(reports)

    def script(name: str, *words: str) -> None:
        out = Path(words[words.index("--json" if "--json" in words else "--out") + 1])
        if report := next(left, None):
            (out / "gpu_sizing.json" if out.is_dir() else out).write_text(json.dumps(report))

    monkeypatch.setattr(checks, "run_script", script)
    run_row(row, place, says=says)


def test_both_files_are_whole_after_every_row(tmp_path: Path):
    table = Table(ONE_GPU, tmp_path)
    for count, name in enumerate(("one", "two"), start=1):
        table.save(Row(name=name, state="ok", figure="a | b"))
        report = json.loads((tmp_path / "gpu-check.json").read_text())
        assert len(report["rows"]) == count
        assert report["card"] == CARD.name
        assert set(report["rows"][-1]) == {"name", "state", "why", "figure", "seconds"}
        assert (tmp_path / "gpu-check.md").read_text().splitlines()[-1] == f"| {name} | ok | a \\| b | 0 |"
