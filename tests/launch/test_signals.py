"""Stop signals to the command and to `make train`, at every moment of a run: it saves its state and leaves no process.

A hook on PYTHONPATH holds the worker at a chosen moment, found by Python's own audit events, until it is let go. It
also tells when a signal has come to the worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import HANG_S, is_alive, wait_until
from project import Project, open_project
from small_run import Inputs

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_STEPS = 9, 3

pytestmark = pytest.mark.slow

MOMENTS = {
    "data are prepared": ("open", r"processed/.*\.part/held_out_chats\.jsonl$"),
    "the model is loaded": ("open", r"modeling_llama[^/]*\.pyc$"),
    "steps are made": ("open", r"checkpoints/checkpoint-3/\.COMPLETE\.json\.\d+$"),
    "a checkpoint is written": ("open", r"checkpoints/checkpoint-6/trainer_state\.json$"),
    "held-out rows are measured": ("open", r"eval/\.step-6\.json\.\d+$"),
    "the result is saved": ("os.mkdir", r"\.adapter\.part$"),
}


def start(project: Project, by: str, name: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start the run as the command or make does from a terminal."""
    environment["PYTHONPATH"] = str(project.hook)
    own = [f"data.processed_dir={project.root / name / 'processed'}"] if "prepared" in name else []
    if by == "command":
        return project.start("train", name, *own, **environment)
    words = [f"READY={project.root / 'stamp'}", f"PY={sys.executable}", "train", f"CONFIG={project.config}"]
    argv = ["make", "--no-print-directory", *words, f"ARGS={' '.join([f'run_name={name}', *own])}"]
    return project.spawn(argv, name, **environment)


def hold(project: Project, by: str, name: str, moment: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a run and return when it is held there, with the pids of all its processes."""
    process = start(project, by, name, **project.holding(name).environment(project.hook, *MOMENTS[moment]))
    return process, [each.pid for each in project.when_held(name, process)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs) -> Iterator[Project]:
    changes = {
        "tuning__lora__dropout": 0.1, "train__max_steps": STEPS, "train__save_steps": SAVE_STEPS,
        "train__eval_steps": SAVE_STEPS, "data__split": 0.2,
    }  # fmt: skip
    with open_project(tmp_path_factory.mktemp("signals"), inputs, **changes) as project:
        (project.root / "stamp").write_text(str(ROOT))
        yield project


@pytest.fixture(scope="module")
def whole(project: Project) -> bytes:
    """The weights of a run without a stop."""
    assert project.run("train", "whole")[0] == 0, project.output("whole")
    return project.adapter("whole")


CASES = [
    ("command", "data are prepared", "SIGTERM", []),
    ("make", "data are prepared", "SIGINT", []),
    ("command", "the model is loaded", "SIGUSR1", []),
    ("make", "the model is loaded", "SIGTERM", []),
    ("make", "steps are made", "SIGUSR1", [3]),
    ("make", "a checkpoint is written", "SIGTERM", [3, 6]),
    pytest.param("command", "a checkpoint is written", "SIGINT", [3, 6], marks=pytest.mark.long),
    pytest.param("make", "held-out rows are measured", "SIGINT", [3, 6], marks=pytest.mark.long),
    ("command", "held-out rows are measured", "SIGHUP", [3, 6]),
    ("command", "the result is saved", "SIGTERM", [6, 9]),
]
"""What starts the run, the moment, the signal, the complete checkpoints afterwards."""


@pytest.mark.contract
@pytest.mark.parametrize(("by", "moment", "name", "complete"), CASES)
def test_a_stop_signal_saves_what_is_due_and_leaves_no_process(
    project: Project, whole: bytes, by: str, moment: str, name: str, complete: list[int]
):
    run, number = f"{by} {moment} {name}".replace(" ", "-"), getattr(signal, name)
    process, pids = hold(project, by, run, moment)
    os.killpg(process.pid, number)
    project.holding(run).await_signal(process)
    project.holding(run).let_go()
    code = process.wait(HANG_S)
    assert code == expected_code(by, number), project.output(run)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    status = project.status(run)
    assert (status["state"], status["exit_code"], status["signal"]) == ("stopped", 128 + number, name)
    assert project.complete(run) == complete
    assert "Traceback" not in project.output(run)
    if not complete:  # the run would start anew, which another test shows
        return
    assert project.run("resume", run)[0] == 0, project.output(run)
    assert project.adapter(run) == whole


def expected_code(by: str, number: int) -> int:
    if by == "command":
        return 128 + number
    # make forwards SIGTERM and then dies of it. SIGUSR1 only makes it print more.
    return 2 if number == signal.SIGUSR1 else -number


@pytest.mark.contract
@pytest.mark.parametrize(
    ("by", "moment", "name"),
    [
        ("command", "a checkpoint is written", "SIGTERM"),
        ("make", "a checkpoint is written", "SIGINT"),
        ("make", "data are prepared", "SIGINT"),
    ],
)
def test_a_second_signal_ends_a_run_at_once_and_the_last_checkpoint_stays(
    project: Project, by: str, moment: str, name: str
):
    run, number = f"twice {by} {moment}".replace(" ", "-"), getattr(signal, name)
    process, pids = hold(project, by, run, moment)
    before = project.complete(run)
    os.killpg(process.pid, number)
    project.holding(run).await_signal(process)
    if "checkpoint" in moment:
        wait_until(lambda: f"{name}: the step is finished" in project.output(run))
    os.killpg(process.pid, number)
    assert process.wait(HANG_S) == expected_code(by, number), project.output(run)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert (project.status(run)["state"], project.status(run)["exit_code"]) == ("stopped", 128 + number)
    assert project.complete(run) == before


@pytest.mark.contract
def test_of_two_runs_under_one_name_the_second_is_refused_and_the_first_unharmed(
    project: Project, whole: bytes, sftplay: Callable[..., subprocess.CompletedProcess[str]]
):
    process, _pids = hold(project, "command", "one-name", "a checkpoint is written")
    before = {path: path.read_bytes() for path in project.folder("one-name").path.rglob("*") if path.is_file()}
    for verb, message in (
        ("train", "a run called 'one-name' exists"),
        ("resume", "run 'one-name' is running (process"),
    ):
        second = sftplay(verb, "--config", project.config, "run_name=one-name")
        assert second.returncode == 2, second.stderr
        assert message in second.stderr
    assert {path: path.read_bytes() for path in project.folder("one-name").path.rglob("*") if path.is_file()} == before
    project.holding("one-name").let_go()
    assert process.wait(HANG_S) == 0, project.output("one-name")
    assert project.adapter("one-name") == whole
    status = project.status("one-name")
    assert [(each["from_step"], each["cause"]) for each in status["attempts"]] == [(0, "done")]


@pytest.mark.contract
def test_of_two_runs_started_at_the_same_moment_under_one_name_one_trains(project: Project, whole: bytes):
    pair = [project.start("train", "same-moment") for _ in range(2)]
    assert sorted(process.wait(HANG_S) for process in pair) == [0, 2], project.output("same-moment")
    assert project.adapter("same-moment") == whole
    assert len(project.status("same-moment")["attempts"]) == 1
