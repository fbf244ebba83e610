"""`cluster.nccl` in the environment of several processes: what is set, what is refused, and where nothing is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.load import load_config
from sftplay.errors import ConfigErrors
from sftplay.launch.command import Scale
from sftplay.launch.nccl import nccl_environment
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.sizing import size_run
from sftplay.runs.start import build_command

ROOT = Path(__file__).resolve().parents[2]
LOGS = Path("outputs/run/logs")
INTERFACES = ("lo", "eth0", "eth1")
CARD = Gpu(0, "NVIDIA H100", 80 * 2**30, 79 * 2**30, (9, 0))


@pytest.fixture(autouse=True)
def no_network_of_our_own(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in list(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_")):
            monkeypatch.delenv(name)


def environment(*overrides: str, has_gpu: bool = True, **environ: str) -> dict[str, str]:
    cfg = load_config("configs/run_demo.yaml", [f"cluster.nccl.{override}" for override in overrides])
    return nccl_environment(cfg, LOGS, has_gpu=has_gpu, environ=environ, interfaces=INTERFACES)


def problems_of(*overrides: str, **environ: str) -> list[Any]:
    with pytest.raises(ConfigErrors) as caught:
        environment(*overrides, **environ)
    return caught.value.problems


def test_nothing_is_set_by_default_but_the_place_of_torchs_own_records():
    assert environment() == {"TORCH_FR_DUMP_TEMP_FILE": "outputs/run/logs/flight-recorder-rank"}
    assert environment(has_gpu=False) == {}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("ib_disable=false", {"NCCL_IB_DISABLE": "0"}),
        ("ib_gid_index=0", {"NCCL_IB_GID_INDEX": "0"}),
        ("flight_recorder=0", {"TORCH_FR_BUFFER_SIZE": "0"}),
        ("flight_recorder=9000", {"TORCH_FR_BUFFER_SIZE": "9000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
    ],
)
def test_each_key_sets_the_variable_that_the_library_documents(override: str, expected: dict[str, str]):
    assert environment(override).items() - environment().items() == expected.items()
    assert environment(override, has_gpu=False) == {}


def test_an_interface_is_named_to_both_libraries_each_in_its_own_spelling():
    # NCCL's manual: a name alone is a prefix. "=" before the whole list makes all names exact.
    env = environment("socket_ifname=eth0, eth1")
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("=eth0,eth1", "eth0,eth1")
    assert environment("socket_ifname=eth0", has_gpu=False) == {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize("name", ["eth2", "=eth0", "^docker", "eth0,"])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(name: str):
    (problem,) = problems_of(f"socket_ifname={name}")
    assert problem.where == "command line cluster.nccl.socket_ifname"
    assert "this machine has no network interface" in problem.what
    assert "choose from lo, eth0, eth1" in problem.fix


def test_a_variable_of_the_shell_that_says_otherwise_is_refused_and_never_overridden():
    problems = problems_of("debug=INFO", "ib_disable=true", NCCL_DEBUG="WARN", NCCL_IB_DISABLE="0")
    assert [problem.where for problem in problems] == [
        "command line cluster.nccl.debug",
        "command line cluster.nccl.ib_disable",
    ]
    assert problems[0].what == "would set NCCL_DEBUG=INFO, but the environment has NCCL_DEBUG=WARN"
    assert problems[0].fix == "unset NCCL_DEBUG, or remove cluster.nccl.debug"


def launched(processes: int, *overrides: str, gpus: int = 0) -> dict[str, str]:
    machine = Machine((CARD,) * gpus, "" if gpus else "none in this test", 2**34, 2, "3.11", "Linux", {})
    cfg = load_config("configs/run_demo.yaml", ["train.effective_batch_size=8", *overrides])
    sized = size_run(cfg, machine, world_size=processes)
    return dict(build_command(sized.cfg, RunFolder(LOGS.parent), scale=Scale(processes), machine=machine).env)


def test_workers_of_several_processes_get_them_and_a_single_process_none():
    override = "cluster.nccl.socket_ifname=lo"
    assert launched(2, override)["GLOO_SOCKET_IFNAME"] == "lo"
    assert launched(2, "cluster.nccl.debug=WARN", gpus=2)["NCCL_DEBUG"] == "WARN"
    alone = launched(1, override, "cluster.nccl.debug=WARN", gpus=1)
    assert not any(name.startswith(("NCCL_", "GLOO_", "TORCH_FR_")) for name in alone)
