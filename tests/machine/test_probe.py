"""Facts about the machine, from an NVML that answers as we say."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sftplay.machine import probe as probes
from sftplay.machine.probe import find_gpus, library_versions, probe, ram_limit_bytes, usable_cores

GIB = 2**30
CARDS = [
    ("NVIDIA H200", "GPU-aaaa1111", 141 * GIB, 139 * GIB, (9, 0)),
    ("Tesla V100-SXM2-16GB", "GPU-bbbb2222", 16 * GIB, 15 * GIB, (7, 0)),
]


class FakeNvml(ModuleType):
    """pynvml with two cards; handles are their indices."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.is_open = False
        self.fails = False

    def nvmlInit(self):
        if self.fails:
            raise self.NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return len(CARDS)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return CARDS[handle][1]

    def nvmlDeviceGetName(self, handle):
        return CARDS[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=CARDS[handle][2], free=CARDS[handle][3])

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return CARDS[handle][4]


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_cards_are_reported_as_the_driver_tells_and_the_driver_is_closed(nvml):
    gpus, reason = find_gpus()
    assert reason == ""
    assert [(g.index, g.name, g.total_bytes, g.free_bytes) for g in gpus] == [
        (0, "NVIDIA H200", 141 * GIB, 139 * GIB),
        (1, "Tesla V100-SXM2-16GB", 16 * GIB, 15 * GIB),
    ]
    assert not nvml.is_open


def test_bf16_begins_with_ampere(nvml):
    # compute capability: V100 7.0, T4 7.5, A100 8.0, H200 9.0 (developer.nvidia.com/cuda-gpus)
    assert [gpu.has_bf16 for gpu in find_gpus()[0]] == [True, False]
    made = [probes.Gpu(0, "x", 1, 1, capability).has_bf16 for capability in ((7, 5), (8, 0), (8, 9), (12, 0))]
    assert made == [False, True, True, True]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1", ["NVIDIA H200", "Tesla V100-SXM2-16GB"]),
        ("1,0", ["Tesla V100-SXM2-16GB", "NVIDIA H200"]),
        ("1", ["Tesla V100-SXM2-16GB"]),
        ("GPU-bbbb2222", ["Tesla V100-SXM2-16GB"]),
        ("GPU-bbbb", ["Tesla V100-SXM2-16GB"]),
        (" 1 , GPU-aaaa1111 ", ["Tesla V100-SXM2-16GB", "NVIDIA H200"]),
        ("1,7,0", ["Tesla V100-SXM2-16GB"]),
        ("0,-1,1", ["NVIDIA H200"]),
    ],
)
def test_cuda_visible_devices_chooses_and_orders_as_cuda_does(nvml, monkeypatch, visible, names):
    # CUDA C programming guide, "CUDA environment variables": only devices before an invalid one are visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, _ = find_gpus()
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.index for gpu in gpus] == list(range(len(names)))


@pytest.mark.parametrize("visible", ["", " ", "-1"])
def test_an_empty_choice_hides_every_card_and_is_the_reason(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpus() == ((), "CUDA_VISIBLE_DEVICES hides every GPU")


def test_a_choice_of_cards_that_do_not_exist_is_the_reason_for_none(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    gpus, reason = find_gpus()
    assert gpus == ()
    assert "CUDA_VISIBLE_DEVICES" in reason


def test_without_a_driver_the_reason_is_what_it_said(nvml):
    nvml.fails = True
    assert find_gpus() == ((), "no NVIDIA driver answered (Driver Not Loaded)")


def test_without_the_package_that_is_the_reason(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpus() == ((), "the package nvidia-ml-py is not installed")


@pytest.fixture
def cgroup(monkeypatch):
    """What the kernel's files say: path -> text; absent ones are missing."""
    files: dict[str, str] = {}
    real = Path.read_text

    def read_text(self, *args, **kwargs):
        if str(self).startswith("/sys/fs/cgroup"):
            if str(self) not in files:
                raise FileNotFoundError(str(self))
            return files[str(self)]
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.__getitem__)
    return files


V2, V1 = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 64 * GIB),
        ({V2: "max\n"}, 64 * GIB),
        ({V2: f"{8 * GIB}\n"}, 8 * GIB),
        ({V2: f"{100 * GIB}\n"}, 64 * GIB),
        ({V1: "9223372036854771712\n"}, 64 * GIB),
        ({V1: f"{4 * GIB}\n"}, 4 * GIB),
    ],
    ids=["no cgroup", "v2 without limit", "v2 limit", "limit above the machine", "v1 without limit", "v1 limit"],
)
def test_memory_is_the_machines_or_the_lower_limit_of_its_container(cgroup, files, limit):
    cgroup |= files
    assert ram_limit_bytes() == limit


def test_only_cores_this_process_may_use_count(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cores() == 2


def test_versions_are_those_installed_and_absent_libraries_are_left_out(monkeypatch):
    monkeypatch.setattr(probes, "LIBRARIES", ("pydantic", "no-such-library"))
    assert library_versions() == {"pydantic": metadata.version("pydantic")}


def test_the_whole_machine_can_be_written_as_json(nvml):
    import json

    content = json.loads(json.dumps(probe().as_dict()))
    assert [gpu["name"] for gpu in content["gpus"]] == [card[0] for card in CARDS]
    assert content["cores"] >= 1
