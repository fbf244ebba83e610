"""Trainer and generation server, a real vLLM, under Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from grpo_run import grpo_inputs, grpo_options
from processes import HANG_S, wait_until
from small_run import write_small_run

from sftplay.places import find_vllm_python

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.fresh_start,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: make install EXTRAS=ray"),
    pytest.mark.skipif(find_vllm_python() is None, reason="needs .venv-vllm: make install-vllm"),
]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts a run of two workers on rewards, beside a server."""
    inputs = grpo_inputs(ROOT / "data/base/tiny", tmp_path / "prompts")
    served = {"grpo__generation": "vllm_server", "grpo__vllm__timeout": int(HANG_S), "grpo__logprob_check_steps": 1}

    def begin(**changes: object) -> subprocess.Popen[bytes]:
        options = grpo_options(inputs, **{"train__max_steps": 3, **served, **changes})
        config = write_small_run(tmp_path, inputs, "run.yaml", **options)
        argv = [sys.executable, "-m", "sftplay", "train-ray", "--config", str(config)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (tmp_path / "said.txt").open("wb") as said:
            return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=said, stderr=said)

    return begin


def servers(home: Path) -> list[psutil.Process]:
    """The servers of the run below `home`."""
    log = home / "outputs/run/logs/generation_server.log"
    ports = set(re.findall(r"--port (\d+)", log.read_text())) if log.exists() else set()
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--logprobs-mode" in words and ports & set(words):
            found.append(process)
    return found


@pytest.mark.contract
def test_two_workers_of_ray_learn_from_what_their_server_draws(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
):
    assert start().wait(HANG_S) == 0, (tmp_path / "said.txt").read_text()
    run = tmp_path / "outputs/run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert max(line["sampler_gap"] for line in lines) <= 1e-5
    assert not servers(tmp_path)


@pytest.mark.contract
def test_ranks_end_with_a_server_that_dies(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path):
    process = start(train__max_steps=100_000, train__save_steps=1000)
    metrics = tmp_path / "outputs/run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1)
    (server,) = servers(tmp_path)
    server.send_signal(signal.SIGKILL)
    assert process.wait(HANG_S) == 5, (tmp_path / "said.txt").read_text()
    assert "the generation server has ended with 5 while the run trained" in (tmp_path / "said.txt").read_text()
    status = json.loads((metrics.parent / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 5)


@pytest.mark.contract
def test_a_server_that_cannot_start_ends_the_run_before_it_begins(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
):
    assert start(grpo__vllm__command="no-such-program {port}").wait(HANG_S) == 3
    assert "has ended with 3 before it was ready" in (tmp_path / "said.txt").read_text()
    assert not (tmp_path / "outputs/run/metrics.jsonl").exists()
