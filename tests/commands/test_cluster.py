"""The matrix and setup-accelerate verbs, the shipped accelerate configs, and DeepSpeed's builds."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import HANG_S

from sftplay.cli import main
from sftplay.errors import MachineError
from sftplay.launch.accelerate_settings import accelerate_text
from sftplay.launch.command import Launch
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.doctor import check_builds
from sftplay.runs import strategy_setup

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "accelerate_configs").glob("*.yaml"))

RANKS = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.print("ranks", accelerator.num_processes, accelerator.state.backend)
"""


def loaded(path):
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(path))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_accelerate_reads_a_shipped_file_and_its_launcher_has_each_flag(path):
    from accelerate.commands.launch import launch_command_parser

    config = loaded(path)
    assert config.num_processes >= 1
    assert str(config.distributed_type.value) == {
        "single": "NO", "ddp": "MULTI_GPU", "cpu_ddp": "MULTI_GPU", "multi_node": "MULTI_GPU",
    }.get(path.stem, "FSDP")  # fmt: skip
    flags = {flag for action in launch_command_parser()._actions for flag in action.option_strings}
    assert [name for name in (*config.fsdp_config, *config.parallelism_config) if f"--{name}" not in flags] == []


@pytest.mark.contract
@pytest.mark.slow
def test_the_cpu_file_starts_two_processes_that_talk():
    script = ROOT / ".cache" / "ranks.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(RANKS)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "accelerate_configs/cpu_ddp.yaml"), str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert "ranks 2 gloo" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("gpus", "has_bf16", "expected"),
    [(8, True, (8, "MULTI_GPU", "bf16")), (1, False, (1, "NO", "fp16")), (0, False, (1, "NO", "no"))],
)
def test_what_is_written_for_a_machine_is_read_by_accelerate(tmp_path, gpus, has_bf16, expected):
    path = tmp_path / "here.yaml"
    path.write_text(accelerate_text(path, gpus=gpus, has_bf16=has_bf16))
    config = loaded(path)
    assert (config.num_processes, config.distributed_type.value, config.mixed_precision) == expected
    assert config.use_cpu is (gpus == 0)


@pytest.mark.contract
def test_setup_accelerate_writes_again_but_not_over_a_change(tmp_path, capsys):
    path = tmp_path / "here.yaml"
    assert main(["setup-accelerate", "--out", str(path)]) == 0
    assert main(["setup-accelerate", "--out", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    changed = path.read_text().replace("machine_rank: 0", "machine_rank: 1")
    path.write_text(changed)
    assert main(["setup-accelerate", "--out", str(path)]) == 2
    assert path.read_text() == changed
    assert "stays as it is" in capsys.readouterr().err


def test_setup_accelerate_that_is_cut_off_leaves_no_half_a_file_which_it_would_not_write_over(
    tmp_path, monkeypatch, capsys
):
    path, write = tmp_path / "here.yaml", Path.write_text

    def write_half(target, text, **options):
        write(target, text[:60], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_half)
        assert main(["setup-accelerate", "--out", str(path)]) == 5
        assert capsys.readouterr().err.startswith(f"{path}: No space left on device\n  fix: make room there")
    assert main(["setup-accelerate", "--out", str(path)]) == 0


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 2), (errno.ENOSPC, 5)])
def test_a_disk_that_takes_no_new_file_is_no_bug_and_the_file_is_named(tmp_path, monkeypatch, capsys, number, code):
    """A file system that is mounted for reading, or has no room for one more name."""

    def refuse(target, *_, **__):
        raise OSError(number, os.strerror(number), str(target))

    monkeypatch.setattr(Path, "write_text", refuse)
    path = tmp_path / "here.yaml"
    assert main(["setup-accelerate", "--out", str(path)]) == code
    assert capsys.readouterr().err.startswith(f"{path}: {os.strerror(number)}\n  fix: ")


@pytest.mark.contract
def test_setup_accelerate_does_not_write_over_a_file_that_accelerate_made(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text("num_processes: 4\n")
    assert main(["setup-accelerate", "--out", str(path)]) == 2


@pytest.mark.contract
def test_matrix_as_json_holds_every_cell(capsys):
    assert main(["matrix", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert len(cells) == 3 * 9 * 3
    assert {cell["state"] for cell in cells} == {"works", "gpu", "blocked"}


def test_a_lock_that_no_process_holds_is_found_with_the_command_that_removes_it(tmp_path):
    lock = tmp_path / "a b" / "lock"
    lock.parent.mkdir()
    lock.touch()
    (finding,) = check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert finding.level == "warn"
    subprocess.run(finding.fix, shell=True, check=True)
    assert not lock.exists()
    assert check_builds({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """What would be built, in place of building it: the environment of each start."""
    started = []

    def run(argv, env, **_):
        started.append(env)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(strategy_setup.subprocess, "run", run)
    return started


def test_a_build_is_announced_and_happens_once(builds, tmp_path, capsys):
    strategy_setup.prebuild_optimizer(has_gpu=False)
    assert re.search("building DeepSpeed's CPU optimizer, about 2 min", capsys.readouterr().out)
    (env,) = builds
    assert env["DS_ACCELERATOR"] == "cpu"
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/cpu_adam.so").touch()
    strategy_setup.prebuild_optimizer(has_gpu=False)
    assert len(builds) == 1
    assert capsys.readouterr().out == ""


def test_a_build_that_fails_says_why(builds, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="x.cpp:3: fatal error: no header\nRuntimeError: Error building\n")
    monkeypatch.setattr(strategy_setup.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(MachineError, match="no header"):
        strategy_setup.prebuild_optimizer(has_gpu=False)


def test_a_lock_of_a_killed_build_stops_only_runs_that_build_operators(builds, tmp_path):
    """Without a file of the user's, or by one that moves nothing to the host, DeepSpeed compiles nothing."""
    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam/lock").touch()
    command = Launch(("worker",), {"ACCELERATE_USE_DEEPSPEED": "true"})

    def prepare(file: str | None) -> None:
        cfg = SimpleNamespace(cluster=SimpleNamespace(deepspeed=file))
        strategy_setup.prepare_deepspeed(cfg, RunFolder(tmp_path), command=command)

    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}')
    for file in (None, "deepspeed_configs/zero2.json", "deepspeed_configs/zero3.json"):
        prepare(file and str(ROOT / file))
    for file in (str(ROOT / "deepspeed_configs/zero2_offload.json"), str(own)):
        with pytest.raises(MachineError, match="a build was killed") as refused:
            prepare(file)
        assert refused.value.fix == f"rm {tmp_path}/fused_adam/lock"
    assert builds == []
