"""A trial as a job of SLURM, with stand-ins for what asks and calls SLURM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm.job import JobFolder, add_job
from sftplay.launch.slurm.request import JobRequest
from sftplay.runs import sweep_job
from sftplay.runs.sweep_job import TrialJob


class Cluster:
    """What SLURM knows, and what it was asked for."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.state, self.submitted, self.called = folder, "RUNNING", 0, list[str]()
        self.refusal: ConfigError | None = None
        self.is_silent, self.now = False, 1000.0

    def ask(self, _job: int) -> dict[str, str]:
        if self.is_silent:
            raise MachineError("squeue has not answered")
        return {"state": self.state}

    def prepare(self, args: Any, _request: JobRequest) -> Any:
        assert args.overrides == ["train.resume=auto"]
        if self.refusal:
            raise self.refusal
        return self.folder

    def submit(self, _job: Any) -> int:
        self.submitted += 1
        add_job(self.folder.path, 10 + self.submitted)
        return 10 + self.submitted


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    made = Cluster(folder)
    monkeypatch.setattr(sweep_job, "ask_state", made.ask)
    monkeypatch.setattr(sweep_job, "prepare", made.prepare)
    monkeypatch.setattr(sweep_job, "submit", made.submit)
    monkeypatch.setattr(sweep_job, "call", lambda *argv: made.called.append(" ".join(argv)))
    monkeypatch.setattr(sweep_job.time, "monotonic", lambda: made.now)
    return made


def start(cluster: Cluster) -> TrialJob:
    answer = cluster.folder.path / "answer.json"
    return TrialJob(Path("trial.yaml"), cluster.folder, JobRequest(), answer=answer)


def end(cluster: Cluster, code: int | None, said: str = "") -> None:
    job = JobFolder(cluster.folder.path, 11)
    job.path.mkdir()
    job.log.write_text(said)
    if code is not None:
        job.add_life(exit_code=code)
    cluster.state = ""


def test_a_job_that_is_there_is_taken_and_one_that_has_ended_is_followed_by_a_new_one(cluster: Cluster):
    for state, submitted in (("PENDING", 1), ("PENDING", 1), ("COMPLETING", 1), ("CANCELLED", 2), ("RUNNING", 2)):
        cluster.state = state
        start(cluster)
        assert cluster.submitted == submitted


def test_a_run_has_the_code_of_its_jobs_last_attempt_and_the_cause_that_the_job_wrote(cluster: Cluster):
    job = start(cluster)
    end(cluster, 3, "[train] hello\nmodel.name: does not fit\n  fix: take a smaller one\n[job] done\n")
    assert job.poll() is None  # SLURM is asked every few seconds
    cluster.now += sweep_job.ASK_S
    assert job.poll() == job.returncode == job.wait() == 3
    answer = json.loads((cluster.folder.path / "answer.json").read_text())
    assert answer["error"] == {"code": None, "what": "model.name: does not fit", "fix": "take a smaller one"}


def test_a_job_that_was_cancelled_in_the_queue_counts_as_stopped(cluster: Cluster):
    job = start(cluster)
    end(cluster, None)
    cluster.now += sweep_job.ASK_S
    assert job.poll() == 143


def test_a_config_that_submit_refuses_is_a_refused_run(cluster: Cluster):
    cluster.refusal = ConfigError("cannot be split", where="train.effective_batch_size", fix="write 8")
    job = start(cluster)
    assert (job.poll(), cluster.submitted) == (2, 0)
    error = json.loads((cluster.folder.path / "answer.json").read_text())["error"]
    assert (error["where"], error["what"]) == ("train.effective_batch_size", "cannot be split")
    job.kill()
    assert cluster.called == []


def test_slurm_may_be_silent_for_a_while(cluster: Cluster):
    job = start(cluster)
    cluster.is_silent, cluster.now = True, cluster.now + sweep_job.SILENT_S
    assert job.poll() is None
    cluster.now += sweep_job.ASK_S
    with pytest.raises(MachineError, match="has not answered"):
        job.poll()


def test_a_running_job_is_stopped_with_a_checkpoint_and_a_waiting_one_leaves_the_queue(cluster: Cluster):
    job = start(cluster)
    job.send_signal(2)
    cluster.state = "PENDING"
    job.send_signal(2)
    assert cluster.called == ["scancel --batch --signal=TERM 11", "scancel 11"]
