"""A launch on GPUs that torch cannot use ends with 3 before anything is started; it never takes the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate.utils import environment as accelerate_environment
from in_process import Inputs, new_run
from trl.kernels import chunked_logprob

from sftplay.cli import main
from sftplay.commands import train
from sftplay.config.load import load_config
from sftplay.errors import MachineError
from sftplay.launch.command import Scale, build_launch
from sftplay.launch.run_folder import EXPECTS_GPU, RunFolder
from sftplay.machine.probe import Gpu, Machine, TorchBuild
from sftplay.runs import start
from sftplay.runs import strategy_setup as at_launch
from sftplay.tasks import worker
from sftplay.train.train_run import refuse_missing_gpu
from sftplay.train.upstream import avoid_triton

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
CU130 = TorchBuild("2.13.0+cu130", "13.0", None, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
CU126 = TorchBuild("2.13.0+cu126", "12.6", None, ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))
"""CU130 has the archs that the wheel of torch 2.14.1 for CUDA 13.0 has. CU126 is one with code for Volta."""


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
        refuse_missing_gpu()
    _, folder = new_run(tmp_path, inputs)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(worker.log, "redirect", lambda path: None)
    with pytest.raises(MachineError, match="can use none"):
        worker._work(folder, worker.StopAtOnce())


ADA = Gpu(0, "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, (8, 9), uuid="GPU-a")


@pytest.mark.parametrize(
    ("name", "driver", "are_set"),
    [
        (ADA.name, "535.183.01", True),
        (ADA.name, "550.40.06", True),
        (ADA.name, "550.40.07", False),
        ("NVIDIA A100", "535.183.01", False),
    ],
)
def test_several_rtx_40_with_an_old_driver_do_not_reach_each_other(name, driver, are_set, monkeypatch, capsys):
    """accelerate counts the machine's cards and raises unless both are set, for one process too (1.15, state.py)."""
    for variable in at_launch.WITHOUT_PEERS:
        monkeypatch.delenv(variable, raising=False)
    cards = tuple(replace(ADA, index=n, name=name) for n in range(2))
    here = Machine(cards, "", 64 * GIB, 8, "3.11", "Linux", {}, driver=driver)
    cfg = load_config(ROOT / "configs/run_demo.yaml")
    with (
        patch.object(accelerate_environment, "get_gpu_info", lambda: ([name] * 2, 2)),
        patch.object(accelerate_environment, "get_driver_version", lambda: driver),
    ):
        assert accelerate_environment.check_cuda_p2p_ib_support() != are_set
    for processes in (1, 2):
        found = at_launch.gpu_settings(cfg, here, processes=processes)
        assert {**found, **at_launch.WITHOUT_PEERS} == {**found} or not are_set
        assert are_set or not set(at_launch.WITHOUT_PEERS) & set(found)
    assert ("NCCL_P2P_DISABLE and NCCL_IB_DISABLE set" in capsys.readouterr().out) == are_set
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert "NCCL_P2P_DISABLE" not in at_launch.gpu_settings(cfg, here, processes=2)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_kernels_of_the_first_step_need_a_compiler(no_compiler: None):
    here = Machine((ADA,), "", 64 * GIB, 8, "3.11", "Linux", {})
    cfg = load_config(ROOT / "configs/run_demo.yaml")
    at_launch.refuse_missing_compiler(cfg.with_values({"train.loss_head": "chunked"}, "test"), here)
    liger = cfg.with_values({"train.loss_head": "liger"}, "test")
    puzzles = cfg.with_values({"task_mode": "hrm", "hrm.compile": True}, "test")
    for needing, key in ((liger, "train.loss_head"), (puzzles, "hrm.compile")):
        with pytest.raises(MachineError, match="no C compiler") as refused:
            at_launch.refuse_missing_compiler(needing, here)
        assert key in refused.value.where
        assert refused.value.fix.startswith("apt install gcc python3.")
        at_launch.refuse_missing_compiler(needing, replace(here, gpus=()))
    with pytest.raises(MachineError, match="no C compiler"):
        start.build_command(liger, RunFolder(Path("outputs/demo")), scale=Scale(), machine=here)


def test_grpo_computes_by_torch_where_triton_cannot_build(no_compiler: None, monkeypatch, capsys):
    monkeypatch.setattr(chunked_logprob, "_use_triton", lambda device: True)
    avoid_triton()  # no GPU here: nothing changes
    assert chunked_logprob._use_triton(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    avoid_triton()
    assert not chunked_logprob._use_triton(torch.device("cuda"))
    assert "log-probabilities are computed by torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "is_one"),
    [
        ({"score.placement": "shared"}, True),
        ({"score.placement": "roles"}, False),
        ({"score.placement": "shared", "score.devices": {"ref": "cuda:1"}}, False),
        ({"score.placement": "shared", "score.devices": {"ref": "cpu"}}, True),
    ],
)
def test_one_process_sees_the_first_gpu_unless_parts_of_a_score_run_are_on_others(
    values: dict[str, object], is_one: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cfg = load_config("configs/run_demo.yaml").with_values({"task_mode": "score", **values}, "test")
    here = Machine((ADA, replace(ADA, index=1, uuid="GPU-b")), "", 2**34, 2, "3.11", "Linux", {})
    for processes, seen in ((1, "GPU-a" if is_one else None), (2, None)):
        command = start.build_command(cfg, RunFolder(Path("outputs/demo")), scale=Scale(processes), machine=here)
        assert command.env.get("CUDA_VISIBLE_DEVICES") == seen
