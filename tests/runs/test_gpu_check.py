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
import torch
from processes import is_alive, wait_until
from safetensors.torch import save_file

from sftplay.commands import gpu_check
from sftplay.errors import ConfigError
from sftplay.machine.gpu import Gpu
from sftplay.machine.probe import Machine, TorchBuild
from sftplay.runs.gpu_check import check as kit
from sftplay.runs.gpu_check import facts, fault, memory, recovery, runs, several_processes, speed
from sftplay.runs.gpu_check.check import Broken, CheckContext, NotPossible
from sftplay.runs.gpu_check.checks import CHECKS
from sftplay.runs.gpu_check.conduct import Row
from sftplay.runs.gpu_check.table import Table
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
    return CheckContext(CPU, tmp_path / "own", tmp_path / "shared")


def run_planted(out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr("tempfile.tempdir", str(out))
    args = Namespace(only="", out=str(out), fast=True, json=False)
    return gpu_check.run_table(args, list(planted_checks.CHECKS), module="planted_checks")


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


def test_both_files_are_whole_after_every_row(tmp_path: Path):
    table = Table(ONE_GPU, tmp_path)
    for count, name in enumerate(("one", "two"), start=1):
        table.add(Row(name=name, state="ok", figure="a | b"))
        report = json.loads((tmp_path / "gpu-check.json").read_text())
        assert len(report["rows"]) == count
        assert report["card"] == CARD.name
        assert set(report["rows"][-1]) == {"name", "state", "why", "figure", "seconds"}
        assert (tmp_path / "gpu-check.md").read_text().splitlines()[-1] == f"| {name} | ok | a \\| b | 0 |"


def test_a_folder_that_cannot_hold_the_table_is_refused_before_the_first_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_check, "conduct", None)
    (tmp_path / "file").touch()
    args = Namespace(only="", out=str(tmp_path / "file"), fast=True, json=False)
    with pytest.raises(ConfigError, match="is a file"):
        gpu_check.run_table(args, list(CHECKS), module="")
    monkeypatch.setattr("sftplay.atomic.os.fsync", refuse)
    with pytest.raises(PermissionError):
        gpu_check.run_table(Namespace(**{**vars(args), "out": str(tmp_path / "new")}), list(CHECKS), module="")


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


def refuse(*_: Any) -> None:
    raise PermissionError(13, "no")


def test_a_check_is_chosen_by_a_part_of_its_name_and_an_unknown_one_is_refused():
    chosen = gpu_check.select(list(CHECKS), "kill -9, bf16 qlora")
    assert [check.name for check in chosen] == ["run: bf16 qlora", "recovery: kill -9 and resume"]
    with pytest.raises(ConfigError, match="no check is called 'sped'"):
        gpu_check.select(list(CHECKS), "sped")


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


def test_torch_and_driver_are_compared_in_memory_capability_and_peers():
    told = SimpleNamespace(major=9, minor=0, total_memory=79 * 2**30)
    assert facts.differences(CARD, told) == []
    told.total_memory = 40 * 2**30
    told.minor = 1
    assert len(facts.differences(CARD, told)) == 2
    assert facts.peer_differences(TWO_GPUS, lambda a, b: True) == []
    assert facts.peer_differences(TWO_GPUS, lambda a, b: False) == [
        "GPUs 0 and 1: torch and the driver differ about peer access"
    ]
    apart = replace(TWO_GPUS, without_peer_access=((0, 1),))
    assert facts.peer_differences(apart, lambda a, b: False) == []
    old = TorchBuild("2.0", "11.8", archs=("sm_70", "sm_80"))
    assert facts.without_code(replace(ONE_GPU, torch=old)) == ["GPU 0: torch was built for sm_70 sm_80 only"]


def learned_with(losses: dict[bool, list[float]]) -> Any:
    return lambda place, *, mode, precision, on_cpu=False: SimpleNamespace(losses=losses[on_cpu])


def test_a_loss_that_does_not_fall_and_one_that_is_not_the_cpus_fail(
    place: CheckContext, monkeypatch: pytest.MonkeyPatch
):
    falling, flat = [3.5, 3.0, 2.5, 2.0, 1.5, 1.2], [3.5, 3.4, 3.5, 3.4, 3.5, 3.4]
    monkeypatch.setattr(runs, "learned", learned_with({False: flat}))
    with pytest.raises(Broken, match="does not fall"):
        runs.learns(place, mode="lora", precision="fp32")
    on_gpu = replace(place, machine=ONE_GPU)
    near = [3.501, *falling[1:]]
    monkeypatch.setattr(runs, "learned", learned_with({False: near, True: falling}))
    assert "within" in runs.learns(on_gpu, mode="lora", precision="fp32")
    far = [3.6, *falling[1:]]
    monkeypatch.setattr(runs, "learned", learned_with({False: far, True: falling}))
    with pytest.raises(Broken, match="from the CPU's"):
        runs.learns(on_gpu, mode="lora", precision="fp32")
    monkeypatch.setattr(runs, "learned", learned_with({False: [float("nan")] * 6}))
    with pytest.raises(Broken):
        runs.learns(place, mode="lora", precision="fp32")


def test_rewards_that_do_not_rise_fail(place: CheckContext, monkeypatch: pytest.MonkeyPatch):
    metrics = place.folder / "metrics.jsonl"
    place.folder.mkdir()
    monkeypatch.setattr(runs, "train", lambda *_, **__: SimpleNamespace(folder=SimpleNamespace(metrics=metrics)))
    for rewards, problem in (([0.3, 0.5, 0.8, 0.9, 1.0], None), ([0.3, 0.5, 0.5, 0.5, 0.5], "does not rise")):
        metrics.write_text("".join(json.dumps({"reward": each, "sampler_gap": 2e-6}) + "\n" for each in rewards))
        if problem is None:
            assert runs.rewards_rise(place) == "reward 0.30 to 0.90, sampler within 2e-06"
            continue
        with pytest.raises(Broken, match=problem):
            runs.rewards_rise(place)


def test_other_kernels_that_begin_elsewhere_or_end_elsewhere_fail(place: CheckContext, monkeypatch: pytest.MonkeyPatch):
    usual = [3.5, 3.0, 2.5]
    monkeypatch.setattr(runs, "learned", learned_with({False: usual}))
    for losses, problem in (([3.5, 3.0, 2.501], None), ([3.502, 3.0, 2.5], "bounds"), ([3.5, 3.0, 2.6], "bounds")):
        monkeypatch.setattr(runs, "train", lambda *_, losses=losses, **__: SimpleNamespace(losses=losses))
        if problem is None:
            assert "all within 0.0004" in runs.same_with(place, changes={}, precision="fp32")
            continue
        with pytest.raises(Broken, match=problem):
            runs.same_with(place, changes={}, precision="fp32")


def test_a_single_process_that_sees_several_gpus_fails(place: CheckContext, monkeypatch: pytest.MonkeyPatch):
    two, started = replace(place, machine=TWO_GPUS), place.folder
    started.mkdir()
    folder = SimpleNamespace(path=started)
    monkeypatch.setattr(several_processes, "learned", learned_with({True: [3.5, 3.0, 2.5]}))
    for command, losses, is_right in (
        ("CUDA_VISIBLE_DEVICES=GPU-0a python -m worker", [3.5, 3.0, 2.501], True),
        ("python -m worker", [3.5, 3.0, 2.5], False),
        ("CUDA_VISIBLE_DEVICES=GPU-0a,GPU-0b python -m worker", [3.5, 3.0, 2.5], False),
        ("CUDA_VISIBLE_DEVICES=GPU-0a python -m worker", [3.5, 3.0, 2.6], False),
    ):
        (started / "launch.txt").write_text(command)
        run = SimpleNamespace(folder=folder, losses=losses)
        monkeypatch.setattr(several_processes, "train", lambda *_, run=run, **__: run)
        if is_right:
            assert "2 are visible, CUDA_VISIBLE_DEVICES=GPU-0a for the worker" in several_processes.one_of_several(two)
            continue
        with pytest.raises(Broken, match="2 are visible"):
            several_processes.one_of_several(two)


def test_the_split_model_exceeds_one_card_and_fits_them_all():
    disk = 500 * 2**30
    for gib, count, name in ((80, 2, "Qwen/Qwen2.5-7B"), (22, 2, "Qwen/Qwen2.5-1.5B"), (32, 4, "Qwen/Qwen2.5-3B")):
        card = replace(CARD, total_bytes=gib * 2**30, free_bytes=gib * 2**30)
        machine = replace(CPU, gpus=(card,) * count, disk_free_bytes=disk)
        # weights, gradients and two moments in fp32: 16 bytes a parameter, of 7.62, 1.54 and 3.09 billions
        assert several_processes.split_candidate(machine, count) == name
        with pytest.raises(NotPossible, match="disk"):
            several_processes.split_candidate(replace(machine, disk_free_bytes=2**30), count)
    huge = replace(CARD, total_bytes=2**40, free_bytes=2**40)
    with pytest.raises(NotPossible, match="no shape"):
        several_processes.split_candidate(replace(CPU, gpus=(huge, huge), disk_free_bytes=disk), 2)


def test_losses_are_compared_step_by_step_and_one_that_is_not_finite_is_a_failure():
    assert kit.losses_apart([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    for odd, problem in (([2.0], "1 steps next to 2"), ([2.0, float("nan")], "not finite")):
        with pytest.raises(Broken, match=problem):
            kit.losses_apart(odd, [2.0, 1.0])


def test_weights_apart_is_the_norm_of_the_difference_over_the_norm(tmp_path: Path):
    runs = []
    for n, last in enumerate((4.0, 4.5)):
        run = kit.write_run(tmp_path, f"run-{n}")
        (run.folder.path / "adapter").mkdir(parents=True)
        weights = {"a": torch.tensor([3.0]), "b": torch.tensor([last])}
        save_file(weights, run.folder.path / "adapter" / "adapter_model.safetensors")
        runs.append(run)
    assert kit.weights_apart(runs[1], runs[0]) == pytest.approx(0.5 / (9 + 4.5**2) ** 0.5)
    assert kit.weights_apart(runs[0], runs[0]) == 0.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"plan_worst": -0.2}, "are the bounds"),
        ({"speed_of_best_least": 0.5}, "are the bounds"),
        ({"out_of_memory": 1}, "ran out of memory"),
        ({"error": "it died"}, "it died"),
    ],
)
def test_the_memory_row_fails_where_a_plan_or_a_batch_is_off(changes: dict[str, Any], problem: str | None):
    summary = {
        "plan_mean_abs": 0.02, "plan_worst": 0.05, "speed_of_best_mean": 0.98, "speed_of_best_least": 0.95,
        "out_of_memory": 0, "configs": 1,
    }  # fmt: skip
    report = {
        "summary": {**summary, **changes},
        "rows": [{"model": "m", "mode": "lora", "error": changes.get("error")}],
    }
    if problem is None:
        assert "off by 2.0%" in memory.judge(report)
        return
    with pytest.raises(Broken, match=problem):
        memory.judge(report)


def test_the_speed_row_fails_where_trl_is_faster_or_trained_on_something_else(place: CheckContext):
    ours = {"tokens_per_s": 12_000.0, "mfu": 0.55, "gradient_checkpointing": False, "losses": [11.9]}
    told = speed.judge(ours, {**ours, "tokens_per_s": 11_000.0}, published=speed.PUBLISHED)
    assert told.startswith("12,000 tokens/s, MFU 55.0%, 1.09 of plain TRL's 11,000")
    assert "12,473" in told
    with pytest.raises(Broken, match=r"at least 0.95"):
        speed.judge(ours, {**ours, "tokens_per_s": 13_000.0}, published="")
    with pytest.raises(Broken, match="first losses differ"):
        speed.judge(ours, {**ours, "losses": [11.0]}, published="")


def test_a_card_that_is_too_small_for_a_shape_is_not_a_failure(place: CheckContext, monkeypatch: pytest.MonkeyPatch):
    place.folder.mkdir()

    def script(name: str, *words: str) -> None:
        Path(words[words.index("--out") + 1]).write_text('{"does_not_fit": "40.0 GiB are planned"}')

    monkeypatch.setattr(speed, "run_script", script)
    with pytest.raises(NotPossible, match="the card is too small"):
        speed.measure(place, case="llama-8b-lora", who="ours")


def test_a_kit_that_was_installed_without_benchmarks_says_so():
    with pytest.raises(NotPossible, match="needs a checkout"):
        kit.run_script("no_such_script.py")


def test_memory_of_a_gpu_that_is_not_free_again_is_told(monkeypatch: pytest.MonkeyPatch):
    used = replace(ONE_GPU, gpus=(replace(CARD, used_bytes=3 * 2**30),))
    monkeypatch.setattr(recovery, "probe", lambda: used)
    monkeypatch.setattr(recovery, "FREE_AGAIN_S", 0.0)
    assert recovery.await_free(3 * 2**30) == "; the GPU's memory is free again"
    with pytest.raises(Broken, match=r"2.00 GiB of GPU memory are not free"):
        recovery.await_free(2**30)
    monkeypatch.setattr(recovery, "probe", lambda: CPU)
    assert recovery.await_free(0) == ""


def test_the_cap_leaves_room_for_half_a_micro_batch_and_not_for_a_whole_one(monkeypatch: pytest.MonkeyPatch):
    gib, given = 2**30, []
    device = SimpleNamespace(total_memory=80 * gib)
    answers = {"max_memory_allocated": 11 * gib, "memory_allocated": gib, "memory_reserved": 2 * gib}
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    fault.cap_memory()
    room = given[0] * 80 * gib - 2 * gib  # beside what stays reserved
    assert 0.5 * 10 * gib < room < 10 * gib


def test_as_many_processes_as_gpus_but_a_power_of_two_that_divides_a_step():
    counts = {n: several_processes.processes(replace(CPU, gpus=(CARD,) * n)) for n in (1, 2, 3, 6, 8, 40)}
    assert counts == {1: 1, 2: 2, 3: 2, 6: 4, 8: 8, 40: 16}
    assert all(16 % n == 0 for n in counts.values())


def test_a_measurement_that_leaves_no_file_is_a_failure_and_nothing_else(
    place: CheckContext, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "run_script", lambda *_: None)
    for check in (memory.compare_plan, memory.compare_plan_on_cpu):
        with pytest.raises(Broken, match="was not written"):
            check(place)
