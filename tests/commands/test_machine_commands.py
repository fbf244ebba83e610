"""gpu-info, memory-check and doctor as a user calls them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG_S

from sftplay.machine.gpu import Gpu, GpuProcess
from sftplay.machine.memory_use import describe_run, read_runs
from sftplay.machine.probe import Machine, probe

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def call(*words, cwd, **env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "sftplay", *words], cwd=cwd, env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


@pytest.fixture
def running(tmp_path):
    """A folder with one running run: this test's own process as its only rank."""
    run = tmp_path / "outputs" / "mine"
    run.mkdir(parents=True)
    status = {"state": "running", "step": 12, "pid": os.getpid(), "ranks": [{"pid": os.getpid()}]}
    (run / "status.json").write_text(json.dumps(status))
    (run / "plan.json").write_text(json.dumps({"peak_bytes": 3 * GIB, "budget_bytes": 8 * GIB}))
    lines = [{"step": 11, "peak_rss_bytes": GIB}, {"step": 12, "peak_rss_bytes": 2 * GIB}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 13, "pea')
    return tmp_path


@pytest.mark.contract
def test_a_running_run_shows_what_was_planned_and_what_each_process_holds(running):
    done = call("memory-check", "--json", cwd=running, CUDA_VISIBLE_DEVICES="")
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["name"], run["step"], run["is_alive"]) == ("mine", 12, True)
    assert (run["planned_bytes"], run["budget_bytes"]) == (3 * GIB, 8 * GIB)
    (rank,) = run["ranks"]
    assert (rank["pid"], rank["peak_bytes"], rank["headroom_bytes"]) == (os.getpid(), 2 * GIB, 6 * GIB)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0 < rank["held_bytes"] <= own * 1.05
    text = call("memory-check", cwd=running, CUDA_VISIBLE_DEVICES="").stdout
    assert "run mine: running, step 12; planned 3.00 GiB of 8.00 GiB" in text
    assert f"rank 0 (process {os.getpid()}): memory, holds " in text
    assert text.rstrip().endswith("peak 2.00 GiB, headroom 6.00 GiB")


def test_on_gpus_each_rank_is_found_by_its_process(running, monkeypatch):
    run = running / "outputs" / "mine"
    pids = [os.getpid(), os.getppid()]
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 3, "ranks": [{"pid": p} for p in pids]}))
    ranks = [{"allocated_bytes": 4 * GIB, "reserved_bytes": 6 * GIB, "peak_bytes": 5 * GIB}, {"peak_bytes": 9 * GIB}]
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "ranks_memory": ranks}) + "\n")
    cards = [
        Gpu(n, "card", 16 * GIB, GIB, (8, 0), processes=(GpuProcess(pid, "python", (7 + n) * GIB),))
        for n, pid in enumerate(pids)
    ]
    machine = Machine(**{**vars(probe()), "gpus": tuple(cards)})
    (result,) = read_runs(running / "outputs", machine)
    assert [(r.gpu, r.held_bytes, r.peak_bytes) for r in result.ranks] == [
        (0, 7 * GIB, 5 * GIB),
        (1, 8 * GIB, 9 * GIB),
    ]
    assert [r.headroom_bytes for r in result.ranks] == [GIB, -GIB]  # 8 - max(6, 5, 7) and 8 - max(9, 8)
    assert describe_run(result)[1] == (
        f"  rank 0 (process {pids[0]}): GPU 0, holds 7.00 GiB, allocated 4.00 GiB, reserved 6.00 GiB, peak 5.00 GiB,"
        " headroom 1.00 GiB"
    )
    assert describe_run(result)[2].endswith("peak 9.00 GiB, headroom -1.00 GiB")


@pytest.mark.contract
def test_a_run_whose_process_has_gone_is_named_and_damaged_files_give_no_traceback(running):
    run = running / "outputs" / "mine"
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 5, "pid": 2**30}))
    (run / "plan.json").write_text("{")
    broken = running / "outputs" / "broken"
    broken.mkdir()
    (broken / "status.json").write_text("[1, 2")
    done = call("memory-check", cwd=running)
    assert done.returncode == 0, done.stderr
    assert "run mine: was running at step 5, but its process has gone; `make resume` goes on" in done.stdout
    assert "broken" not in done.stdout


@pytest.mark.contract
def test_finished_runs_are_none_of_its_business(running):
    (running / "outputs/mine/status.json").write_text(json.dumps({"state": "done", "pid": os.getpid()}))
    assert "no run is going on in outputs" in call("memory-check", cwd=running).stdout
    assert "no run is going on in elsewhere" in call("memory-check", "output_dir=elsewhere", cwd=running).stdout


@pytest.mark.contract
def test_other_keys_without_a_config_are_refused(tmp_path):
    for verb in ("memory-check", "doctor"):
        done = call(verb, "train.batch_size=2", cwd=tmp_path)
        assert done.returncode == 2
        assert "train.batch_size needs a config" in done.stderr


@pytest.mark.contract
def test_watching_shows_it_again_until_it_is_interrupted(running):
    argv = [sys.executable, "-u", "-m", "sftplay", "memory-check", "--watch"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=running, env=env, stdout=subprocess.PIPE, text=True) as process:
        shown = (line for line in process.stdout if "run mine" in line)
        for _ in range(2):
            next(shown)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG_S) == 0


@pytest.mark.contract
def test_watching_and_one_document_do_not_go_together(tmp_path):
    done = call("memory-check", "--watch", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["what"] == "--watch and --json do not go together"


@pytest.mark.contract
def test_the_doctor_ends_with_3_when_a_finding_would_keep_a_run_from_training(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("model: {name: org/never-seen}\ndata: {train_path: rows.jsonl}\n")
    here = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = call("doctor", "--fast", "--json", "--config", str(config), cwd=tmp_path, **here)
    result = json.loads(done.stdout)
    stops = [each for each in result["findings"] if each["level"] == "stop"]
    assert done.returncode == 3
    assert result["stop"] == len(stops)
    assert ("hub", "unset HF_HUB_OFFLINE, then make download-model MODEL=org/never-seen") in [
        (each["subject"], each["fix"]) for each in stops
    ]
    fine = call("doctor", "--fast", cwd=tmp_path, **here)
    expected = 3 if "\nstop " in f"\n{fine.stdout}" else 0
    assert fine.returncode == expected


@pytest.mark.contract
def test_without_a_gpu_it_says_what_the_memory_allows(tmp_path):
    done = call("gpu-info", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["Number of GPUs: 0", "  none: CUDA_VISIBLE_DEVICES hides every GPU"]
    assert any("allows on the CPU: tuning.mode full up to about" in line for line in lines)
    (versions,) = (line for line in lines if line.startswith("Python "))
    assert ", transformers " in versions
    assert ", torch " not in versions  # it has a line of its own, with what it was built for
    result = json.loads(call("gpu-info", "--json", cwd=tmp_path, CUDA_VISIBLE_DEVICES="").stdout)
    assert result["n_gpus"] == 0
    assert 0 < result["ram_free_bytes"] <= result["ram_bytes"]
    assert result["disk_free_bytes"] > 0
