"""gpu-info, memory-check and doctor on machines with published values; their sources are in recorded/*.json.

The figures in recorded/*.txt were written down from the sources, before the code.
"""

from __future__ import annotations

import argparse
import json

import pynvml
import pytest
import recorded_driver as driver

from sftplay.commands import machine as commands
from sftplay.launch.command import one_gpu_environment
from sftplay.machine import memory_use, probe
from sftplay.machine import probe as torch_build
from sftplay.machine.doctor import check_gpus
from sftplay.machine.probe import TorchBuild

TORCH = TorchBuild("2.14.1+cu130", "13.0", None, ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
"""From torch/version.py and libtorch_python.so of the wheel torch-2.14.1 for Linux."""

HOST = ("CPU cores:", "torch ", "Python ", "memory:", "no run is")


@pytest.fixture(autouse=True)
def same_host(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe, "find_torch", lambda **_: TORCH)
    monkeypatch.setattr(memory_use, "find_owner", lambda pid: "")  # pids of another machine


def printed(capsys) -> str:
    """What the three commands print about GPUs, without the lines about this host."""
    args = argparse.Namespace(json=False, torch=False, watch=False, config="", overrides=["output_dir=nowhere"])
    texts = []
    for name, command in (("gpu-info", commands.gpu_info), ("memory-check", commands.memory_check)):
        assert command(args) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(HOST)]
        texts += [f"$ {name}", *lines]
    findings = check_gpus(probe.probe(in_detail=True))
    return "\n".join([*texts, "$ doctor", *(each.as_text() for each in findings)]) + "\n"


@pytest.mark.parametrize("name", driver.MACHINES)
def test_a_recorded_machine_is_described_as_its_source_shows_it(name, monkeypatch, capsys):
    driver.install(monkeypatch, driver.recorded(name))
    assert printed(capsys) == (driver.RECORDED / f"{name}.txt").read_text()


def test_a_changed_link_and_lost_peer_access_change_the_output(monkeypatch, capsys):
    machine = driver.recorded("unequal")
    machine["topology"][1][2] = machine["topology"][2][1] = "NV5"
    machine["peer_status"] = pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
    driver.install(monkeypatch, machine)
    text = printed(capsys)
    assert "GPU1  NODE    X  NV5" in text
    assert "warn  nccl: GPUs 0-1, 0-2, 1-2 have no peer access" in text


def test_a_mig_instance_is_chosen_by_its_uuid(monkeypatch, capsys):
    driver.install(monkeypatch, driver.recorded("mig"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-08bce7f3-bac7-4715-b56f-91541f15fe37")
    (gpu,) = probe.probe().gpus
    assert (gpu.name, gpu.total_bytes, gpu.is_mig) == ("NVIDIA A100 80GB PCIe MIG 2g.20gb", 19968 * 2**20, True)
    assert gpu.plannable_bytes == (19968 - 13) * 2**20
    assert gpu.capability == (8, 0)


def test_json_says_the_same_as_the_lines(monkeypatch, capsys):
    driver.install(monkeypatch, driver.recorded("v100x2"))
    commands.gpu_info(argparse.Namespace(json=True, torch=False))
    printed_json = json.loads(capsys.readouterr().out)
    assert printed_json["n_gpus"] == 2
    assert printed_json["gpus"][0]["used_bytes"] == 9434 * 2**20
    assert printed_json["gpus"][0]["processes"][0] == {"pid": 4450, "name": "python3", "used_bytes": 1733 * 2**20}
    assert (printed_json["driver"], printed_json["links"]) == ("510.85.02", [["X", "PHB"], ["PHB", "X"]])


@pytest.mark.parametrize(
    ("machine", "chosen", "uuid"),
    [("v100x2", None, 0), ("v100x2", "1", None), ("v100x2", "1,0", 1), ("a100x8", "3,4", 3)],
)
def test_one_process_gets_the_first_gpu_that_is_visible(
    machine: str, chosen: str | None, uuid: int | None, monkeypatch: pytest.MonkeyPatch
):
    recorded = driver.recorded(machine)
    for n, gpu in enumerate(recorded["gpus"]):
        gpu.setdefault("uuid", f"GPU-{n}")
    driver.install(monkeypatch, recorded)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    wanted = {} if uuid is None else {"CUDA_VISIBLE_DEVICES": recorded["gpus"][uuid]["uuid"]}
    assert one_gpu_environment(probe.find_gpus()[0]) == wanted


def test_an_instance_of_a_gpu_is_named_because_torch_counts_whole_gpus(monkeypatch):
    driver.install(monkeypatch, driver.recorded("mig"))
    (instance,) = probe.find_gpus()[0]
    assert one_gpu_environment([instance]) == {"CUDA_VISIBLE_DEVICES": instance.uuid}
    assert instance.uuid.startswith("MIG-")


def test_torch_2_14_for_cuda_13_leaves_volta_out():
    assert [TORCH.runs_on(c) for c in ((7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0), (12, 1))] == [
        False, True, True, True, True, True, True,
    ]  # fmt: skip
    assert torch_build.TorchBuild("x", "12.0", None, ("sm_90a",)).runs_on((9, 0))
    assert not torch_build.TorchBuild("x", "12.0", None, ("sm_90a",)).runs_on((9, 1))
    assert torch_build.TorchBuild("x", "12.0", None, ("sm_80", "compute_80")).runs_on((12, 0))
