"""Command and environment of the workers: offline where that is possible, caches that can be written, one CPU each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.launch.command import Scale, build_launch, cache_environment
from sftplay.runs.inputs import needs_no_hub

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"}
CACHES = ("HF_HOME", "XDG_CACHE_HOME", "TORCH_HOME")


@pytest.fixture
def launch(monkeypatch):
    """The launch of the demo's config with overrides."""
    monkeypatch.chdir(ROOT)

    def build(*overrides, scale=Scale(), has_gpu=False):  # noqa: B008 - a frozen value
        cfg = load_config("configs/run_demo.yaml", overrides)
        return build_launch(Path("outputs/demo"), scale, has_gpu=has_gpu, is_offline=needs_no_hub(cfg))

    return build


def test_no_connection_is_attempted_when_everything_is_on_this_machine(launch, tmp_path):
    for overrides in (
        [],
        [f"model.name={tmp_path}"],
        ["data.test_path=data/demo/held_out.jsonl"],
        ["data.val_path=null"],
    ):
        assert OFFLINE.issubset(launch(*overrides).env)


def test_one_process_is_started_directly_with_this_python(launch):
    assert launch().argv == (sys.executable, "-m", "sftplay.tasks.worker", "outputs/demo")
    env = launch().env
    assert "ACCELERATE_USE_CPU" not in env
    assert (env["HF_HUB_DISABLE_TELEMETRY"], env["DO_NOT_TRACK"]) == ("1", "1")


def test_two_processes_without_a_gpu_are_told_to_use_the_cpu_and_share_the_cores(launch, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("sftplay.launch.command.usable_cores", lambda: 8)
    started = launch(scale=Scale(2))
    assert started.env["ACCELERATE_USE_CPU"] == "true"
    assert started.env["OMP_NUM_THREADS"] == "4"
    assert "ACCELERATE_USE_CPU" not in launch(scale=Scale(2), has_gpu=True).env
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in launch(scale=Scale(2)).env


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_one_process_starts_no_more_threads_than_a_quota_allows(launch, monkeypatch, has_gpu):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("sftplay.launch.command.visible_cores", lambda: 64)
    monkeypatch.setattr("sftplay.launch.command.usable_cores", lambda: 4)
    assert launch(has_gpu=has_gpu).env["OMP_NUM_THREADS"] == "4"
    monkeypatch.setattr("sftplay.launch.command.usable_cores", lambda: 64)
    assert "OMP_NUM_THREADS" not in launch(has_gpu=has_gpu).env


OF_A_CPU = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "THP_MEM_ALLOC_ENABLE")
OF_A_GPU = ("CUDA_DEVICE_ORDER", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(("has_gpu", "names"), [(False, OF_A_CPU), (True, OF_A_GPU)], ids=["cpu", "gpu"])
def test_the_allocator_is_set_up_for_the_device_unless_the_user_has(launch, monkeypatch, has_gpu, names):
    for name in (*OF_A_CPU, *OF_A_GPU):
        monkeypatch.delenv(name, raising=False)
    assert {*OF_A_CPU, *OF_A_GPU}.intersection(launch(has_gpu=has_gpu).env) == set(names)
    monkeypatch.setenv(names[0], "the user's")
    assert names[0] not in launch(has_gpu=has_gpu).env


@pytest.fixture
def home(monkeypatch):
    """Sets whether the home folder can be written; no cache variable is set."""
    for key in CACHES:
        monkeypatch.delenv(key, raising=False)

    def be(*, writable):
        real = os.access
        own = os.path.expanduser("~")  # noqa: PTH111
        monkeypatch.setattr(os, "access", lambda path, mode: writable if str(path) == own else real(path, mode))

    return be


def test_caches_go_below_the_current_folder_when_home_is_read_only(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home(writable=True)
    assert cache_environment() == {}
    home(writable=False)
    found = cache_environment()
    assert set(found) >= set(CACHES)
    assert all(Path(path).parent == tmp_path / ".cache" for path in found.values())
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert "HF_HOME" not in cache_environment()
    assert "TORCH_HOME" in cache_environment()
