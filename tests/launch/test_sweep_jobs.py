"""A sweep whose trials are jobs of a real SLURM cluster: killed and started again it goes on with the jobs it had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import HANG_S, wait_until
from slurm_cluster import SlurmCluster, slurm_cluster, why_not
from small_run import Inputs, write_small_run

pytest.importorskip("optuna", reason="needs the extra sweep")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(why_not()), reason=f"a SLURM cluster {why_not()}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    yield from slurm_cluster()


def test_trials_are_jobs_that_a_killed_sweep_finds_again(cluster: SlurmCluster, tmp_path: Path, inputs: Inputs):
    config = write_small_run(tmp_path, inputs, run_name="jobs", train__eval_steps=2, train__batch_size=4)
    grid = "train.learning_rate=0.001,0.01 train.effective_batch_size=8,7"
    argv = [sys.executable, "-m", "sftplay", "sweep", "--config", str(config), "--grid", grid, "--submit"]
    environment = {**os.environ, **cluster.environment, "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*argv, "--parallel", "2"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    first = start()
    wait_until(lambda: list(tmp_path.glob("outputs/jobs-trial-*/slurm.jsonl")) or first.poll() is not None)
    first.kill()
    first.communicate()
    said, _ = (process := start()).communicate(timeout=HANG_S)
    assert process.returncode == 0, said
    path = tmp_path / "outputs" / "sweeps" / "jobs" / "trials.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["state"] for row in rows] == ["done", "refused", "done", "refused"], said
    assert "effective_batch_size" in rows[1]["cause"]
    jobs = [len((Path(rows[n]["run"]) / "slurm.jsonl").read_text().splitlines()) for n in (0, 2)]
    assert jobs == [1, 1]
    figures = [json.loads((Path(rows[n]["run"]) / "eval" / "step-4.json").read_text())["loss"] for n in (0, 2)]
    assert [rows[n]["figure"] for n in (0, 2)] == figures
