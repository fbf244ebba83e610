"""GRPO with a real vLLM on a CPU: what it samples is of the model that learns, and runs survive the loss of either."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import HANG_S, is_alive, wait_until
from safetensors.torch import load_file
from small_run import Inputs, write_small_run
from torch import Tensor
from toy_server import run_by_vllm_python, served
from vllm_trainings import DATA, GREEDY, ROOT, STEPS, toy, warm_start

from sftplay.places import find_vllm_python
from sftplay.signals import popen_tied

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fresh_start,
    pytest.mark.skipif(find_vllm_python() is None, reason="needs .venv-vllm: make install-vllm"),
]

BOUND = 1e-5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-training")


@pytest.fixture(scope="module")
def warm(home: Path) -> Path:
    return warm_start(home)


@pytest.fixture(scope="module")
def server(home: Path, warm: Path) -> Iterator[tuple[str, int]]:
    """A server as a user starts it; its address and pid."""
    with served(home, warm) as found:
        yield found


@pytest.fixture(scope="module")
def trained(home: Path, server: tuple[str, int], warm: Path) -> dict[str, Any]:
    """The trainings of `vllm_trainings`."""
    found: dict[str, Any] = run_by_vllm_python("vllm_trainings", home, server[0], str(warm))
    return found


def lines_of(trained: dict[str, Any], name: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = trained[name]["metrics"]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    return lines


def weights_in(folder: str | Path) -> dict[str, Tensor]:
    (path,) = Path(folder).glob("*.safetensors")
    return load_file(path)


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of a weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


SAMPLED = ["vllm_server", "vllm_server, lora", "vllm_server, adapter", "vllm_colocate"]


@pytest.mark.parametrize("name", SAMPLED)
def test_what_vllm_samples_is_of_the_model_that_learns_in_each_step(name: str, trained: dict[str, Any]):
    lines = lines_of(trained, name)
    gaps = [line["sampler_gap"] for line in lines]
    assert max(gaps) <= BOUND, gaps
    assert any(line["zero_variance_share"] < 1 for line in lines), "nothing was learned, so no weight was to be sent"


@pytest.mark.parametrize("kind", ["vllm_server", "vllm_colocate"])
def test_greedy_answers_have_the_rewards_and_teach_the_weights_of_those_by_transformers(
    kind: str, trained: dict[str, Any], warm: Path
):
    plain, by_vllm = (lines_of(trained, f"greedy by {name}") for name in ("transformers", kind))
    for key in ("reward/tests", "reward/syntax", "completion_tokens", "held_out_reward"):
        assert [line.get(key) for line in by_vllm] == [line.get(key) for line in plain], key
    start, one, other = (
        weights_in(folder)
        for folder in (
            warm,
            *(trained[f"greedy by {name}"]["result"] for name in ("transformers", kind)),
        )
    )
    assert farthest(start, one) > 100 * BOUND
    assert farthest(one, other) <= BOUND


class Run:
    """The toy, greedy by vllm_server, started as a user does."""

    def __init__(self, home: Path, trained: dict[str, Any], warm: Path) -> None:
        self.home, self.reference = home / "run", Path(trained["greedy by vllm_server"]["result"])
        inputs = Inputs(warm, DATA / "train.jsonl", DATA / "held_out.jsonl")
        changes = {**GREEDY, "grpo__generation": "vllm_server", "grpo__vllm__timeout": int(HANG_S)}
        config = write_small_run(
            self.home, inputs, "run.yaml", train__warmup_ratio=0.0, **toy(train__save_steps=1, **changes)
        )
        self.config, self.folder, self.said = str(config), self.home / "outputs/run", self.home / "said.txt"

    def start(self, verb: str, *words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sftplay", verb, "--config", self.config, *words]
        with self.said.open("ab") as said:
            return popen_tied(argv, output=said.fileno(), env={"OMP_NUM_THREADS": "1"}, cwd=ROOT)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return found

    def await_step(self, process: subprocess.Popen[bytes], step: int) -> int:
        """The pid of the worker, once a checkpoint of the step is complete."""
        marker = self.folder / f"checkpoints/checkpoint-{step}/COMPLETE.json"
        wait_until(lambda: process.poll() is not None or marker.exists(), 2 * HANG_S)
        assert process.poll() is None, self.said.read_text()[-3000:]
        return int(self.status()["pid"])

    def own_server(self) -> psutil.Process:
        """The server that the kit has started last."""
        port = re.findall(r"ready at http://\S+:(\d+)", (self.folder / "logs/generation_server.log").read_text())[-1]
        (found,) = [
            process
            for process in psutil.process_iter(["cmdline"])
            if (words := process.info["cmdline"] or []) and {port, "--model"} <= {*words}
        ]
        return found


def test_runs_go_on_after_the_death_of_trainer_of_server_and_of_both(
    home: Path, trained: dict[str, Any], server: tuple[str, int], warm: Path
):
    requests = pytest.importorskip("requests", reason="needs requests: make install EXTRAS=harness")
    run, url = Run(home, trained, warm), f"grpo.vllm.url={server[0]}"

    process = run.start("train", url)
    os.kill(run.await_step(process, 1), signal.SIGKILL)
    assert process.wait(HANG_S) == 5
    assert "SIGKILL" in run.status()["error"]["what"]
    # However far it came, the server now stands where a trainer leaves it that dies while it sends weights.
    requests.post(f"{server[0]}/start_weight_update", json={}, timeout=HANG_S)

    process = run.start("resume", url)
    worker = run.await_step(process, 2)
    os.killpg(server[1], signal.SIGKILL)
    assert process.wait(HANG_S) == 5
    assert server[0] in run.status()["error"]["what"], run.status()
    assert not is_alive(worker)

    # Without an address the kit starts the server, and both once more where both have died.
    process = run.start("resume", "cluster.max_restarts=1")
    worker = run.await_step(process, 3)
    lost = run.own_server()
    lost.kill()
    os.kill(worker, signal.SIGKILL)
    assert process.wait(2 * HANG_S) == 0, run.said.read_text()[-3000:]
    assert "the generation server has ended with" in run.said.read_text()
    assert not [child for child in psutil.process_iter(["cmdline"]) if str(run.folder) in str(child.info["cmdline"])]

    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert [line["reward"] for line in lines] == [line["reward"] for line in lines_of(trained, "greedy by vllm_server")]
    assert farthest(weights_in(run.folder / "model"), weights_in(run.reference)) <= BOUND
