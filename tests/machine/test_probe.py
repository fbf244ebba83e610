"""Facts about the machine: which cards a process gets, and how much memory a container leaves."""

from __future__ import annotations

import os

import pynvml
import pytest
import recorded_driver as driver

from sftplay.machine import gpu as ram
from sftplay.machine.nvml import Present, choose
from sftplay.machine.probe import find_gpus, other_accelerators

GIB, MIB = 2**30, 2**20
MACHINE = {
    "driver": "580.0",
    "cuda": 13000,
    "gpus": [
        driver.gpu("NVIDIA H200", total_mib=141 * 1024, used_mib=2048, uuid="GPU-aaaa1111"),
        driver.gpu("Tesla V100-SXM2-16GB", total_mib=16 * 1024, used_mib=1024, uuid="GPU-bbbb2222", capability=[7, 0]),
    ],
    "topology": [["X", "SYS"], ["SYS", "X"]],
}


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver.install(monkeypatch, MACHINE)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1", ["NVIDIA H200", "Tesla V100-SXM2-16GB"]),
        ("1,0", ["Tesla V100-SXM2-16GB", "NVIDIA H200"]),
        ("GPU-bbbb", ["Tesla V100-SXM2-16GB"]),
        (" 1 , GPU-aaaa1111 ", ["Tesla V100-SXM2-16GB", "NVIDIA H200"]),
        ("1,7,0", ["Tesla V100-SXM2-16GB"]),
    ],
)
def test_cuda_visible_devices_chooses_and_orders_as_cuda_does(nvml, monkeypatch, visible, names):
    # CUDA C programming guide, "CUDA environment variables": only devices before an invalid one are visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, _ = find_gpus()
    assert [gpu.name for gpu in gpus] == names
    assert [gpu.index for gpu in gpus] == list(range(len(names)))


@pytest.mark.parametrize(("visible", "part"), [("9", "names no GPU"), ("0,0", "names a GPU twice"), ("GPU-", "no GPU")])
def test_a_choice_that_leaves_no_card_is_the_reason_for_none(nvml, monkeypatch, visible, part):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, reason = find_gpus()
    assert gpus == ()
    assert "CUDA_VISIBLE_DEVICES" in reason
    assert part in reason


WHOLE, SLICED, UNSLICED = Present("GPU-a"), Present("GPU-b", ("MIG-1", "MIG-2")), Present("GPU-c", ())


@pytest.mark.parametrize(
    ("present", "visible", "chosen"),
    [
        ([SLICED], None, [(0, 0)]),
        ([WHOLE, SLICED], None, [(1, 0)]),
        ([WHOLE, SLICED], "0", [(0, None)]),
        ([WHOLE, SLICED], "MIG-2,MIG-1", [(1, 1)]),
        ([WHOLE, SLICED], "GPU-a,MIG-2", [(1, 1)]),
        ([WHOLE, UNSLICED], None, [(0, None)]),
        ([UNSLICED], None, []),
        ([SLICED], "MIG-3", []),
    ],
)
def test_a_process_gets_one_mig_instance_and_then_no_whole_gpu(present, visible, chosen):
    # NVIDIA Multi-Instance GPU User Guide, "CUDA Device Enumeration"
    assert choose(present, visible)[0] == chosen
    assert bool(choose(present, visible)[1]) == (not chosen)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch."),
    ],
)
def test_without_a_driver_the_reason_is_its_message(nvml, code, message):
    nvml.init_error = code
    assert find_gpus() == ((), f"no NVIDIA driver answered ({message})")


def test_a_gpu_without_memory_of_its_own_counts_the_machines(monkeypatch):
    # NVML says Not Supported for the memory of GB10 and Jetson, whose GPU shares the processor's
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver.install(monkeypatch, {"driver": "580.1", "cuda": 13000, "gpus": [driver.gpu("NVIDIA GB10", total_mib=None)]})
    ((gpu,), _) = find_gpus()
    assert gpu.total_bytes == ram.ram_limit_bytes()
    assert 0 < gpu.plannable_bytes <= gpu.total_bytes


def test_accelerators_of_other_makers_are_named_and_not_used(tmp_path):
    # PCI vendor 0x1002 is AMD, 0x10de NVIDIA; class 0x030000 VGA, 0x0302 3D controller, 0x0200 Ethernet (pci.ids)
    cards = {"0000:03:00.0": ("0x1002", "0x030000"), "0000:04:00.0": ("0x10de", "0x030200")}
    for name, (vendor, kind) in {**cards, "0000:05:00.0": ("0x8086", "0x020000")}.items():
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert other_accelerators(tmp_path) == (
        "an AMD GPU is at 0000:03:00.0; this kit trains on CUDA or the CPU",
        "an NVIDIA GPU is at 0000:04:00.0, but its driver does not answer here",
    )


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Writes the kernel's files below a temporary folder. The machine has 64 GiB, and 50 of them are free."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.__getitem__)

    def write(files):
        for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {50 * 2**20} kB\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


V2, V1 = "sys/fs/cgroup/", "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 64 * GIB),
        ({f"{V2}memory.max": "max"}, 64 * GIB),
        ({f"{V2}memory.max": 8 * GIB}, 8 * GIB),
        ({f"{V2}memory.max": 100 * GIB}, 64 * GIB),
        ({f"{V1}memory.limit_in_bytes": 9223372036854771712}, 64 * GIB),
        ({f"{V1}memory.limit_in_bytes": 4 * GIB}, 4 * GIB),
        ({"proc/self/cgroup": "0::/a/b", f"{V2}a/b/memory.max": "max", f"{V2}a/memory.max": 3 * GIB}, 3 * GIB),
        ({"proc/self/cgroup": "0::/a", f"{V2}a/memory.max": 6 * GIB, f"{V2}b/memory.max": GIB}, 6 * GIB),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job/step\n0::/",
                f"{V1}memory.limit_in_bytes": 9223372036854771712,
                f"{V1}job/memory.limit_in_bytes": 7 * GIB,
                f"{V1}job/step/memory.limit_in_bytes": 9 * GIB,
                f"{V1}x/memory.limit_in_bytes": GIB,
            },
            7 * GIB,
        ),
        ({"proc/self/cgroup": "0::/../of/the/host", f"{V2}memory.max": 2 * GIB}, 2 * GIB),
    ],
    ids=[
        "no cgroup", "v2 without limit", "v2 limit", "limit above the machine", "v1 without limit", "v1 limit",
        "limit of a group above", "a group beside does not count", "nested v1", "path of the host",
    ],
)  # fmt: skip
def test_memory_is_the_machines_or_the_lowest_limit_of_its_groups(kernel, files, limit):
    assert ram.ram_limit_bytes(kernel(files)) == limit


V1_CPU = "sys/fs/cgroup/cpu/"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({f"{V2}cpu.max": "max 100000"}, 8),
        ({f"{V2}cpu.max": "200000 100000"}, 2),
        ({f"{V2}cpu.max": "150000 100000"}, 2),
        ({f"{V2}cpu.max": "20000 100000"}, 1),
        ({f"{V2}cpu.max": "6400000 100000"}, 8),
        ({"proc/self/cgroup": "0::/a/b", f"{V2}a/b/cpu.max": "500000 100000", f"{V2}a/cpu.max": "300000 100000"}, 3),
        ({f"{V1_CPU}cpu.cfs_quota_us": "-1", f"{V1_CPU}cpu.cfs_period_us": "100000"}, 8),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/x\n1:memory:/y",
                f"{V1_CPU}docker/x/cpu.cfs_quota_us": "400000",
                f"{V1_CPU}docker/x/cpu.cfs_period_us": "100000",
                f"{V1_CPU}y/cpu.cfs_quota_us": "100000",
                f"{V1_CPU}y/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
    ids=[
        "no cgroup", "v2 without quota", "v2 quota", "a part of a core", "less than a core", "quota above the machine",
        "quota of a group above", "v1 without quota", "v1 quota",
    ],
)  # fmt: skip
def test_cores_are_those_of_the_process_or_the_lowest_quota_of_its_groups(kernel, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert ram.usable_cores(kernel(files)) == cores


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 50 * GIB),
        ({f"{V2}memory.max": 8 * GIB, f"{V2}memory.current": 3 * GIB}, 5 * GIB),
        (
            {f"{V2}memory.max": 8 * GIB, f"{V2}memory.current": 3 * GIB, f"{V2}memory.stat": f"inactive_file {GIB}"},
            6 * GIB,
        ),
        (
            {
                f"{V1}memory.limit_in_bytes": 8 * GIB,
                f"{V1}memory.usage_in_bytes": 7 * GIB,
                f"{V1}memory.stat": f"cache 1\ninactive_file 5\ntotal_inactive_file {2 * GIB}",
            },
            3 * GIB,
        ),
        ({f"{V2}memory.max": 60 * GIB, f"{V2}memory.current": GIB}, 50 * GIB),
    ],
    ids=[
        "the machine's",
        "v2",
        "v2 with cached files",
        "v1 with cached files",
        "less on the machine than in the group",
    ],
)
def test_free_memory_is_the_lower_of_machine_and_group(kernel, files, free):
    assert ram.ram_free_bytes(kernel(files)) == free
