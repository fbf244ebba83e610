"""A launch on GPUs that torch cannot use ends with 3 before anything is started; it never takes the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_process import Inputs, new_run

from sftplay.cli import main
from sftplay.commands.train import train
from sftplay.config.schema.run import ModelConfig
from sftplay.errors import MachineError
from sftplay.launch.command.command import EXPECTS_GPU, Scale, build_launch
from sftplay.machine.probe import Gpu, Machine
from sftplay.machine.torch_build import TorchBuild
from sftplay.model.failures import explain_failure, refusing
from sftplay.tasks import worker
from sftplay.tasks.run import setup

GIB = 2**30
CU130 = TorchBuild("2.13.0+cu130", "13.0", None, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
CU126 = TorchBuild("2.13.0+cu126", "12.6", None, ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
"""CU130 has the archs that the wheel of torch 2.14.1 for CUDA 13.0 has. CU126 is one with code for Volta."""

NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"


def machine(
    driver: str, cuda: tuple[int, int], *, build: TorchBuild | None, capability: tuple[int, int] = (9, 0)
) -> Machine:
    card = Gpu(0, "a card", 80 * GIB, 79 * GIB, capability, uuid="GPU-a")
    return Machine((card,), "", 64 * GIB, 8, "3.11", "Linux", {}, driver=driver, cuda_driver=cuda, torch=build)


@pytest.mark.parametrize(
    ("here", "part"),
    [
        (machine("535.183", (12, 2), build=CU130), "driver: 535.183 runs CUDA up to 12.2"),
        (machine("550.163", (12, 4), build=CU130), "driver: 550.163 runs CUDA up to 12.4"),
        (machine("570.211", (12, 8), build=CU130), "driver: 570.211 runs CUDA up to 12.8"),
        (machine("580.95", (13, 0), build=CU130, capability=(7, 0)), "torch: 2.13.0+cu130 has no code for a card"),
        (machine("580.95", (13, 0), build=TorchBuild("2.13.0+cpu", None)), "torch: 2.13.0+cpu is not built for CUDA"),
    ],
)
def test_a_launch_is_refused_before_it_leaves_anything(
    here: Machine, part: str, write_config: Callable[..., Path], tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "probe", lambda: here)
    assert main(["train", "--config", str(write_config())]) == MachineError.exit_code
    said = capsys.readouterr().err
    assert part in said
    assert "or train on the CPU: export CUDA_VISIBLE_DEVICES=-1" in said
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    "here",
    [
        machine("550.163", (12, 4), build=CU126),
        machine("580.95", (13, 0), build=CU130),
        machine("535.183", (12, 2), build=CU126, capability=(7, 0)),
        machine("580.95", (13, 0), build=None),
        replace(machine("550.163", (12, 4), build=CU130), gpus=()),
    ],
)
def test_a_torch_that_fits_the_driver_and_the_card_is_launched(
    here: Machine, write_config: Callable[..., Path], monkeypatch
):
    monkeypatch.setattr(train, "probe", lambda: here)
    assert main(["train", "--config", str(write_config()), "--dry-run"]) == 0


def test_a_worker_that_finds_no_gpu_where_one_is_planned_ends_with_3(inputs: Inputs, tmp_path: Path, monkeypatch):
    env = build_launch(Path("run"), Scale(), has_gpu=True, is_offline=True).env
    assert EXPECTS_GPU in env
    assert EXPECTS_GPU not in build_launch(Path("run"), Scale(), has_gpu=False, is_offline=True).env
    monkeypatch.setenv(EXPECTS_GPU, env[EXPECTS_GPU])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match=r"planned for a GPU, and torch .* can use none"):
        setup.refuse_missing_gpu()
    _, folder = new_run(tmp_path, inputs)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(worker.log, "redirect", lambda path: None)
    with pytest.raises(MachineError, match="can use none"):
        worker._work(folder, worker.StopAtOnce())


def test_a_missing_kernel_is_named_as_what_it_is():
    model = ModelConfig(name="a-folder")
    with (
        pytest.raises(MachineError, match="no code for this GPU's compute capability") as refused,
        refusing(lambda error: explain_failure(error, model, where="model.name")),
    ):
        raise RuntimeError(NO_KERNEL)
    assert "make doctor" in refused.value.fix


def test_a_run_that_meets_a_missing_kernel_ends_as_the_machines_fault(inputs: Inputs, tmp_path: Path, monkeypatch):
    _, folder = new_run(tmp_path, inputs)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(worker.log, "redirect", lambda path: None)
    monkeypatch.setattr(worker, "answer_with_stacks", lambda *_: None)
    monkeypatch.setattr(worker.StopAtOnce, "install", lambda self: None)

    def meets(*_):
        raise RuntimeError(NO_KERNEL)

    monkeypatch.setattr(worker, "_work", meets)
    assert worker.main(str(folder.path)) == MachineError.exit_code
    status = json.loads((folder.path / "status.json").read_text())
    assert "no code for this GPU" in status["error"]["what"]
