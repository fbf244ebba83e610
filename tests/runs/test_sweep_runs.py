"""Sweeps as a user starts them: killed and continued, pruned, shared by two processes, and the best trained again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import documents
import psutil
import pytest
from processes import HANG_S, wait_until
from project import Project, open_project
from small_run import Inputs

from sftplay.cli import main

pytest.importorskip("optuna", reason="needs the extra sweep")
pytestmark = pytest.mark.slow

STEPS = 16
GRID = "train.learning_rate=0.0003,0.001,0.003,0.006 train.warmup_ratio=0,0.3"
WORKER = "sftplay.tasks.worker"
DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"


class Sweeps(Project):
    """Sweeps of one config, each under its name."""

    def sweep(self, name: str, *words: str, grid: str = GRID) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sftplay", "sweep", "--config", str(self.config), "--grid", grid]
        return self.spawn([*argv, "--name", name, *words], name)

    def finish(self, name: str, *words: str, grid: str = GRID) -> list[dict[str, Any]]:
        assert self.sweep(name, *words, grid=grid).wait(HANG_S) == 0, self.output(name)
        return self.rows(name)

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.root / "outputs" / "sweeps" / name / "trials.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        tuple(str(row[key]) for key in ("number", "state", "params", "figure", "cause", "compared")) for row in rows
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs, builtin_tiny: Path) -> Iterator[Sweeps]:
    root = tmp_path_factory.mktemp("sweeps")
    held_out = root / "held_out.jsonl"
    held_out.write_text("".join((DEMO / "held_out.jsonl").read_text().splitlines(keepends=True)[:12]))
    changes = {
        "model__name": "builtin:tiny", "model__max_seq_len": 128, "tuning": {"mode": "full"}, "train__max_steps": STEPS,
        "train__eval_steps": 2, "train__save_steps": 3, "data__train_path": str(DEMO / "train.jsonl"),
        "data__val_path": str(held_out), "data__split": None,
    }  # fmt: skip
    with open_project(root, inputs, **changes) as opened:
        yield Sweeps(opened.root, opened.started)


@pytest.fixture(scope="module")
def whole(project: Sweeps) -> list[dict[str, Any]]:
    """Eight trials, each trained to its end."""
    return project.finish("whole", "--parallel", "2")


@pytest.fixture(scope="module")
def halved(project: Sweeps) -> list[dict[str, Any]]:
    """The same with successive halving."""
    return project.finish("halved", "--halving", "2", "--parallel", "2")


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return min((row for row in rows if row["state"] == "done"), key=lambda row: row["figure"])


@pytest.mark.contract
def test_halving_saves_two_fifths_of_the_steps_and_finds_the_same_winner(whole, halved):
    assert [row["state"] for row in whole] == ["done"] * 8
    assert best(halved)["params"] == best(whole)["params"]
    assert best(halved)["figure"] == best(whole)["figure"]
    trained, planned = sum(row["step"] for row in halved), sum(row["steps"] for row in halved)
    print(
        f"halving: {trained} of {planned} steps, {1 - trained / planned:.0%} saved; states",
        [r["state"] for r in halved],
    )
    assert planned == 8 * STEPS
    assert trained <= 0.6 * planned


@pytest.mark.contract
def test_a_sweep_that_is_killed_at_random_ends_with_the_same_table(project, halved):
    chance, kills = random.Random(), ["sweep"] * 3 + ["run"] * 3
    chance.shuffle(kills)
    words = ("--halving", "2", "--parallel", "2")
    process = project.sweep("killed", *words)

    def find_workers() -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [p for p in psutil.Process(process.pid).children(recursive=True) if WORKER in p.cmdline()]
        return []

    def has_worker_or_end() -> bool:  # a fast machine may be done before the last kill
        return bool(find_workers()) or process.poll() is not None

    for kind in kills:
        time.sleep(chance.uniform(0.5, 3.0))
        if kind == "run":
            wait_until(has_worker_or_end)
            for worker in find_workers()[:1]:
                worker.kill()
        else:
            process.kill()
            process.wait()
            process = project.sweep("killed", *words)
    assert process.wait(HANG_S) == 0, project.output("killed")
    assert project.output("killed").count("killed by SIGKILL") >= 1
    assert table(project.rows("killed")) == table(halved)


@pytest.mark.contract
def test_its_document_and_the_lines_of_its_table_are_as_the_schema_says(project, halved, capsys):
    words = ["sweep", "--config", str(project.config), "--grid", GRID, "--name", "halved", "--halving", "2", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    documents.check(answer, "verbs/sweep")
    assert answer["trials"] == halved
    for row in halved:
        documents.check(row, "files/trials.jsonl")
    with pytest.raises(AssertionError, match=r"\$\.state"):
        documents.check({**halved[0], "state": "lost"}, "files/trials.jsonl")


@pytest.mark.contract
def test_two_processes_share_a_sweep_and_train_each_trial_once(project, whole):
    grid = "train.learning_rate=0.001,0.006 train.warmup_ratio=0,0.3"
    both = [project.sweep("shared", grid=grid) for _ in range(2)]
    assert [process.wait(HANG_S) for process in both] == [0, 0], project.output("shared")
    rows = project.rows("shared")
    assert [(row["number"], row["state"]) for row in rows] == [(number, "done") for number in range(4)]
    assert [len(project.status(Path(row["run"]).name)["attempts"]) for row in rows] == [1] * 4
    figures = {str(row["params"]): row["figure"] for row in whole}
    assert [row["figure"] for row in rows] == [figures[str(row["params"])] for row in rows]
    started = [line for line in project.output("shared").splitlines() if "(of 4)" in line]
    assert len(started) == len(set(started)) == 4


@pytest.mark.contract
def test_the_best_config_trains_again_to_the_same_figure(project, halved):
    config = project.root / "outputs" / "sweeps" / "halved" / "best.yaml"
    argv = [sys.executable, "-m", "sftplay", "train", "--config", str(config)]
    assert project.spawn(argv, "again").wait(HANG_S) == 0, project.output("again")
    again = json.loads((project.root / "outputs" / "halved-best" / "eval" / f"step-{STEPS}.json").read_text())
    assert again["loss"] == best(halved)["figure"]


@pytest.mark.contract
def test_a_stopped_sweep_keeps_a_checkpoint_and_the_same_command_goes_on(project, whole):
    grid = "train.learning_rate=0.001 train.warmup_ratio=0"
    process = project.sweep("stopped", grid=grid)
    wait_until(lambda: list(project.folder("stopped-trial-000").eval.glob("step-4.json")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 130, project.output("stopped")
    assert project.status("stopped-trial-000")["state"] == "stopped"
    assert project.complete("stopped-trial-000")
    assert project.rows("stopped")[0]["state"] == "stopped"
    row = project.finish("stopped", grid=grid)[0]
    assert len(project.status("stopped-trial-000")["attempts"]) == 2
    assert row["figure"] in [other["figure"] for other in whole if other["params"] == row["params"]]


@pytest.mark.contract
def test_trials_that_config_or_memory_refuse_count_and_a_figure_that_is_not_finite_fails(project):
    grid = "train.learning_rate=0.001,1e30 train.effective_batch_size=8,6 train.max_steps=4 train.batch_size=4"
    rows = project.finish("refused", grid=grid)
    assert [row["state"] for row in rows] == ["done", "refused", "failed", "refused"]
    assert (
        rows[1]["cause"].startswith("GRID train.effective_batch_size: ") or "effective_batch_size" in rows[1]["cause"]
    )
    assert "not finite" in rows[2]["cause"]
    assert "not finite" in (project.root / "outputs" / "sweeps" / "refused" / "report.html").read_text()
