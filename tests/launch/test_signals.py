"""Stop signals to the command and to `make train`, at every moment of a run: it saves its state and leaves no process.

A hook on PYTHONPATH holds the worker at a chosen moment, found by Python's own audit events, until it is let go. It
also tells when a signal has come to the worker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from holding import Hold, write_hook
from processes import HANG_S, is_alive, wait_until
from run_outputs import Outputs

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


@dataclass
class Project(Outputs):
    """A folder with a config, in which the command or make starts runs as from a terminal."""

    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def output(self, name: str) -> str:
        return (self.root / f"{name}.txt").read_text()

    def start(self, by: str, name: str, moment: str | None = None, verb: str = "train") -> subprocess.Popen[bytes]:
        argv = self._argv(by, name, verb)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root / "hook")}
        env.pop("MAKELEVEL", None)
        env.pop("MAKEFLAGS", None)
        if moment:
            env |= self.holding(name).environment(self.root / "hook", *MOMENTS[moment])
        with (self.root / f"{name}.txt").open("a") as out:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.started.append(process)
        return process

    def _argv(self, by: str, name: str, verb: str) -> list[str]:
        config, overrides = str(self.root / "run.yaml"), [f"run_name={name}"]
        if "prepared" in name:
            overrides.append(f"data.processed_dir={self.root / name / 'processed'}")
        if by == "command":
            return [sys.executable, "-m", "sftplay", verb, "--config", config, *overrides]
        ready = [f"READY={self.root / 'stamp'}", f"PY={sys.executable}"]
        return ["make", "--no-print-directory", *ready, verb, f"CONFIG={config}", f"ARGS={' '.join(overrides)}"]

    def hold(self, by: str, name: str, moment: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        """Start a run and return when it is held there, with the pids of all its processes."""
        process = self.start(by, name, moment)
        assert self.holding(name).wait(process), self.output(name)
        return process, [process.pid, *(each.pid for each in psutil.Process(process.pid).children(recursive=True))]

    def holding(self, name: str) -> Hold:
        return Hold(self.root / name)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, chat_rows: Path) -> Iterator[Project]:
    root = tmp_path_factory.mktemp("signals")
    write_hook(root / "hook")
    (root / "stamp").write_text(str(ROOT))
    values = {
        "output_dir": str(root / "outputs"),
        "model": {"name": str(tiny_llama), "max_seq_len": 64},
        "tuning": {"mode": "lora", "lora": {"r": 4, "dropout": 0.1}},
        "train": {
            "max_steps": STEPS, "effective_batch_size": 8, "learning_rate": 0.01, "gradient_checkpointing": False,
            "save_steps": SAVE_STEPS, "eval_steps": SAVE_STEPS,
        },
        "data": {"train_path": str(chat_rows), "split": 0.2, "processed_dir": str(root / "processed")},
        "logging": {"steps": 1, "backend": "none"},
    }  # fmt: skip
    (root / "run.yaml").write_text(json.dumps(values))
    place = Project(root)
    yield place
    for process in place.started:  # a failed test must not leave a run that goes on
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def whole(project: Project) -> bytes:
    """The weights of a run without a stop."""
    assert project.start("command", "whole").wait(HANG_S) == 0, project.output("whole")
    return (project.folder("whole").path / "adapter" / "adapter_model.safetensors").read_bytes()


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
    process, pids = project.hold(by, run, moment)
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
    assert project.start("command", run, verb="resume").wait(HANG_S) == 0, project.output(run)
    assert (project.folder(run).path / "adapter" / "adapter_model.safetensors").read_bytes() == whole


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
    process, pids = project.hold(by, run, moment)
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
    process, _pids = project.hold("command", "one-name", "a checkpoint is written")
    before = {path: path.read_bytes() for path in project.folder("one-name").path.rglob("*") if path.is_file()}
    config = project.root / "run.yaml"
    for verb, message in (
        ("train", "a run called 'one-name' exists"),
        ("resume", "run 'one-name' is running (process"),
    ):
        second = sftplay(verb, "--config", config, "run_name=one-name")
        assert second.returncode == 2, second.stderr
        assert message in second.stderr
    assert {path: path.read_bytes() for path in project.folder("one-name").path.rglob("*") if path.is_file()} == before
    project.holding("one-name").let_go()
    assert process.wait(HANG_S) == 0, project.output("one-name")
    assert (project.folder("one-name").path / "adapter" / "adapter_model.safetensors").read_bytes() == whole
    status = project.status("one-name")
    assert [(each["from_step"], each["cause"]) for each in status["attempts"]] == [(0, "done")]


@pytest.mark.contract
def test_of_two_runs_started_at_the_same_moment_under_one_name_one_trains(project: Project, whole: bytes):
    pair = [project.start("command", "same-moment") for _ in range(2)]
    assert sorted(process.wait(HANG_S) for process in pair) == [0, 2], project.output("same-moment")
    assert (project.folder("same-moment").path / "adapter" / "adapter_model.safetensors").read_bytes() == whole
    assert len(project.status("same-moment")["attempts"]) == 1
