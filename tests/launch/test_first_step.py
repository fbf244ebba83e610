"""What a start costs that comes to nothing, as a user meets it: real commands, real workers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import HANG_S, wait_until

from sftplay.launch.run_folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

Write = Callable[..., Path]
Sftplay = Callable[..., "subprocess.CompletedProcess[str]"]


def test_data_that_is_refused_costs_neither_the_name_nor_latest_and_mended_it_trains_under_the_same_name(
    write_config: Write, sftplay: Sftplay, chat_rows: Path, tmp_path: Path
):
    output, rows = tmp_path / "outputs", tmp_path / "rows.jsonl"
    lines = chat_rows.read_text().splitlines()
    rows.write_text("\n".join([*lines[:40], '{"messages": 5}', *lines[40:]]) + "\n")
    config = write_config(data__train_path=str(rows))
    done = sftplay("train", "--config", config)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "rows.jsonl:41" in done.stdout
    assert "the name run can be used again" in done.stdout
    assert [path.name for path in output.iterdir()] == [".set-aside"]
    assert len(list((output / ".set-aside").glob("run-*/report.html"))) == 1
    done = sftplay("train", "--config", write_config(data__train_path=str(rows), data__on_bad_row="skip"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert str((output / "latest").readlink()) == "run"
    assert RunFolder(output / "run").read_json("status.json")["state"] == "done"


def test_variables_of_another_launch_in_the_shell_change_nothing(write_config: Write, sftplay: Sftplay, tmp_path: Path):
    strays = {
        "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1",
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_DEEPSPEED": "true",
    }  # fmt: skip
    ends = []
    for name, env in (("plain", {}), ("stray", strays)):
        done = sftplay("train", "--config", write_config(run_name=name), env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        ends.append((tmp_path / "outputs" / name / "adapter" / "adapter_model.safetensors").read_bytes())
    assert "RANK, WORLD_SIZE are not used" in done.stdout
    (rank,) = RunFolder(tmp_path / "outputs" / "stray").read_json("status.json")["ranks"]
    assert (rank["world_size"], rank["distributed_type"]) == (1, "NO")
    assert ends[0] == ends[1]


@pytest.mark.parametrize("processes", [1, 2])
def test_folder_removed_while_its_run_trains_ends_it_with_5_and_leaves_no_process(
    processes: int, write_config: Write, tmp_path: Path
):
    config = write_config(train__max_steps=100_000, train__save_steps=10)
    command = [sys.executable, "-m", "sftplay", "train", "--config", str(config), "--nproc", str(processes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = RunFolder(tmp_path / "outputs" / "run")
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_until(lambda: folder.read_json("status.json").get("step") or process.poll() is not None)
        while folder.resolved.exists():  # the run writes into it at the same time
            shutil.rmtree(folder.path, ignore_errors=True)
        printed = process.communicate(timeout=HANG_S)[0]
    assert process.returncode == 5, printed
    assert f"{folder.path}: removed or moved while the run was going on: " in printed
    assert "config.resolved.yaml" in printed or "the whole folder" in printed
    assert "result:" not in printed
