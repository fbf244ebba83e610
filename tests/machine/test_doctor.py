"""The doctor: its stops, its warnings, and a remedy for each of them."""

from __future__ import annotations

import json
import re
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import recorded_driver as driver
from packaging.specifiers import SpecifierSet
from processes import HANG_S

from sftplay.machine import doctor
from sftplay.machine import probe as torch_build
from sftplay.machine.doctor import (
    RANGES,
    RunNeeds,
    check_gpus,
    check_hub,
    check_libraries,
    check_torch,
    diagnose,
    is_within,
)
from sftplay.machine.probe import Machine, TorchBuild, find_torch, probe

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
PLAIN = Machine(
    gpus=(), gpu_reason="none in this test", ram_bytes=16 * GIB, cores=2, python="3.11", system="Linux",
    libraries={"torch": "2.13.0+cpu", "transformers": "5.17.0", "trl": "1.14.0", "peft": "0.21.2",
               "accelerate": "1.15.0", "datasets": "4.8.5", "bitsandbytes": "0.50.2", "tensorboard": "2.21.0",
               "pydantic": "2.14.3"},
)  # fmt: skip


def levels(findings) -> dict[str, str]:
    """Subject -> the worst level of its findings."""
    order = ["ok", "warn", "stop"]
    worst: dict[str, str] = {}
    for each in findings:
        worst[each.subject] = max(each.level, worst.get(each.subject, "ok"), key=order.index)
    return worst


@pytest.fixture
def machine_of(monkeypatch):
    """A probed machine of one card with some values changed."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def probed(**changes):
        values = {"total_mib": 40960, "capability": [8, 0], "ecc": 0, **changes}
        card = driver.gpu("NVIDIA A100-SXM4-40GB", **values)
        driver.install(monkeypatch, {"driver": "580.1", "cuda": 13000, "gpus": [card]})
        return replace(probe(in_detail=True), torch=TorchBuild("2.13.0+cu130", "13.0", None, ("sm_80",)))

    return probed


@pytest.mark.parametrize(
    ("changes", "subject", "level"),
    [
        ({"ecc": 2}, "ecc", "stop"),
        ({"remapped": [0, 1, 1, 0]}, "ecc", "warn"),
        ({"remapped": [0, 1, 0, 1]}, "ecc", "stop"),
        ({"temperature_c": 84}, "heat", None),
        ({"temperature_c": 85}, "heat", "warn"),
        ({"compute_mode": 2}, "compute mode", "stop"),
        ({"compute_mode": 3}, "compute mode", None),
        ({"compute_mode": 3, "processes": [[9, "C", "python", 500]]}, "compute mode", "stop"),
        ({"used_mib": 2000}, "gpu memory", "ok"),
        ({"used_mib": 2100}, "gpu memory", "warn"),
        ({"used_mib": 40000}, "gpu memory", "stop"),
    ],
)
def test_the_state_of_a_card_decides_the_finding(machine_of, changes, subject, level):
    assert levels(check_gpus(machine_of(**{"processes": [], **changes}))).get(subject) == level


@pytest.mark.parametrize(
    ("build", "driver_cuda", "expected"),
    [
        (TorchBuild("2.13.0+cpu", None), (13, 0), {"torch": "stop"}),
        (TorchBuild("2.13.0+cu126", "12.6", None, ("sm_80",)), (13, 0), {"torch": "ok", "driver": "ok"}),
        (TorchBuild("2.13.0+cu128", "12.8", None, ("sm_80",)), (12, 2), {"torch": "ok", "driver": "ok"}),
        (TorchBuild("2.13.0+cu130", "13.0", None, ("sm_80",)), (12, 8), {"torch": "ok", "driver": "stop"}),
        (TorchBuild("2.13.0+cu130", "13.0", None, ("sm_90", "sm_120")), (13, 0), {"torch": "stop", "driver": "ok"}),
        (TorchBuild("2.13.0+cu130", "13.0", None, ()), (13, 0), {"torch": "ok", "driver": "ok"}),
    ],
)
def test_torch_must_be_built_for_the_card_and_the_driver_for_its_cuda(machine_of, build, driver_cuda, expected):
    # CUDA 12 programs of any minor version run on driver 525 and later, CUDA 13 needs 580 (CUDA release notes, table 2)
    actual = levels(check_gpus(replace(machine_of(), torch=build, cuda_driver=driver_cuda)))
    assert {name: actual.get(name) for name in expected} == expected


def test_the_ranges_of_libraries_are_those_of_pyproject():
    lines = re.findall(r'^    "([a-z]+)((?:[<>!]=?)[^;"]+)', (ROOT / "pyproject.toml").read_text(), re.M)
    assert {name: bounds for name, bounds in lines if name in RANGES} == RANGES


@pytest.mark.parametrize(
    ("version", "ranges", "within"),
    [
        ("2.13.0+cpu", ">=2.6,<2.15", True),
        ("2.15.0", ">=2.6,<2.15", False),
        ("2.6", ">=2.6.0,<2.15", True),
        ("2.5.9", ">=2.6", False),
        ("1.15.0", ">=1.14,!=1.15.0,<2", False),
        ("1.15.0.1", ">=1.14,!=1.15.0,<2", True),
        ("10.1", ">=9,<11", True),
        ("5.0.0rc1", "<6", True),
    ],
)
def test_a_version_is_compared_as_pip_compares_releases(version, ranges, within):
    assert is_within(version, ranges) is within
    assert SpecifierSet(ranges, prereleases=True).contains(version) is within


@pytest.mark.parametrize(
    ("changes", "extra", "level", "says"),
    [
        ({}, "", "ok", ""),
        ({"trl": None}, "", "stop", "trl is not installed"),
        ({"bitsandbytes": None}, "", "warn", "4-bit"),
        ({"transformers": "6.0"}, "", "warn", "transformers 6.0 is outside"),
        ({"trl": "1.15.0"}, "", "stop", "Triton"),
        ({"datasets": "5.2.0"}, "unsloth", "warn", "pip install 'datasets<5', or use tuning.backend: bnb"),
    ],
)
def test_libraries_must_be_installed_and_fit_together(monkeypatch, changes, extra, level, says):
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if name == extra else None)
    versions = {name: v for name, v in {**PLAIN.libraries, **changes}.items() if v}
    findings = check_libraries(replace(PLAIN, libraries=versions))
    assert levels(findings) == {"versions": level}
    assert says in " ".join(each.as_text() for each in findings)


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        ({"error": "no module"}, "stop"),
        ({"devices": 0, "is_available": False}, "stop"),
        ({"devices": 2, "is_available": True}, "warn"),
        ({"devices": 1, "is_available": True, "nccl": "2.27.5"}, "ok"),
    ],
)
def test_the_gpus_torch_sees_are_compared_with_those_the_driver_shows(machine_of, answer, level):
    (finding,) = check_torch(answer, machine_of())
    assert finding.level == level


def test_room_for_the_kept_checkpoints_and_the_one_being_written_is_needed(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10 * GIB})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    check = doctor.check_disk
    assert [check(tmp_path / "new", size, kept=2)[0].level for size in (3 * GIB, 4 * GIB)] == ["ok", "stop"]
    assert [check(tmp_path, 10 * GIB + more, kept=0)[0].level for more in (0, 1)] == ["ok", "stop"]
    assert check(tmp_path, None, kept=2)[0].level == "ok"
    usage.free = 2 * GIB
    assert check(tmp_path, None, kept=2)[0].level == "warn"
    usage.free = GIB // 2
    assert check(tmp_path, None, kept=2)[0].level == "stop"


NVLINK, NO_NVLINK = (("X", "NV12"), ("NV12", "X")), (("X", "SYS"), ("SYS", "X"))


@pytest.mark.parametrize(
    ("environ", "links", "level"),
    [
        ({}, (), "ok"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, (), "ok"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments"}, (), "stop"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:2"}, (), "warn"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, (), "warn"),
        ({"NCCL_P2P_DISABLE": "1"}, NVLINK, "warn"),
        ({"NCCL_P2P_DISABLE": "1"}, NO_NVLINK, "ok"),
    ],
)
def test_variables_that_are_easily_forgotten_are_checked(machine_of, environ, links, level):
    assert levels(doctor.check_environment(replace(machine_of(), links=links), environ)) == {"environment": level}


@contextmanager
def hub(status: int):
    """A hub on this machine that answers everything with `status`, and the list of its requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "token", "expected"),
    [
        (200, "", {"hub": "ok", "hub token": "ok"}),
        (404, "", {"hub": "ok", "hub token": "ok"}),
        (200, "hf_secretsecret", {"hub": "ok", "hub token": "ok"}),
        (401, "hf_secretsecret", {"hub": "ok", "hub token": "warn"}),
    ],
)
def test_the_hub_is_asked_once_and_the_token_is_never_shown(tmp_path, monkeypatch, status, token, expected):
    monkeypatch.setattr("sftplay.machine.doctor.WAIT_S", HANG_S)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with hub(status) as (address, requests):
        environ = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_TOKEN": token}
        findings = check_hub(None, is_fast=False, environ=environ)
    assert levels(findings) == expected
    assert requests == [("/api/whoami-v2", f"Bearer {token}") if token else ("/", None)]
    assert "secret" not in " ".join(each.as_text() for each in findings)


def test_a_hub_that_does_not_answer_or_is_not_asked_matters_only_for_models_that_are_not_cached(tmp_path):
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert levels(check_hub(None, is_fast=False, environ=offline)) == {"hub": "ok"}
    (finding,) = check_hub("org/model", is_fast=True, environ=offline)
    assert (finding.level, finding.fix) == ("stop", "unset HF_HUB_OFFLINE, then make download-model MODEL=org/model")
    with socket.socket() as closed:  # bound and not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        assert levels(check_hub("org/model", is_fast=False, environ=environ)) == {"hub": "warn"}
        snapshot = tmp_path / "hub/models--org--model/snapshots/abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        assert levels(check_hub("org/model", is_fast=False, environ=environ)) == {"hub": "ok"}


def test_every_finding_that_is_not_ok_has_a_remedy_and_the_fast_doctor_does_not_ask_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ask_torch", lambda: pytest.fail("torch was asked"))
    for name in driver.MACHINES:
        driver.install(monkeypatch, driver.recorded(name))
        findings = diagnose(probe(in_detail=True), RunNeeds(output=tmp_path), is_fast=True)
        assert {each.subject for each in findings} >= {"gpu", "versions", "memory", "disk", "ports", "open files"}
        assert [each for each in findings if each.level != "ok" and not each.fix] == []
    monkeypatch.setattr(doctor, "ask_torch", lambda: {"error": "asked"})
    monkeypatch.setattr(doctor, "check_hub", lambda *args, **kwargs: [])
    findings = diagnose(PLAIN, RunNeeds(output=tmp_path, wants_4bit=True), is_fast=False)
    assert "cannot be imported: asked" in json.dumps([each.what for each in findings])


def test_the_build_read_from_files_is_the_one_torch_reports(tmp_path, monkeypatch):
    import torch

    build = find_torch(with_archs=True)
    assert (build.version, build.cuda, build.hip) == (torch.__version__, torch.version.cuda, torch.version.hip)
    assert list(build.archs) == torch.cuda.get_arch_list()
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    monkeypatch.setattr(torch_build, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert find_torch() == TorchBuild("2.13.0+cu130", "13.0")
