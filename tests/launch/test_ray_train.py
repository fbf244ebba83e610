"""Runs by Ray: what is refused before one begins, the driver's command, and real ones beside torchrun's."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest
from processes import HANG_S, wait_until

from sftplay.cli import main
from sftplay.errors import ConfigError
from sftplay.launch import command as module
from sftplay.launch.command import Scale, launcher_command, ray_command, read_request
from sftplay.launch.ray_train.driver import _Lines

ROOT = Path(__file__).resolve().parents[2]

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: make install EXTRAS=ray")


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts as installed."""
    monkeypatch.setattr(module, "find_spec", lambda name: name)


def refused(options: list[str], environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ray_command(2, options, has_gpu=False, environ=environ or {})
    return caught.value


@pytest.mark.usefixtures("with_ray")
def test_driver_reads_back_what_the_command_asks_for():
    options = ["--placement", "SPREAD", "--resources", "CPU=4,highmem=0.5", "--start-timeout", "10m"]
    words = ray_command(3, options, has_gpu=True, environ={"RAY_ADDRESS": "head:6379"})
    request = read_request([*words[3:], "-m", "sftplay.tasks.worker", "outputs/x"])
    assert (request.workers, request.gpu, request.placement, request.start_timeout) == (3, True, "SPREAD", 600.0)
    assert request.resources == {"CPU": 4.0, "highmem": 0.5}
    assert request.worker == ["sftplay.tasks.worker", "outputs/x"]


@pytest.mark.usefixtures("with_ray")
def test_what_cannot_be_placed_is_refused_before_ray_is_asked():
    assert "two ranks of NCCL cannot share one" in refused(["--resources", "GPU=0.25"]).what
    assert "'fast' is not NAME=NUMBER" in refused(["--resources", "fast"]).what
    assert "invalid choice: 'NEAR'" in refused(["--placement", "NEAR"]).what
    assert refused(["--resources", "highmem=1"]).fix.startswith("set RAY_ADDRESS")
    with pytest.raises(ConfigError, match="places the processes on its nodes itself"):
        launcher_command("ray", Scale(2, nnodes=2), strategy={}, config="")


@pytest.mark.contract
def test_a_process_of_torchrun_and_a_single_worker_are_refused(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = str(write_config())
    assert main(["train-ray", "--config", config, "--workers", "1"]) == 2
    assert "one process needs no Ray" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main(["train-ray", "--config", config]) == 2
    assert "another launch, which has set LOCAL_RANK\n" in capsys.readouterr().err


def test_own_lines_of_a_rank_lose_the_prefix_that_ray_gives_them_and_others_keep_it():
    stream = io.StringIO()
    lines = _Lines(stream)
    for text in (
        "(run_rank pid=7, ip=10.0.0.7) \x1e[train] step 1",
        "\n",
        "(C pid=8) placed\n(run_rank pid=7) \x1c{}\n",
    ):
        lines.write(text)
    lines.write("(PlacementGroupCleaner pid=9) ... State API may be temporarily unavailable. Continuing.\n")
    assert stream.getvalue() == "\x1e[train] step 1\n(C pid=8) placed\n\x1c{}\n"


def curve(run: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["row_ids"]) for line in lines]


def ray_processes() -> list[psutil.Process]:
    """Those of a cluster of the kit's own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("sftplay-ray-" in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.contract
@needs_ray
@pytest.mark.slow
@pytest.mark.fresh_start
def test_two_workers_of_ray_have_the_curve_of_two_processes_of_torchrun(
    write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    sizes = {"train__batch_size": 4, "train__save_steps": 2}
    for name, verb in (("ddp", ["train", "--nproc", 2]), ("ray", ["train-ray", "--workers", 2])):
        done = sftplay(*verb, "--config", write_config(run_name=name, **sizes))
        assert done.returncode == 0, done.stderr + done.stdout
    assert "[train] step 4/4" in done.stdout
    assert curve(tmp_path / "outputs/ray") == curve(tmp_path / "outputs/ddp")
    status = json.loads((tmp_path / "outputs/ray/status.json").read_text())
    assert [rank["model_class"] for rank in status["ranks"]] == ["DistributedDataParallel"] * 2
    wait_until(lambda: not ray_processes())


def started(config: Path, *words: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "sftplay", "train-ray", "--config", str(config), *words]
    return subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def status_of(run: Path) -> dict[str, Any]:
    path = run / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.contract
@needs_ray
@pytest.mark.long
@pytest.mark.fresh_start
def test_run_whose_worker_is_killed_goes_on_from_its_newest_checkpoint_and_ends_as_one_that_is_not(
    write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    long = {"train__batch_size": 4, "train__save_steps": 5, "train__max_steps": 200, "cluster__max_restarts": 1}
    run = tmp_path / "outputs/killed"
    process = started(write_config(run_name="killed", **long))
    wait_until(lambda: (status_of(run).get("step") or 0) >= 20)
    os.kill(status_of(run)["ranks"][1]["pid"], signal.SIGKILL)
    assert process.wait(HANG_S) == 0
    first, second = status_of(run)["attempts"]
    assert first["cause"] == "rank 1 was killed by SIGKILL"
    newest = max(step for step in range(0, 200, 5) if step <= first["to_step"])
    assert newest - 5 <= second["from_step"] <= newest  # the newest one may not have been whole yet
    assert second["from_step"] >= 10
    assert sftplay("train", "--nproc", 2, "--config", write_config(run_name="alone", **long)).returncode == 0
    assert curve(run) == curve(tmp_path / "outputs/alone")


@pytest.mark.contract
@needs_ray
@pytest.mark.long
@pytest.mark.fresh_start
def test_stop_signal_leaves_a_checkpoint_and_no_process_of_ray(write_config: Callable[..., Path], tmp_path: Path):
    long = {"train__batch_size": 4, "train__save_steps": 1000, "train__max_steps": 100_000}
    run = tmp_path / "outputs/stopped"
    process = started(write_config(run_name="stopped", **long))
    wait_until(lambda: (status_of(run).get("ranks") or []) and (run / "metrics.jsonl").exists())
    time.sleep(1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(HANG_S) == 138
    assert list((run / "checkpoints").glob("checkpoint-*/COMPLETE.json"))
    wait_until(lambda: not ray_processes())
