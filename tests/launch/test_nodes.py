"""Two clones of the kit on one machine play two nodes. Both name a node that differs before the start, and their run
equals one of a single node with as many processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from holding import Hold, write_hook
from processes import HANG_S, is_alive, wait_until
from run_outputs import Outputs

from sftplay.machine.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Cluster(Outputs):
    """Folders `node0` and `node1`, each with its own kit, config and data; runs go to a folder that both share."""

    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, name: str, node: int, port: int, *arguments: str, verb: str = "train", **environment: str
    ) -> subprocess.Popen[bytes]:
        place = self.root / f"node{node}"
        argv = [sys.executable, "-m", "sftplay", verb, "--config", "run.yaml", f"run_name={name}", *arguments]
        if port:
            argv += ["--nnodes", "2", "--nproc", "1", "--node-rank", str(node), "--master-port", str(port)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place / "packages"), **environment}
        with (self.root / f"{name}{node}.txt").open("w") as out:
            process = subprocess.Popen(argv, cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.started.append(process)
        return process

    def both(self, name: str, *arguments: str, verb: str = "train") -> list[tuple[int, str]]:
        """Exit code and lines of each node."""
        port = free_port(0)
        pair = [self.start(name, node, port, *arguments, verb=verb) for node in (0, 1)]
        codes = [process.wait(HANG_S) for process in pair]
        return [(code, self.output(name, node)) for node, code in enumerate(codes)]

    def output(self, name: str, node: int) -> str:
        return (self.root / f"{name}{node}.txt").read_text()


@pytest.fixture
def cluster(tmp_path: Path, tiny_llama: Path, chat_rows: Path) -> Iterator[Cluster]:
    values = {
        "output_dir": str(tmp_path / "outputs"),
        "model": {"name": str(tiny_llama), "max_seq_len": 64},
        "tuning": {"mode": "lora", "lora": {"r": 4, "dropout": 0.1}},
        "train": {
            "max_steps": 6, "effective_batch_size": 8, "batch_size": 2, "learning_rate": 0.01, "save_steps": 3,
            "gradient_checkpointing": False,
        },
        "data": {"train_path": "rows.jsonl", "split": 0, "processed_dir": "processed"},
        "logging": {"steps": 1, "backend": "none", "row_ids": True},
    }  # fmt: skip
    for node in (0, 1):
        place = tmp_path / f"node{node}"
        shutil.copytree(ROOT / "sftplay", place / "sftplay", ignore=shutil.ignore_patterns("__pycache__"))
        write_hook(place / "packages")
        (place / "run.yaml").write_text(json.dumps(values))
        shutil.copy(chat_rows, place / "rows.jsonl")
    site = Cluster(tmp_path)
    yield site
    for process in site.started:
        if process.poll() is None:
            process.kill()
            process.wait()


def add_library(node: Path) -> None:
    (node / "packages" / "trl-9.9.dist-info").mkdir()


def change_kit(node: Path) -> None:
    with (node / "sftplay" / "units.py").open("a") as file:
        file.write("\n# mended on this node only\n")


def change_config(node: Path) -> None:
    values = json.loads((node / "run.yaml").read_text())
    (node / "run.yaml").write_text(json.dumps({**values, "seed": 7}))


def break_config(node: Path) -> None:
    (node / "run.yaml").write_text("model: {name: [")


def change_row(node: Path) -> None:
    rows = (node / "rows.jsonl").read_text()
    (node / "rows.jsonl").write_text(rows.replace("e", "a", 1))


def remove_rows(node: Path) -> None:
    (node / "rows.jsonl").unlink()


ODD = [
    (add_library, 3, "trl is 9.9, on node 0 it is 1."),
    (change_kit, 3, "sftplay is "),
    (change_config, 2, "seed is 7, on node 0 it is 42"),
    (break_config, 2, "run.yaml"),
    (change_row, 4, "the path in data.train_path has other content than on node 0"),
    (remove_rows, 4, "rows.jsonl: there is no such file"),
]
"""The change on node 1, the exit code of both nodes, the error of both."""


@pytest.mark.contract
@pytest.mark.parametrize(("spoil", "code", "message"), ODD)
def test_odd_node_is_named_on_both_before_anything_is_made(cluster: Cluster, spoil: Any, code: int, message: str):
    spoil(cluster.root / "node1")
    for ended, output in cluster.both("odd"):
        assert ended == code, output
        assert "nodes: node 1 (" in output
        assert message in output
        assert "fix: " in output
    assert not cluster.folder("odd").path.exists()


@pytest.mark.contract
def test_node_0_that_cannot_begin_says_why_on_the_other_node_too(cluster: Cluster):
    cluster.folder("taken").path.mkdir(parents=True)
    (cluster.folder("taken").path / "config.resolved.yaml").write_text("")
    cluster.folder("taken").metrics.write_text('{"step": 1}\n')
    for code, output in cluster.both("taken"):
        assert code == 2, output
        assert "a run called 'taken' exists" in output


@pytest.mark.contract
@pytest.mark.slow
def test_node_that_does_not_share_the_runs_folder_is_named_before_a_step_is_made(cluster: Cluster):
    for code, output in cluster.both("apart", "output_dir=outputs"):
        assert code == 3, output
        assert "node 1 (" in output
        assert "is not the folder that node 0 has created" in output
    assert not (cluster.root / "node0" / "outputs" / "apart" / "metrics.jsonl").exists()


def weights(cluster: Cluster, name: str) -> bytes:
    return (cluster.folder(name).path / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
def test_run_of_two_nodes_is_the_run_of_two_processes_stopped_and_continued_or_not(cluster: Cluster):
    alone = cluster.start("alone", 0, 0, "--nproc", "2")
    assert alone.wait(HANG_S) == 0, cluster.output("alone", 0)
    for node, (code, output) in enumerate(cluster.both("whole")):
        assert code == 0, output
        assert ("trained to step 6" in output) == (node == 0)
    assert weights(cluster, "whole") == weights(cluster, "alone")
    assert [(rank["world_size"], rank["is_main"]) for rank in cluster.status("whole")["ranks"]] == [
        (2, True),
        (2, False),
    ]

    port, hold = free_port(0), Hold(cluster.root / "stopped")
    # The stop signal reaches one node only; the ranks agree on it.
    pair = []
    for node in (0, 1):
        env = hold.after_step(2, cluster.root / f"node{node}" / "packages")
        pair.append(cluster.start("stopped", node, port, "train.max_steps=6", **env))
    assert hold.wait(pair[0]), cluster.output("stopped", 0)
    pair[1].send_signal(signal.SIGTERM)
    hold.await_signal(pair[1], rank=1)
    hold.let_go()
    assert [process.wait(HANG_S) for process in pair] == [143, 143], cluster.output("stopped", 0)
    assert cluster.status("stopped")["state"] == "stopped"
    pids = [rank["pid"] for rank in cluster.status("stopped")["ranks"]]
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert [code for code, _output in cluster.both("stopped", verb="resume")] == [0, 0]
    assert weights(cluster, "stopped") == weights(cluster, "alone")
    # A job that is queued again after its run is done has nothing to do on any node.
    for code, output in cluster.both("stopped", verb="resume"):
        assert code == 0, output
    assert "is finished: nothing to do" in cluster.output("stopped", 0)


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.parametrize("odd", [pytest.param(0, marks=pytest.mark.long), 1])
def test_rank_that_fails_before_the_ranks_meet_ends_the_run_on_both_nodes_with_its_code(cluster: Cluster, odd: int):
    # Only this node's ranks notice that their cache of rows cannot be created.
    (cluster.root / f"node{odd}" / "processed").write_text("a file")
    codes = [code for code, _output in cluster.both("unready")]
    assert codes == [2, 2], cluster.output("unready", 0)
    assert cluster.status("unready")["exit_code"] == 2
    assert not cluster.status("unready").get("ranks")
    assert "Traceback" not in cluster.output("unready", 0) + cluster.output("unready", 1)


@pytest.mark.slow
def test_lost_node_ends_the_run_on_the_other_one(cluster: Cluster):
    port = free_port(0)
    pair = [cluster.start("lost", node, port, "train.max_steps=100000") for node in (0, 1)]
    wait_until(lambda: cluster.status("lost").get("ranks") or pair[0].poll() is not None)
    pair[1].kill()
    assert pair[0].wait(HANG_S) == 5, cluster.output("lost", 0)
    status = cluster.status("lost")
    assert (status["state"], status["exit_code"]) == ("failed", 5)
    assert "a process on another node died" in status["error"]["what"]
    assert "node 1: has gone" in cluster.output("lost", 0)
    assert "Traceback" not in cluster.output("lost", 0)
    assert not any(is_alive(rank["pid"]) for rank in status["ranks"])
