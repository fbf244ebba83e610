"""Which GPUs the command of a run leaves visible: one for one process, all for several."""

from __future__ import annotations

from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.launch.command import Scale, one_gpu_environment
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import Gpu, Machine
from sftplay.runs import start

ROOT = Path(__file__).resolve().parents[2]
CARDS = tuple(Gpu(n, "Tesla V100", 32 * 2**30, 31 * 2**30, (7, 0), uuid=f"GPU-{n}{n}") for n in range(2))
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv(VISIBLE, raising=False)


def visible(*overrides: str, gpus: tuple[Gpu, ...] = CARDS, processes: int = 1) -> str | None:
    machine = Machine(gpus, "", 2**34, 2, "3.11", "Linux", {})
    cfg = load_config("configs/run_demo.yaml", overrides)
    command = start.build_command(cfg, RunFolder(Path("outputs/demo")), scale=Scale(processes), machine=machine)
    return command.env.get(VISIBLE)


def test_one_process_gets_the_first_of_several_gpus_and_several_processes_get_all():
    assert visible() == "GPU-00"
    assert visible(processes=2) is None
    assert visible(gpus=CARDS[:1]) is None
    assert visible(gpus=()) is None


def test_vllm_in_the_process_gets_a_number_because_it_reads_no_uuid(monkeypatch: pytest.MonkeyPatch):
    assert one_gpu_environment(CARDS, by_uuid=False) == {VISIBLE: "0"}
    monkeypatch.setenv(VISIBLE, "3,5")
    assert one_gpu_environment(CARDS, by_uuid=False) == {VISIBLE: "3"}


@pytest.mark.parametrize(
    ("key", "value", "is_one"),
    [
        ("score.placement", "shared", True),
        ("score.placement", "roles", False),
        ("score.devices", {"ref": "cuda:1"}, False),
        ("score.devices", {"ref": "cpu"}, True),
    ],
)
def test_parts_of_a_score_run_on_other_gpus_keep_them_visible(key: str, value: object, is_one: bool):
    decided = {"task_mode": "score", "score.placement": "shared", key: value}
    cfg = load_config("configs/run_demo.yaml").with_values(decided, "test")
    machine = Machine(CARDS, "", 2**34, 2, "3.11", "Linux", {})
    command = start.build_command(cfg, RunFolder(Path("outputs/demo")), scale=Scale(), machine=machine)
    assert (VISIBLE in command.env) == is_one
